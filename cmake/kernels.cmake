# edgeyolo_embed_kernels(<target> <source.cu>...)
#
# Compiles each source to one fatbin (machine code for every architecture, PTX of the newest) and embeds it in <target>
# as `extern "C" const unsigned char edgeyolo_<name of the source>_image[]`, for cuModuleLoadData. An ordinary CUDA object
# would pull in the CUDA runtime; a fatbin needs the driver alone.
#
# Without nvcc the same symbol holds a text with the kernels' names instead, which the simulated driver of the tests
# accepts (tests/fakes/twins.hpp) and a real driver refuses.
#
# Architectures: CMAKE_CUDA_ARCHITECTURES or the environment's CUDAARCHS, in CMake's notation (90, 90-real, 90-virtual,
# native, all, all-major); otherwise those of the list below that this nvcc knows.

set(EDGEYOLO_ARCHITECTURES 75 80 86 87 89 90 100 101 103 110 120 121)

# nvcc's -gencode options for what is asked for.
function(edgeyolo_gencode result)
  set(asked "${CMAKE_CUDA_ARCHITECTURES}")
  if(NOT asked)
    set(asked "$ENV{CUDAARCHS}")
  endif()
  if(NOT asked)
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
      OUTPUT_VARIABLE known RESULT_VARIABLE code ERROR_VARIABLE error)
    if(NOT code EQUAL 0)
      message(FATAL_ERROR "${CMAKE_CUDA_COMPILER} --list-gpu-code failed (nvcc 11.4 or newer is needed), or name the "
        "architectures with CMAKE_CUDA_ARCHITECTURES:\n${error}")
    endif()
    foreach(architecture IN LISTS EDGEYOLO_ARCHITECTURES)
      if(known MATCHES "sm_${architecture}[\r\n]")
        list(APPEND asked "${architecture}-real")
        set(newest ${architecture})
      endif()
    endforeach()
    list(APPEND asked "${newest}-virtual")
  endif()

  set(options "")
  foreach(architecture IN LISTS asked)
    if(architecture MATCHES "^(native|all|all-major)$")
      list(APPEND options "-arch=${architecture}")
    elseif(architecture MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      set(number "${CMAKE_MATCH_1}")
      if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
        list(APPEND options "-gencode=arch=compute_${number},code=sm_${number}")
      endif()
      if(NOT CMAKE_MATCH_2 STREQUAL "-real")
        list(APPEND options "-gencode=arch=compute_${number},code=compute_${number}")
      endif()
    else()
      message(FATAL_ERROR "cannot read the CUDA architecture '${architecture}': expected e.g. 90, 90-real, 90-virtual, "
        "native, all or all-major")
    endif()
  endforeach()
  message(STATUS "edgeyolo: kernels for ${asked}")
  set(${result} "${options}" PARENT_SCOPE)
endfunction()

if(EDGEYOLO_NVCC_FOUND)
  edgeyolo_gencode(EDGEYOLO_GENCODE)
endif()
set(EDGEYOLO_IMAGE_TEMPLATE "${CMAKE_CURRENT_LIST_DIR}/kernel_image.cpp.in")

function(edgeyolo_embed_kernels target)
  foreach(source IN LISTS ARGN)
    get_filename_component(source "${source}" ABSOLUTE)
    get_filename_component(name "${source}" NAME_WE)
    set(folder "${CMAKE_CURRENT_BINARY_DIR}/kernels")
    file(MAKE_DIRECTORY "${folder}")
    if(EDGEYOLO_NVCC_FOUND)
      set(image "${folder}/${name}.fatbin")
      # Contraction to FMA would round otherwise than the CPU's code does.
      add_custom_command(OUTPUT "${image}"
        COMMAND "${CMAKE_CUDA_COMPILER}" -fatbin -std=c++17 -O3 --fmad=false -Xfatbin -compress-all ${EDGEYOLO_GENCODE}
          "-I${PROJECT_SOURCE_DIR}/cpp" -MD -MF "${image}.d" -MT "${image}" -o "${image}" "${source}"
        DEPENDS "${source}" DEPFILE "${image}.d"
        COMMENT "Compiling GPU kernels of ${name}.cu" VERBATIM)
    else()
      set(image "${folder}/${name}.names")
      set(text "EDGEYOLO-SIMULATED-KERNELS\n")
      edgeyolo_kernel_names(kernels "${source}")
      foreach(kernel IN LISTS kernels)
        string(APPEND text "${kernel}\n")
      endforeach()
      file(CONFIGURE OUTPUT "${image}" CONTENT "${text}" @ONLY)
    endif()
    set(symbol "edgeyolo_${name}_image")
    configure_file("${EDGEYOLO_IMAGE_TEMPLATE}" "${folder}/${name}_image.cpp" @ONLY)
    set_source_files_properties("${folder}/${name}_image.cpp" PROPERTIES OBJECT_DEPENDS "${image}")
    target_sources(${target} PRIVATE "${folder}/${name}_image.cpp")
  endforeach()
endfunction()

# The names of the __global__ functions of a source, which is read again whenever it changes.
function(edgeyolo_kernel_names result source)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(READ "${source}" text)
  string(REGEX MATCHALL "__global__[ \r\n]+void[^;{]*" heads "${text}")
  set(names "")
  foreach(head IN LISTS heads)
    string(REGEX REPLACE "__launch_bounds__\\([^)]*\\)" "" head "${head}")
    if(head MATCHES "([A-Za-z_][A-Za-z0-9_]*)[ \r\n]*\\(")
      list(APPEND names "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  if(NOT names)
    message(FATAL_ERROR "no __global__ function found in ${source}")
  endif()
  set(${result} "${names}" PARENT_SCOPE)
endfunction()
