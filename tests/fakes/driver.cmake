# The simulated CUDA driver, for tests only: built with EDGEYOLO_TESTS, never installed.
# Other tests/fakes/*.cmake add their kernels' twins by target_sources(edgeyolo_fake_cuda PRIVATE ...).
add_library(edgeyolo_fake_cuda SHARED
  ${CMAKE_CURRENT_LIST_DIR}/driver.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver_control.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver_entry.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver_graphs.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver_memory.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver_streams.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver_work.cpp)
target_include_directories(edgeyolo_fake_cuda PRIVATE ${CMAKE_CURRENT_LIST_DIR} ${PROJECT_SOURCE_DIR}/cpp)
find_package(Threads REQUIRED)
target_link_libraries(edgeyolo_fake_cuda PRIVATE edgeyolo_warnings Threads::Threads)
# The twins round like the CPU's kernels.
target_compile_options(edgeyolo_fake_cuda PRIVATE -ffp-contract=off)
if(EDGEYOLO_SANITIZE)
  target_compile_options(edgeyolo_fake_cuda PRIVATE -fsanitize=${EDGEYOLO_SANITIZE} -fno-omit-frame-pointer -g)
  target_link_options(edgeyolo_fake_cuda PRIVATE -fsanitize=${EDGEYOLO_SANITIZE})
endif()

# Where the CUDA toolkit is installed, its typedefs check the table of driver calls. Headers only.
find_package(CUDAToolkit QUIET)
if(CUDAToolkit_FOUND)
  add_library(edgeyolo_driver_signatures OBJECT ${PROJECT_SOURCE_DIR}/tests/cpp/driver_signatures.cpp)
  target_include_directories(edgeyolo_driver_signatures PRIVATE ${PROJECT_SOURCE_DIR}/cpp)
  target_include_directories(edgeyolo_driver_signatures SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(edgeyolo_driver_signatures PRIVATE edgeyolo_warnings)
endif()
