// The driver table against NVIDIA's own typedefs: compiled where the CUDA toolkit is installed, never run. An enum of
// CUDA's is an int of the table's.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <type_traits>

#include "cuda_driver.hpp"

namespace {

template <class Ours, class Theirs>
constexpr bool same() {
    if constexpr (std::is_enum_v<Theirs>)
        return std::is_same_v<Ours, int> && sizeof(Theirs) == sizeof(int);
    else if constexpr (std::is_pointer_v<Theirs> && std::is_enum_v<std::remove_pointer_t<Theirs>>)
        return std::is_same_v<Ours, int*>;
    else
        return std::is_same_v<Ours, Theirs>;
}
template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class... Ours, class... Theirs>
struct SameCall<int (*)(Ours...), CUresult (*)(Theirs...)>
    : std::bool_constant<sizeof...(Ours) == sizeof...(Theirs) && (same<Ours, Theirs>() && ...)> {};

// The newest revision up to 12.0 of each function.
#define MATCHES(name, revision) \
    static_assert(SameCall<decltype(edgeyolo::cuda::Driver::name), PFN_##name##_v##revision>::value, #name);
MATCHES(cuInit, 2000)
MATCHES(cuDriverGetVersion, 2020)
MATCHES(cuGetErrorName, 6000)
MATCHES(cuGetErrorString, 6000)
MATCHES(cuDeviceGetCount, 2000)
MATCHES(cuDeviceGet, 2000)
MATCHES(cuDeviceGetName, 2000)
MATCHES(cuDeviceGetAttribute, 2000)
MATCHES(cuDeviceTotalMem, 3020)
MATCHES(cuDevicePrimaryCtxRetain, 7000)
MATCHES(cuDevicePrimaryCtxRelease, 11000)
MATCHES(cuCtxPushCurrent, 4000)
MATCHES(cuCtxPopCurrent, 4000)
MATCHES(cuCtxGetCurrent, 4000)
MATCHES(cuMemGetInfo, 3020)
MATCHES(cuMemAlloc, 3020)
MATCHES(cuMemFree, 3020)
MATCHES(cuMemHostAlloc, 2020)
MATCHES(cuMemFreeHost, 2000)
MATCHES(cuMemHostGetDevicePointer, 3020)
MATCHES(cuMemcpyHtoDAsync, 3020)
MATCHES(cuMemcpyDtoHAsync, 3020)
MATCHES(cuMemcpyDtoDAsync, 3020)
MATCHES(cuMemsetD8Async, 3020)
MATCHES(cuPointerGetAttributes, 7000)
MATCHES(cuStreamCreate, 2000)
MATCHES(cuStreamDestroy, 4000)
MATCHES(cuStreamSynchronize, 2000)
MATCHES(cuStreamQuery, 2000)
MATCHES(cuStreamWaitEvent, 3020)
MATCHES(cuStreamBeginCapture, 10010)
MATCHES(cuStreamEndCapture, 10000)
MATCHES(cuThreadExchangeStreamCaptureMode, 10010)
MATCHES(cuStreamIsCapturing, 10000)
MATCHES(cuEventCreate, 2000)
MATCHES(cuEventDestroy, 4000)
MATCHES(cuEventRecord, 2000)
MATCHES(cuEventQuery, 2000)
MATCHES(cuEventSynchronize, 2000)
MATCHES(cuEventElapsedTime, 2000)
MATCHES(cuModuleLoadData, 2000)
MATCHES(cuModuleUnload, 2000)
MATCHES(cuModuleGetFunction, 2000)
MATCHES(cuLaunchKernel, 4000)
MATCHES(cuGraphGetNodes, 10000)
MATCHES(cuGraphDestroy, 10000)
MATCHES(cuGraphInstantiateWithFlags, 11040)
MATCHES(cuGraphUpload, 11010)
MATCHES(cuGraphLaunch, 10000)
MATCHES(cuGraphExecDestroy, 10000)

static_assert(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT == 16 && CU_DEVICE_ATTRIBUTE_INTEGRATED == 18 &&
              CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR == 75 && CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR == 76);
static_assert(CU_POINTER_ATTRIBUTE_MEMORY_TYPE == 2 && CU_POINTER_ATTRIBUTE_IS_MANAGED == 8 &&
              CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL == 9 && CU_POINTER_ATTRIBUTE_RANGE_START_ADDR == 11 &&
              CU_POINTER_ATTRIBUTE_RANGE_SIZE == 12 && CU_MEMORYTYPE_HOST == 1 && CU_MEMORYTYPE_DEVICE == 2);
static_assert(CU_STREAM_NON_BLOCKING == 1 && CU_EVENT_DISABLE_TIMING == 2 && CU_MEMHOSTALLOC_PORTABLE == 1 &&
              CU_MEMHOSTALLOC_DEVICEMAP == 2 && CU_STREAM_CAPTURE_MODE_THREAD_LOCAL == 1 &&
              CU_GET_PROC_ADDRESS_LEGACY_STREAM == 1 && CU_STREAM_CAPTURE_STATUS_INVALIDATED == 2);
static_assert(CUDA_ERROR_OUT_OF_MEMORY == int{edgeyolo::cuda::out_of_memory} &&
              CUDA_ERROR_DEINITIALIZED == int{edgeyolo::cuda::deinitialized} &&
              CUDA_ERROR_NOT_READY == int{edgeyolo::cuda::not_ready});

}  // namespace
