# The test TensorRT, one library edgeyolo_test_tensorrt<major> for each major whose headers were found, and the tests of
# the adapter and the loader over it, edgeyolo_trt<major>_tests.
# Needs cmake/tensorrt.cmake, cmake/kernels.cmake, driver.cmake and the target edgeyolo_gtest.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(fakes "${PROJECT_SOURCE_DIR}/tests/fakes")
foreach(major IN LISTS EDGEYOLO_TENSORRT_MAJORS)
  set(target edgeyolo_test_tensorrt${major})
  set(headers "${EDGEYOLO_TENSORRT_INCLUDE_${major}}")
  set(generated "${CMAKE_CURRENT_BINARY_DIR}/nvinfer${major}")
  add_custom_command(OUTPUT "${generated}/nvinfer_defaults.hpp"
    COMMAND Python3::Interpreter "${fakes}/gen_nvinfer.py" "${headers}" "${generated}/nvinfer_defaults.hpp"
    DEPENDS "${fakes}/gen_nvinfer.py" "${headers}/NvInferImpl.h" VERBATIM)
  add_library(${target} MODULE "${fakes}/nvinfer.cpp" "${fakes}/toy_network.cpp" "${fakes}/nvinfer_twins.cpp"
    "${PROJECT_SOURCE_DIR}/cpp/cuda_driver.cpp" "${generated}/nvinfer_defaults.hpp")
  target_include_directories(${target} PRIVATE "${generated}" "${fakes}" "${PROJECT_SOURCE_DIR}/cpp")
  target_compile_options(${target} PRIVATE -ffp-contract=off)
  edgeyolo_use_tensorrt_headers(${target} ${major})
  edgeyolo_embed_kernels(${target} "${fakes}/nvinfer_kernels.cu")
  target_link_libraries(${target} PRIVATE edgeyolo_warnings ${CMAKE_DL_LIBS})
  if(EDGEYOLO_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${EDGEYOLO_SANITIZE} -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${EDGEYOLO_SANITIZE})
  endif()

  set(tests edgeyolo_trt${major}_tests)
  add_executable(${tests} "${PROJECT_SOURCE_DIR}/tests/cpp/adapter_test.cpp"
    "${PROJECT_SOURCE_DIR}/tests/cpp/loader_test.cpp")
  target_include_directories(${tests} PRIVATE "${fakes}")
  target_link_libraries(${tests} PRIVATE edgeyolo_core edgeyolo_warnings edgeyolo_gtest ${CMAKE_DL_LIBS})
  target_compile_definitions(${tests} PRIVATE EDGEYOLO_TEST_MAJOR=${major}
    EDGEYOLO_TEST_ADAPTERS="$<TARGET_FILE_DIR:_trt${major}>"
    EDGEYOLO_TEST_TENSORRT="$<TARGET_FILE:${target}>"
    EDGEYOLO_FAKE_CUDA_PATH="$<TARGET_FILE:edgeyolo_fake_cuda>")
  add_dependencies(${tests} _trt${major} ${target} edgeyolo_fake_cuda)
  add_test(NAME ${tests} COMMAND ${tests})
  set_tests_properties(${tests} PROPERTIES ENVIRONMENT "EDGEYOLO_FAKE_DEVICES=2")
endforeach()
