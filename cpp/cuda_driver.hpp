// The table of CUDA driver functions: the only CUDA dependency of the core. libcuda is opened at first use, so that the
// core loads on machines without a GPU. Everything else uses the handles of cuda.hpp.
#pragma once
#include <sys/types.h>
#include <cstddef>
#include <string>
#include "error.hpp"

// The driver's opaque handles, under the names that CUDA's own headers use: a stream of ours is a cudaStream_t too.
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

namespace edgeyolo::cuda {

using ContextHandle = CUctx_st*;
using ModuleHandle = CUmod_st*;
using FunctionHandle = CUfunc_st*;
using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using GraphHandle = CUgraph_st*;
using GraphNodeHandle = CUgraphNode_st*;
using GraphExecHandle = CUgraphExec_st*;
// An address in device memory. An integer, so that host code cannot read through it by mistake.
using DevicePtr = unsigned long long;

// Every function is asked from cuGetProcAddress at this version, whatever the installed driver offers: the signatures
// below are those of CUDA 12.0, and later drivers keep them under that number. (cuGraphInstantiate changed its
// signature between 11 and 12; cuGraphInstantiateWithFlags never did.)
constexpr int driver_api_version = 12000;

// CALL(name, parameters...). The comment gives the revision that 12.0 resolves to, where there were several.
#define EDGEYOLO_DRIVER_CALLS(CALL)                                                                                    \
    CALL(cuInit, unsigned flags)                                                                                       \
    CALL(cuDriverGetVersion, int* version)                                                                             \
    CALL(cuGetErrorName, int code, const char** text)                                                                  \
    CALL(cuGetErrorString, int code, const char** text)                                                                \
    CALL(cuDeviceGetCount, int* count)                                                                                 \
    CALL(cuDeviceGet, int* device, int ordinal)                                                                        \
    CALL(cuDeviceGetName, char* name, int size, int device)                                                            \
    CALL(cuDeviceGetAttribute, int* value, int attribute, int device)                                                  \
    CALL(cuDeviceTotalMem, std::size_t* bytes, int device)             /* 3.2 */                                       \
    CALL(cuDevicePrimaryCtxRetain, ContextHandle* context, int device) /* 7.0 */                                       \
    CALL(cuDevicePrimaryCtxRelease, int device)                        /* 11.0 */                                      \
    CALL(cuCtxPushCurrent, ContextHandle context)                      /* 4.0 */                                       \
    CALL(cuCtxPopCurrent, ContextHandle* context)                      /* 4.0 */                                       \
    CALL(cuCtxGetCurrent, ContextHandle* context)                                                                      \
    CALL(cuMemGetInfo, std::size_t* free, std::size_t* total) /* 3.2 */                                                \
    CALL(cuMemAlloc, DevicePtr* pointer, std::size_t bytes)   /* 3.2 */                                                \
    CALL(cuMemFree, DevicePtr pointer)                        /* 3.2 */                                                \
    CALL(cuMemHostAlloc, void** pointer, std::size_t bytes, unsigned flags)                                            \
    CALL(cuMemFreeHost, void* pointer)                                                                                 \
    CALL(cuMemHostGetDevicePointer, DevicePtr* device, void* host, unsigned flags)                   /* 3.2 */         \
    CALL(cuMemcpyHtoDAsync, DevicePtr to, const void* from, std::size_t bytes, StreamHandle stream)  /* 3.2 */         \
    CALL(cuMemcpyDtoHAsync, void* to, DevicePtr from, std::size_t bytes, StreamHandle stream)        /* 3.2 */         \
    CALL(cuMemcpyDtoDAsync, DevicePtr to, DevicePtr from, std::size_t bytes, StreamHandle stream)    /* 3.2 */         \
    CALL(cuMemsetD8Async, DevicePtr to, unsigned char value, std::size_t bytes, StreamHandle stream) /* 3.2 */         \
    CALL(cuPointerGetAttributes, unsigned count, int* attributes, void** values, DevicePtr pointer)                    \
    CALL(cuStreamCreate, StreamHandle* stream, unsigned flags)                                                         \
    CALL(cuStreamDestroy, StreamHandle stream) /* 4.0 */                                                               \
    CALL(cuStreamSynchronize, StreamHandle stream)                                                                     \
    CALL(cuStreamQuery, StreamHandle stream)                                                                           \
    CALL(cuStreamWaitEvent, StreamHandle stream, EventHandle event, unsigned flags)                                    \
    CALL(cuStreamBeginCapture, StreamHandle stream, int mode) /* 10.1 */                                               \
    CALL(cuStreamEndCapture, StreamHandle stream, GraphHandle* graph)                                                  \
    CALL(cuStreamIsCapturing, StreamHandle stream, int* status)                                                        \
    CALL(cuThreadExchangeStreamCaptureMode, int* mode) /* 10.1 */                                                      \
    CALL(cuEventCreate, EventHandle* event, unsigned flags)                                                            \
    CALL(cuEventDestroy, EventHandle event) /* 4.0 */                                                                  \
    CALL(cuEventRecord, EventHandle event, StreamHandle stream)                                                        \
    CALL(cuEventQuery, EventHandle event)                                                                              \
    CALL(cuEventSynchronize, EventHandle event)                                                                        \
    CALL(cuEventElapsedTime, float* milliseconds, EventHandle from, EventHandle to) /* 2.0 */                          \
    CALL(cuModuleLoadData, ModuleHandle* module, const void* image)                                                    \
    CALL(cuModuleUnload, ModuleHandle module)                                                                          \
    CALL(cuModuleGetFunction, FunctionHandle* function, ModuleHandle module, const char* name)                         \
    CALL(cuLaunchKernel, FunctionHandle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
         unsigned block_y, unsigned block_z, unsigned shared, StreamHandle stream, void** params, void** extra)        \
    CALL(cuGraphGetNodes, GraphHandle graph, GraphNodeHandle* nodes, std::size_t* count)                               \
    CALL(cuGraphDestroy, GraphHandle graph)                                                                            \
    CALL(cuGraphInstantiateWithFlags, GraphExecHandle* exec, GraphHandle graph, unsigned long long flags)              \
    CALL(cuGraphUpload, GraphExecHandle exec, StreamHandle stream)                                                     \
    CALL(cuGraphLaunch, GraphExecHandle exec, StreamHandle stream)                                                     \
    CALL(cuGraphExecDestroy, GraphExecHandle exec)

// Results that the core tells apart (CUresult).
enum Result : int {
    success = 0,
    out_of_memory = 2,
    deinitialized = 4,
    not_ready = 600,
};
// True when the context is beyond use after this result (device lost, illegal address, ...): nothing on this device can
// succeed any more in this process, so that a fallback would only hide the cause.
bool is_fatal(int code) noexcept;

// What a failed driver call throws.
struct DriverError : DeviceError {
    DriverError(int result, const std::string& message) : DeviceError(message), code(result) {}
    int code;  // CUresult
    bool fatal() const noexcept { return is_fatal(code); }
};

struct Driver {
    // Opens the library and calls cuInit. An empty path means libcuda.so.1 of the system. DeviceError says which
    // library was tried and what to do.
    explicit Driver(const std::string& path);
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

#define EDGEYOLO_DRIVER_MEMBER(name, ...) int (*name)(__VA_ARGS__) = nullptr;
    EDGEYOLO_DRIVER_CALLS(EDGEYOLO_DRIVER_MEMBER)
#undef EDGEYOLO_DRIVER_MEMBER

    std::string library;  // the path that was opened, as the system resolved it
    int version = 0;      // of the driver: 12040 is 12.4
    int device_count = 0;

    // Throws a DriverError "call detail on device N: NAME: text" unless code is success. Device -1 is left out.
    void check(int code, const char* call, const std::string& detail = {}, int device = -1) const {
        if (code != success) fail(code, call, detail, device);
    }
    [[noreturn]] void fail(int code, const char* call, const std::string& detail, int device) const;
    // "CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    std::string text(int code) const;
    // CUDA does not survive fork(): true in a child of the process that opened the driver.
    bool forked() const noexcept;
    // Any other driver function, for tests and benchmarks; the caller casts it.
    void* lookup(const char* name, int api_version = driver_api_version) const;

private:
    using GetProcAddress = int (*)(const char*, void**, int, unsigned long long, int*);
    GetProcAddress get_proc_address_ = nullptr;
    pid_t pid_ = 0;
};

// The driver of this process, opened at the first call: the library named by the environment variable
// EDGEYOLO_CUDA_DRIVER (a path) or libcuda.so.1. It lives until the process ends. A failure is not remembered: the next
// call tries again. Throws DeviceError without a usable driver, and after fork().
const Driver& driver();

}  // namespace edgeyolo::cuda
