#include "cuda.hpp"

#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>

namespace edgeyolo::cuda {
namespace {

// CUdevice_attribute
enum Attribute : int {
    multiprocessor_count = 16,
    is_integrated = 18,
    capability_major = 75,
    capability_minor = 76
};
// CUpointer_attribute
enum PointerAttribute : int {
    memory_type = 2,
    is_managed = 8,
    device_ordinal = 9,
    range_start = 11,
    range_size = 12
};
constexpr unsigned device_memory_type = 2;    // CU_MEMORYTYPE_DEVICE
constexpr unsigned host_memory_type = 1;      // CU_MEMORYTYPE_HOST
constexpr unsigned host_alloc_portable = 1;   // pinned for every context
constexpr unsigned host_alloc_mapped = 2;     // CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned stream_non_blocking = 1;   // CU_STREAM_NON_BLOCKING
constexpr unsigned event_without_timing = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int capture_thread_local = 1;       // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

// Gives this thread the thread-local mode; returns the one to put back, or unknown_mode where the driver refuses.
constexpr int unknown_mode = -1;
int leave_captures_of_others(const Driver& driver) noexcept {
    int mode = capture_thread_local;
    return driver.cuThreadExchangeStreamCaptureMode(&mode) == success ? mode : unknown_mode;
}
void put_back_mode(const Driver& driver, int mode) noexcept {
    if (mode != unknown_mode) driver.cuThreadExchangeStreamCaptureMode(&mode);
}

std::string size_text(std::size_t bytes) {
    if (bytes < 1000) return std::to_string(bytes) + " B";
    const char* unit = "KMG";
    auto value = static_cast<double>(bytes) / 1000;
    for (; value >= 1000 && unit[1]; ++unit) value /= 1000;
    char text[32];
    std::snprintf(text, sizeof text, "%.1f %cB", value, *unit);
    return text;
}

// Failures of calls that must not throw. Atomic counts: a forked child may find the lock taken for ever.
std::atomic<long> failed{0};
std::atomic<long> after_fork{0};
struct LastFailure {
    std::mutex mutex;
    std::string text;
};
LastFailure& last_failure() {
    static LastFailure& last = *new LastFailure;  // never destroyed: handles may die during process exit
    return last;
}

void report(const Device& device, const char* call, int code) noexcept {
    // At process exit the driver may be gone before us, and everything with it.
    if (code == success || code == deinitialized) return;
    ++failed;
    try {
        std::string text =
            std::string(call) + " on device " + std::to_string(device.ordinal) + ": " + device.driver.text(code);
        const std::lock_guard<std::mutex> lock(last_failure().mutex);
        last_failure().text = std::move(text);
    } catch (...) {  // no memory for the text: the count has to do
    }
}

}  // namespace

CleanupReport cleanup_report() {
    const std::lock_guard<std::mutex> lock(last_failure().mutex);
    return {failed, after_fork, last_failure().text};
}

Cleanup::Cleanup(const Device& device, const char* call) noexcept : device_(device), call_(call) {
    if (device.driver.forked()) {
        ++after_fork;
        return;
    }
    possible_ = true;
    // On a lost device the push fails; the driver is told of the end of the handle all the same.
    pushed_ = device.driver.cuCtxPushCurrent(device.context) == success;
    callers_mode_ = leave_captures_of_others(device.driver);
}

Cleanup::~Cleanup() {
    ContextHandle popped = nullptr;
    if (possible_) put_back_mode(device_.driver, callers_mode_);
    if (pushed_) device_.driver.cuCtxPopCurrent(&popped);
}

void Cleanup::result(int code) noexcept {
    report(device_, call_, code);
}

DeviceRef Device::open(int ordinal) {
    const Driver& table = cuda::driver();
    if (ordinal < 0 || ordinal >= table.device_count)
        throw InvalidInput("device must be between 0 and " + std::to_string(table.device_count - 1) + ", found " +
                           std::to_string(ordinal) + " (" + std::to_string(table.device_count) +
                           " GPU visible; see nvidia-smi and CUDA_VISIBLE_DEVICES)");
    return DeviceRef(new Device(table, ordinal));
}

Device::Device(const Driver& table, int number) : driver(table), ordinal(number) {
    check(driver.cuDeviceGet(&handle_, ordinal), "cuDeviceGet");
    std::array<char, 256> text{};
    check(driver.cuDeviceGetName(text.data(), static_cast<int>(text.size()) - 1, handle_), "cuDeviceGetName");
    name = text.data();
    const auto attribute = [&](Attribute which) {
        int value = 0;
        check(driver.cuDeviceGetAttribute(&value, which, handle_), "cuDeviceGetAttribute", std::to_string(which));
        return value;
    };
    multiprocessors = attribute(multiprocessor_count);
    integrated = attribute(is_integrated) != 0;
    compute_major = attribute(capability_major);
    compute_minor = attribute(capability_minor);
    check(driver.cuDeviceTotalMem(&total_memory, handle_), "cuDeviceTotalMem");
    // Last: once it is retained nothing may throw, the destructor would not run.
    check(driver.cuDevicePrimaryCtxRetain(&context, handle_), "cuDevicePrimaryCtxRetain");
    ++live().devices;
}

Device::~Device() {
    --live().devices;
    // Not under its own context, which this call may destroy.
    if (driver.forked())
        ++after_fork;
    else
        report(*this, "cuDevicePrimaryCtxRelease", driver.cuDevicePrimaryCtxRelease(handle_));
}

ContextGuard::ContextGuard(const Device& device) : device_(device) {
    if (device.driver.forked()) cuda::driver();  // throws, with the words for it
    device.check(device.driver.cuCtxPushCurrent(device.context), "cuCtxPushCurrent");
    callers_mode_ = leave_captures_of_others(device.driver);
}

ContextGuard::~ContextGuard() {
    ContextHandle popped = nullptr;
    put_back_mode(device_.driver, callers_mode_);
    report(device_, "cuCtxPopCurrent", device_.driver.cuCtxPopCurrent(&popped));
}

MemoryInfo memory_info(const Device& device) {
    MemoryInfo info;
    device.check(device.driver.cuMemGetInfo(&info.free, &info.total), "cuMemGetInfo");
    return info;
}

PointerInfo pointer_info(const Device& device, DevicePtr pointer) {
    unsigned type = 0;
    int ordinal = -1;
    unsigned managed = 0;  // the driver writes a bool, or an int: zeroed, either reads right
    PointerInfo info;
    int attributes[] = {memory_type, device_ordinal, is_managed, range_start, range_size};
    void* values[] = {&type, &ordinal, &managed, &info.begin, &info.bytes};
    // For memory that it does not know, the driver succeeds and leaves zeros.
    device.check(device.driver.cuPointerGetAttributes(5, attributes, values, pointer), "cuPointerGetAttributes");
    if (type == 0) return PointerInfo{};
    info.kind = managed != 0               ? PointerInfo::Kind::managed
                : type == host_memory_type ? PointerInfo::Kind::pinned
                                           : PointerInfo::Kind::device;
    info.device = ordinal;
    check<DeviceError>(type == host_memory_type || type == device_memory_type || managed != 0,
                       "cuPointerGetAttributes: expected host or device memory, found another kind (an array)");
    return info;
}

DeviceBuffer::DeviceBuffer(const DeviceRef& device, std::size_t bytes) {
    if (bytes == 0) return;
    const ContextGuard guard(*device);
    DevicePtr pointer = 0;
    device->check(device->driver.cuMemAlloc(&pointer, bytes), "cuMemAlloc", size_text(bytes));
    memory_ = {device, pointer};
    bytes_ = LiveBytes<&LiveCounters::device_bytes>(bytes);
}

PinnedBuffer::PinnedBuffer(const DeviceRef& device, std::size_t bytes) {
    if (bytes == 0) return;
    const ContextGuard guard(*device);
    void* pointer = nullptr;
    const unsigned flags = host_alloc_portable | (device->integrated ? host_alloc_mapped : 0u);
    device->check(device->driver.cuMemHostAlloc(&pointer, bytes, flags), "cuMemHostAlloc", size_text(bytes));
    memory_ = {device, pointer};
    bytes_ = LiveBytes<&LiveCounters::pinned_bytes>(bytes);
    if (device->integrated)
        device->check(device->driver.cuMemHostGetDevicePointer(&mapped_, pointer, 0), "cuMemHostGetDevicePointer");
}

DevicePtr PinnedBuffer::device_pointer() const {
    check<DeviceError>(mapped(), "a pinned buffer has a device pointer on integrated GPUs only: copy it to the device");
    return mapped_;
}

Event::Event(const DeviceRef& device, bool timing) {
    const ContextGuard guard(*device);
    EventHandle event = nullptr;
    device->check(device->driver.cuEventCreate(&event, timing ? 0u : event_without_timing), "cuEventCreate");
    handle_ = {device, event};
}

void Event::record(const Stream& stream) const {
    record(stream.get());
}

void Event::record(StreamHandle stream) const {
    const Device& device = *handle_.device();
    device.check(device.driver.cuEventRecord(get(), stream), "cuEventRecord");
}

bool Event::done() const {
    const Device& device = *handle_.device();
    const int code = device.driver.cuEventQuery(get());
    if (code == not_ready) return false;
    device.check(code, "cuEventQuery");
    return true;
}

void Event::synchronize() const {
    const Device& device = *handle_.device();
    device.check(device.driver.cuEventSynchronize(get()), "cuEventSynchronize");
}

float Event::since(const Event& start) const {
    const Device& device = *handle_.device();
    float milliseconds = 0;
    device.check(device.driver.cuEventElapsedTime(&milliseconds, start.get(), get()), "cuEventElapsedTime");
    return milliseconds;
}

std::size_t Graph::node_count() const {
    const Device& device = *handle_.device();
    std::size_t count = 0;
    device.check(device.driver.cuGraphGetNodes(get(), nullptr, &count), "cuGraphGetNodes");
    return count;
}

GraphExec Graph::instantiate() const {
    const DeviceRef& device = handle_.device();
    GraphExecHandle exec = nullptr;
    device->check(device->driver.cuGraphInstantiateWithFlags(&exec, get(), 0), "cuGraphInstantiateWithFlags");
    return GraphExec(device, exec);
}

void GraphExec::upload(const Stream& stream) const {
    const Device& device = *handle_.device();
    device.check(device.driver.cuGraphUpload(get(), stream.get()), "cuGraphUpload");
}

void GraphExec::launch(const Stream& stream) const {
    const Device& device = *handle_.device();
    device.check(device.driver.cuGraphLaunch(get(), stream.get()), "cuGraphLaunch");
}

Stream::Stream(const DeviceRef& device) {
    const ContextGuard guard(*device);
    StreamHandle stream = nullptr;
    device->check(device->driver.cuStreamCreate(&stream, stream_non_blocking), "cuStreamCreate");
    handle_ = {device, stream};
}

void Stream::copy_to_device(DevicePtr to, const void* from, std::size_t bytes) const {
    const int code = device()->driver.cuMemcpyHtoDAsync(to, from, bytes, get());
    if (code != success) device()->check(code, "cuMemcpyHtoDAsync", size_text(bytes));
}

void Stream::copy_to_host(void* to, DevicePtr from, std::size_t bytes) const {
    const int code = device()->driver.cuMemcpyDtoHAsync(to, from, bytes, get());
    if (code != success) device()->check(code, "cuMemcpyDtoHAsync", size_text(bytes));
}

void Stream::copy_on_device(DevicePtr to, DevicePtr from, std::size_t bytes) const {
    const int code = device()->driver.cuMemcpyDtoDAsync(to, from, bytes, get());
    if (code != success) device()->check(code, "cuMemcpyDtoDAsync", size_text(bytes));
}

void Stream::fill(DevicePtr to, std::uint8_t value, std::size_t bytes) const {
    const int code = device()->driver.cuMemsetD8Async(to, value, bytes, get());
    if (code != success) device()->check(code, "cuMemsetD8Async", size_text(bytes));
}

void Stream::wait(const Event& event) const {
    device()->check(device()->driver.cuStreamWaitEvent(get(), event.get(), 0), "cuStreamWaitEvent");
}

bool Stream::done() const {
    const int code = device()->driver.cuStreamQuery(get());
    if (code == not_ready) return false;
    device()->check(code, "cuStreamQuery");
    return true;
}

void Stream::synchronize() const {
    device()->check(device()->driver.cuStreamSynchronize(get()), "cuStreamSynchronize");
}

void Stream::begin_capture() const {
    device()->check(device()->driver.cuStreamBeginCapture(get(), capture_thread_local), "cuStreamBeginCapture");
}

Stream::Captured Stream::end_capture() const {
    Captured captured;
    GraphHandle graph = nullptr;
    captured.code = device()->driver.cuStreamEndCapture(get(), &graph);
    if (graph) captured.graph = Graph(device(), graph);
    if (captured.code == success) return captured;
    captured.graph = Graph();
    // A failing end leaves the capture as a rule. A stream that still records would swallow every later frame.
    if (capture_status() == CaptureStatus::none) return captured;
    graph = nullptr;
    device()->driver.cuStreamEndCapture(get(), &graph);
    if (graph) Graph(device(), graph);
    if (capture_status() != CaptureStatus::none) device()->check(captured.code, "cuStreamEndCapture");
    return captured;
}

CaptureStatus Stream::capture_status() const {
    int status = 0;
    device()->check(device()->driver.cuStreamIsCapturing(get(), &status), "cuStreamIsCapturing");
    return static_cast<CaptureStatus>(status);
}

Drain::~Drain() {
    if (!stream_) return;
    const Device& device = *stream_.device();
    Cleanup cleanup(device, "cuStreamSynchronize");
    if (cleanup.possible()) cleanup.result(device.driver.cuStreamSynchronize(stream_.get()));
}

Module::Module(const DeviceRef& device, const void* image) {
    const ContextGuard guard(*device);
    ModuleHandle module = nullptr;
    const int code = device->driver.cuModuleLoadData(&module, image);
    if (code != success) {
        // 209 NO_BINARY_FOR_GPU, 222 UNSUPPORTED_PTX_VERSION, 218 INVALID_PTX, 200 INVALID_IMAGE
        device->check(code, "cuModuleLoadData",
                      "kernels for compute capability " + std::to_string(device->compute_major) + "." +
                          std::to_string(device->compute_minor) + ", driver " +
                          std::to_string(device->driver.version / 1000) + "." +
                          std::to_string(device->driver.version % 1000 / 10) +
                          "; if the image does not fit them, build the package on this machine with its own nvcc");
    }
    handle_ = {device, module};
}

FunctionHandle Module::function(const char* name) const {
    FunctionHandle function = nullptr;
    device()->check(device()->driver.cuModuleGetFunction(&function, handle_.get(), name), "cuModuleGetFunction", name);
    return function;
}

void launch_kernel(const Stream& stream, FunctionHandle function, const char* name, Dim3 grid, Dim3 block,
                   unsigned shared, void** values) {
    const Device& device = *stream.device();
    const int code = device.driver.cuLaunchKernel(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
                                                  stream.get(), values, nullptr);
    if (code != success) device.check(code, "cuLaunchKernel", name);
}

}  // namespace edgeyolo::cuda
