// Devices, streams, memory, kernels and graphs of the CUDA driver, as owned values. No YOLO words here.
//
// Contexts: everything happens in a device's primary context, the one that TensorRT and ONNX Runtime use. Constructors
// and destructors of this file make it current themselves. Every other call wants a ContextGuard of the device in
// scope; the guard leaves the caller's current context and device as they were.
// Captures of others: a capture in global mode (ONNX Runtime's, torch's) forbids many calls to every thread whose own
// mode is global too, the default, and dies of the attempt. All calls here run in thread-local mode: neither is harmed.
// Threads: a handle may be used from any thread, one thread at a time. A Device may be shared freely.
// Destructors never throw. After fork(), on a lost device and at process exit they do nothing; cleanup_report() counts.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include "cuda_driver.hpp"
#include "live.hpp"

namespace edgeyolo::cuda {

class Device;
// Every handle keeps its device, hence the primary context, alive.
using DeviceRef = std::shared_ptr<const Device>;

class Device {
public:
    // Retains the primary context of device `ordinal` without making it current.
    static DeviceRef open(int ordinal);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const Driver& driver;
    const int ordinal;
    std::string name;
    int compute_major = 0;
    int compute_minor = 0;
    int multiprocessors = 0;
    bool integrated = false;  // shares its memory with the CPU (Jetson): pinned memory can be read in place
    std::size_t total_memory = 0;
    ContextHandle context = nullptr;

    void check(int code, const char* call, const std::string& detail = {}) const {
        if (code != success) driver.fail(code, call, detail, ordinal);
    }

private:
    Device(const Driver& driver, int ordinal);
    int handle_ = 0;
};

// Makes the device's primary context current, and the thread's capture mode thread-local, for one scope. Throws
// DeviceError after fork().
class ContextGuard {
public:
    explicit ContextGuard(const Device& device);
    ~ContextGuard();
    ContextGuard(const ContextGuard&) = delete;
    ContextGuard& operator=(const ContextGuard&) = delete;

private:
    const Device& device_;
    int callers_mode_ = 0;
};

struct MemoryInfo {
    std::size_t free = 0;
    std::size_t total = 0;
};
// Of the whole device, other processes included.
MemoryInfo memory_info(const Device& device);

// Where a pointer from somebody else points to.
struct PointerInfo {
    enum class Kind {
        host,
        pinned,
        device,
        managed
    } kind = Kind::host;    // host: memory that CUDA does not know
    int device = -1;        // ordinal; -1 for host
    DevicePtr begin = 0;    // the allocation that contains it, where the
    std::size_t bytes = 0;  // driver tells; 0 otherwise
};
// device: any one that is current; the pointer may belong to another.
PointerInfo pointer_info(const Device& device, DevicePtr pointer);

// What destructors could not do, since the process started.
struct CleanupReport {
    long failed = 0;      // destroying calls that returned an error (the handle is gone all the same)
    long after_fork = 0;  // handles left alone because they belong to the parent process
    std::string last;     // text of the latest failure
};
CleanupReport cleanup_report();

// One destroying call, as under a ContextGuard; reports instead of throwing, does nothing after fork().
class Cleanup {
public:
    Cleanup(const Device& device, const char* call) noexcept;
    ~Cleanup();
    Cleanup(const Cleanup&) = delete;
    Cleanup& operator=(const Cleanup&) = delete;
    bool possible() const noexcept { return possible_; }
    void result(int code) noexcept;

private:
    const Device& device_;
    const char* call_;
    bool possible_ = false;
    bool pushed_ = false;
    int callers_mode_ = 0;
};

// One handle and the device that it belongs to; move-only. Destroy names the call and the live counter.
template <class Handle, class Destroy>
class Owned {
public:
    Owned() = default;
    Owned(DeviceRef device, Handle handle) noexcept : device_(std::move(device)), handle_(handle) {
        ++(live().*Destroy::counter);
    }
    Owned(Owned&& other) noexcept
        : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, Handle{})) {}
    Owned& operator=(Owned&& other) noexcept {
        Owned(std::move(other)).swap(*this);
        return *this;
    }
    ~Owned() { reset(); }

    Handle get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != Handle{}; }
    const DeviceRef& device() const noexcept { return device_; }
    void swap(Owned& other) noexcept {
        std::swap(device_, other.device_);
        std::swap(handle_, other.handle_);
    }
    void reset() noexcept {
        if (handle_ == Handle{}) return;
        {
            Cleanup cleanup(*device_, Destroy::call);
            if (cleanup.possible()) cleanup.result((device_->driver.*Destroy::function)(handle_));
        }
        --(live().*Destroy::counter);
        handle_ = Handle{};
        device_.reset();
    }

