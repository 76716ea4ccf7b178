# Finds a working nvcc. Sets EDGEYOLO_NVCC_FOUND.
# CMAKE_CUDA_COMPILER is never preset: check_language() would then skip its trial, and a dangling nvcc would be a fatal
# error instead of a CPU build.
set(EDGEYOLO_NVCC_FOUND OFF)
if(NOT EDGEYOLO_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "EDGEYOLO_CUDA must be AUTO, ON or OFF, found '${EDGEYOLO_CUDA}'")
endif()
if(NOT EDGEYOLO_CUDA STREQUAL "OFF")
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND "$ENV{CUDACXX}" STREQUAL "")
    find_program(EDGEYOLO_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(EDGEYOLO_NVCC)
      set(ENV{CUDACXX} "${EDGEYOLO_NVCC}")
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(EDGEYOLO_NVCC_FOUND ON)
  elseif(EDGEYOLO_CUDA STREQUAL "ON")
    message(FATAL_ERROR "EDGEYOLO_CUDA=ON needs a working nvcc and none was found: install the CUDA toolkit, "
      "put nvcc on PATH or set CUDACXX, or build for the CPU with EDGEYOLO_CUDA=OFF")
  endif()
endif()
message(STATUS "edgeyolo: EDGEYOLO_CUDA=${EDGEYOLO_CUDA}, nvcc found: ${EDGEYOLO_NVCC_FOUND}")