private:
    DeviceRef device_;
    Handle handle_{};
};

#define EDGEYOLO_DESTROY(type, name, live_counter)                   \
    struct type {                                                    \
        static constexpr const char* call = #name;                   \
        static constexpr auto function = &Driver::name;              \
        static constexpr auto counter = &LiveCounters::live_counter; \
    };
EDGEYOLO_DESTROY(DestroyStream, cuStreamDestroy, streams)
EDGEYOLO_DESTROY(DestroyEvent, cuEventDestroy, events)
EDGEYOLO_DESTROY(DestroyGraph, cuGraphDestroy, graphs)
EDGEYOLO_DESTROY(DestroyGraphExec, cuGraphExecDestroy, graph_execs)
EDGEYOLO_DESTROY(UnloadModule, cuModuleUnload, modules)
EDGEYOLO_DESTROY(FreeDevice, cuMemFree, device_buffers)
EDGEYOLO_DESTROY(FreePinned, cuMemFreeHost, pinned_buffers)
#undef EDGEYOLO_DESTROY

// Counts bytes for as long as it lives; moves with its buffer.
template <std::atomic<long> LiveCounters::* Counter>
class LiveBytes {
public:
    explicit LiveBytes(std::size_t bytes = 0) noexcept : bytes_(bytes) { live().*Counter += static_cast<long>(bytes); }
    LiveBytes(LiveBytes&& other) noexcept : bytes_(std::exchange(other.bytes_, 0)) {}
    LiveBytes& operator=(LiveBytes&& other) noexcept {
        LiveBytes taken(std::move(other));
        std::swap(bytes_, taken.bytes_);
        return *this;
    }
    ~LiveBytes() { live().*Counter -= static_cast<long>(bytes_); }
    std::size_t get() const noexcept { return bytes_; }

private:
    std::size_t bytes_;
};

// Device memory, uninitialised, aligned to 256 bytes at least. 0 bytes is an empty buffer.
class DeviceBuffer {
public:
    DeviceBuffer() = default;
    DeviceBuffer(const DeviceRef& device, std::size_t bytes);
    DevicePtr pointer() const noexcept { return memory_.get(); }
    std::size_t bytes() const noexcept { return bytes_.get(); }

private:
    Owned<DevicePtr, FreeDevice> memory_;
    LiveBytes<&LiveCounters::device_bytes> bytes_;
};

// Page-locked host memory: the only host memory that a graph may record, and the only one that copies asynchronously.
// On an integrated device it is mapped as well: kernels read it in place through device_pointer().
class PinnedBuffer {
public:
    PinnedBuffer() = default;
    PinnedBuffer(const DeviceRef& device, std::size_t bytes);
    std::uint8_t* data() const noexcept { return static_cast<std::uint8_t*>(memory_.get()); }
    template <class T>
    T* as() const noexcept {
        return static_cast<T*>(memory_.get());
    }
    std::size_t bytes() const noexcept { return bytes_.get(); }
    bool mapped() const noexcept { return mapped_ != 0; }
    // DeviceError where the buffer is not mapped.
    DevicePtr device_pointer() const;

private:
    Owned<void*, FreePinned> memory_;
    DevicePtr mapped_ = 0;
    LiveBytes<&LiveCounters::pinned_bytes> bytes_;
};

class Stream;

class Event {
public:
    Event() = default;
    explicit Event(const DeviceRef& device, bool timing = false);
    EventHandle get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    void record(const Stream& stream) const;
    // A stream of somebody else, e.g. the producer of a GPU frame.
    void record(StreamHandle stream) const;
    // An event that was never recorded is done.
    bool done() const;
    void synchronize() const;
    // Milliseconds between two events made with timing, both done.
    float since(const Event& start) const;

private:
    Owned<EventHandle, DestroyEvent> handle_;
};

class GraphExec;

class Graph {
public:
    Graph() = default;
    Graph(DeviceRef device, GraphHandle handle) : handle_(std::move(device), handle) {}
    GraphHandle get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    std::size_t node_count() const;
    GraphExec instantiate() const;

private:
    Owned<GraphHandle, DestroyGraph> handle_;
};

// Launches of one GraphExec run one after the other; never launch or destroy it from two threads at once.
class GraphExec {
public:
    GraphExec() = default;
    GraphExec(DeviceRef device, GraphExecHandle handle) : handle_(std::move(device), handle) {}
    GraphExecHandle get() const noexcept { return handle_.get(); }
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }
    // Moves the graph's set-up to now instead of the first launch.
    void upload(const Stream& stream) const;
    void launch(const Stream& stream) const;

private:
    Owned<GraphExecHandle, DestroyGraphExec> handle_;
};

enum class CaptureStatus {
    none = 0,
    active = 1,
    invalidated = 2
};

// A non-blocking stream: it does not wait for the legacy default stream, nor does that wait for it.
class Stream {
public:
    Stream() = default;
    explicit Stream(const DeviceRef& device);
    StreamHandle get() const noexcept { return handle_.get(); }
    const DeviceRef& device() const noexcept { return handle_.device(); }
    explicit operator bool() const noexcept { return static_cast<bool>(handle_); }

    // Host memory may be pageable: it is then read (written) before the call returns. Pinned memory is read when the
    // stream gets there, so that it must keep its content until then.
    void copy_to_device(DevicePtr to, const void* from, std::size_t bytes) const;
    void copy_to_host(void* to, DevicePtr from, std::size_t bytes) const;
    void copy_on_device(DevicePtr to, DevicePtr from, std::size_t bytes) const;
    void fill(DevicePtr to, std::uint8_t value, std::size_t bytes) const;
    void wait(const Event& event) const;
    bool done() const;
    void synchronize() const;

    // Thread-local mode: end on the thread that began. Between the two nothing runs; the work is recorded.
    void begin_capture() const;
    struct Captured {
        Graph graph;   // empty unless code is success
        int code = 0;  // of cuStreamEndCapture
    };
    // Ends the capture whatever happened in it. The stream is usable afterwards; DeviceError if even that failed.
    Captured end_capture() const;
    CaptureStatus capture_status() const;

private:
    Owned<StreamHandle, DestroyStream> handle_;
};

// Waits for the stream when it is destroyed, errors or not. Declare it after the buffers that work on the stream uses:
// an exception then does not free memory under running work.
class Drain {
public:
    explicit Drain(const Stream& stream) noexcept : stream_(stream) {}
    ~Drain();
    Drain(const Drain&) = delete;
    Drain& operator=(const Drain&) = delete;

private:
    const Stream& stream_;
};

struct Dim3 {
    unsigned x = 1;
    unsigned y = 1;
    unsigned z = 1;
};

class Module;

// A kernel of a module: typed by its parameters, device pointers as DevicePtr. Must not outlive the module.
template <class... Params>
class Kernel {
    static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel parameters are copied byte by byte");

public:
    Kernel() = default;
    Kernel(const Module& module, const char* name);
    explicit operator bool() const noexcept { return function_ != nullptr; }
    // The values are copied by the call. shared: bytes of dynamic shared memory.
    void launch(const Stream& stream, Dim3 grid, Dim3 block, unsigned shared, Params... params) const {
        void* values[sizeof...(Params) + 1] = {static_cast<void*>(&params)..., nullptr};
        launch_raw(stream, grid, block, shared, values);
    }

private:
    void launch_raw(const Stream& stream, Dim3 grid, Dim3 block, unsigned shared, void** values) const;
    FunctionHandle function_ = nullptr;
    const char* name_ = "";
};

// Compiled kernels: the image (a fatbin) is read by the constructor and may go afterwards.
class Module {
public:
    Module() = default;
    Module(const DeviceRef& device, const void* image);
    const DeviceRef& device() const noexcept { return handle_.device(); }
    FunctionHandle function(const char* name) const;

private:
    Owned<ModuleHandle, UnloadModule> handle_;
};

void launch_kernel(const Stream& stream, FunctionHandle function, const char* name, Dim3 grid, Dim3 block,
                   unsigned shared, void** values);

// name must outlive the kernel (a literal).
template <class... Params>
Kernel<Params...>::Kernel(const Module& module, const char* name) : function_(module.function(name)), name_(name) {}

template <class... Params>
void Kernel<Params...>::launch_raw(const Stream& stream, Dim3 grid, Dim3 block, unsigned shared, void** values) const {
    launch_kernel(stream, function_, name_, grid, block, shared, values);
}

}  // namespace edgeyolo::cuda
