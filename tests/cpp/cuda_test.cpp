// Devices, memory, streams, events, kernels and graphs of cuda.hpp. (Longer than most files: one test per
// handle.)
#include <sys/wait.h>
#include <unistd.h>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <numeric>
#include <thread>

#include "simulated_gpu.hpp"

namespace edgeyolo::test {
namespace {

using cuda::ContextGuard;
using cuda::DevicePtr;
using cuda::DeviceRef;

std::string message_of(const std::function<void()>& action) {
    try {
        action();
    } catch (const Error& error) {
        return error.what();
    }
    return "no error";
}

cuda::ContextHandle current() {
    cuda::ContextHandle context = nullptr;
    cuda::driver().cuCtxGetCurrent(&context);
    return context;
}

std::vector<std::uint8_t> counting(std::size_t bytes) {
    std::vector<std::uint8_t> values(bytes);
    std::iota(values.begin(), values.end(), std::uint8_t{0});
    return values;
}

TEST(Driver, MissingLibraryIsNamed) {
    const std::string text = message_of([] { cuda::Driver("/nowhere/libcuda.so.1"); });
    EXPECT_NE(text.find("/nowhere/libcuda.so.1"), std::string::npos) << text;
    EXPECT_NE(text.find("EDGEYOLO_CUDA_DRIVER"), std::string::npos) << text;
    EXPECT_THROW(cuda::Driver("/nowhere/libcuda.so.1"), DeviceError);
}

TEST(Driver, SystemLibraryMissingTellsWhatToInstall) {
    if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
        dlclose(library);
        GTEST_SKIP() << "this machine has a driver";
    }
    const std::string text = message_of([] { cuda::Driver(""); });
    EXPECT_NE(text.find("libcuda.so.1"), std::string::npos) << text;
    EXPECT_NE(text.find("Install NVIDIA's driver"), std::string::npos) << text;
}

TEST(Driver, NeverSearchesThePath) {
    const std::string text = message_of([] { cuda::Driver("libcuda.so.1"); });
    EXPECT_EQ(text,
              "EDGEYOLO_CUDA_DRIVER must be the path of a driver library, with a '/' in it; found 'libcuda.so.1'");
}

TEST(Driver, AnotherLibraryIsTooOld) {
    Dl_info info{};
    ASSERT_NE(dladdr(reinterpret_cast<void*>(&std::strlen), &info), 0);
    const std::string text = message_of([&] { cuda::Driver(std::string(info.dli_fname)); });
    EXPECT_NE(text.find("too old: expected CUDA 12.0"), std::string::npos) << text;
}

TEST_F(Gpu, DeviceFacts) {
    const DeviceRef device = cuda::Device::open(0);
    EXPECT_FALSE(device->name.empty());
    EXPECT_GE(device->compute_major, 5);
    EXPECT_GT(device->multiprocessors, 0);
    EXPECT_GT(device->total_memory, 1u << 20);
    EXPECT_NE(device->context, nullptr);
    EXPECT_EQ(live().devices, 1);
    const ContextGuard guard(*device);
    EXPECT_GE(device->total_memory, cuda::memory_info(*device).free);
}

TEST_F(Gpu, UnknownDeviceIsInvalidInput) {
    const int count = cuda::driver().device_count;
    EXPECT_THROW(cuda::Device::open(-1), InvalidInput);
    const std::string text = message_of([&] { cuda::Device::open(count); });
    EXPECT_NE(text.find("found " + std::to_string(count)), std::string::npos) << text;
}

TEST_F(Gpu, GuardLeavesTheCallersContext) {
    ASSERT_EQ(current(), nullptr);
    const DeviceRef device = cuda::Device::open(0);
    EXPECT_EQ(current(), nullptr) << "opening a device makes nothing current";
    {
        const ContextGuard guard(*device);
        EXPECT_EQ(current(), device->context);
    }
    EXPECT_EQ(current(), nullptr);
    {
        const cuda::Stream stream(device);
        const cuda::DeviceBuffer memory(device, 100);
        const cuda::PinnedBuffer pinned(device, 100);
        const cuda::Event event(device);
        EXPECT_EQ(current(), nullptr);
    }
    EXPECT_EQ(current(), nullptr);
}

// Returns the mode so far (CUstreamCaptureMode).
int exchange_mode(int mode) {
    EXPECT_EQ(cuda::driver().cuThreadExchangeStreamCaptureMode(&mode), 0);
    return mode;
}

// Of this thread; left as it is.
int capture_mode() {
    const int mode = exchange_mode(1);
    exchange_mode(mode);
    return mode;
}

TEST_F(Gpu, GuardKeepsOutOfOtherThreadsCaptures) {
    const DeviceRef device = cuda::Device::open(0);
    for (const int callers : {0, 1, 2}) {
        const int before = exchange_mode(callers);
        {
            const ContextGuard guard(*device);
            EXPECT_EQ(capture_mode(), 1) << "thread-local";
            {
                const ContextGuard inner(*device);
                EXPECT_EQ(capture_mode(), 1);
            }
            EXPECT_EQ(capture_mode(), 1);
            const cuda::DeviceBuffer memory(device, 100);
        }
        EXPECT_EQ(capture_mode(), callers);
        exchange_mode(before);
    }
}

// Handles are made, used and destroyed while another thread captures in global mode, as ONNX Runtime does.
TEST_F(Gpu, AGlobalCaptureOfAnotherThreadIsNotMet) {
    const DeviceRef device = cuda::Device::open(0);
    const cuda::Stream captured(device);
    const cuda::DeviceBuffer memory(device, 100);
    std::promise<void> begun, worked;
    std::thread capturing([&] {
        const ContextGuard guard(*device);
        EXPECT_EQ(cuda::driver().cuStreamBeginCapture(captured.get(), 0), 0);
        captured.fill(memory.pointer(), 1, 100);
        begun.set_value();
        worked.get_future().wait();
        const auto result = captured.end_capture();
        EXPECT_EQ(result.code, 0);
        EXPECT_TRUE(result.graph);
    });
    begun.get_future().wait();
    {
        const cuda::Stream stream(device);
        const cuda::DeviceBuffer more(device, 1000);
        const cuda::PinnedBuffer pinned(device, 1000);
        const cuda::Event event(device);
        const ContextGuard guard(*device);
        std::uint8_t pageable[10] = {};
        stream.copy_to_device(more.pointer(), pinned.data(), 1000);
        stream.copy_to_host(pageable, more.pointer(), 10);
        event.record(stream);
        event.synchronize();
        EXPECT_TRUE(event.done());
        stream.synchronize();
        EXPECT_TRUE(stream.done());
    }
    worked.set_value();
    capturing.join();
}

TEST_F(SimulatedGpu, AModeThatCannotBeChangedStays) {
    const DeviceRef device = cuda::Device::open(0);
    exchange_mode(2);
    FAKE(fault)("cuThreadExchangeStreamCaptureMode", 1, 801, edgeyolo_fake_once);
    {
        const ContextGuard guard(*device);
        EXPECT_EQ(capture_mode(), 2);
    }
    EXPECT_EQ(exchange_mode(0), 2);
}

TEST_F(Gpu, CopiesGoRound) {
    const DeviceRef device = cuda::Device::open(0);
    const cuda::Stream stream(device);
    const std::size_t bytes = 100000;
    const cuda::DeviceBuffer a(device, bytes), b(device, bytes);
    const cuda::PinnedBuffer up(device, bytes), down(device, bytes);
    const auto values = counting(bytes);
    std::memcpy(up.data(), values.data(), bytes);
    const ContextGuard guard(*device);
    stream.copy_to_device(a.pointer(), up.data(), bytes);
    stream.copy_on_device(b.pointer(), a.pointer(), bytes);
    stream.fill(b.pointer(), 7, 10);
    stream.copy_to_host(down.data(), b.pointer(), bytes);
    stream.synchronize();
    EXPECT_TRUE(stream.done());
    EXPECT_TRUE(std::all_of(down.data(), down.data() + 10, [](int value) { return value == 7; }));
    EXPECT_EQ(std::memcmp(down.data() + 10, values.data() + 10, bytes - 10), 0);

    std::vector<std::uint8_t> pageable(bytes);
    stream.copy_to_host(pageable.data(), a.pointer(), bytes);
    EXPECT_EQ(pageable, values) << "a copy into pageable memory is done when it returns";
}

TEST_F(Gpu, EventsOrderStreamsAndMeasure) {
    const DeviceRef device = cuda::Device::open(0);
    const cuda::Stream first(device), second(device);
    const cuda::Event start(device, true), end(device, true), between(device);
    const cuda::DeviceBuffer memory(device, 1000);
    const cuda::PinnedBuffer down(device, 1000);
    const ContextGuard guard(*device);
    EXPECT_TRUE(between.done()) << "never recorded";
    for (int round = 0; round < 50; ++round) {
        const auto value = static_cast<std::uint8_t>(round);
        start.record(first);
        first.fill(memory.pointer(), value, 1000);
        between.record(first);
        second.wait(between);
        second.copy_to_host(down.data(), memory.pointer(), 1000);
        end.record(second);
        end.synchronize();
        EXPECT_TRUE(end.done());
        EXPECT_EQ(down.data()[999], value);
        EXPECT_GE(end.since(start), 0.f);
    }
}

TEST_F(Gpu, BuffersAreCounted) {
    const DeviceRef device = cuda::Device::open(0);
    {
        cuda::DeviceBuffer a(device, 1000);
        cuda::DeviceBuffer b(device, 500);
        EXPECT_EQ(live().device_buffers, 2);
        EXPECT_EQ(live().device_bytes, 1500);
        b = std::move(a);
        EXPECT_EQ(live().device_buffers, 1);
        EXPECT_EQ(live().device_bytes, 1000);
        EXPECT_EQ(b.bytes(), 1000u);
        EXPECT_EQ(a.pointer(), 0u);
        const cuda::PinnedBuffer pinned(device, 64);
        EXPECT_EQ(live().pinned_bytes, 64);
        const cuda::DeviceBuffer empty(device, 0);
        EXPECT_EQ(empty.pointer(), 0u);
    }
    EXPECT_EQ(live().device_bytes + live().pinned_bytes, 0);
}

TEST_F(Gpu, PointersAreTold) {
    const DeviceRef device = cuda::Device::open(0);
    const cuda::DeviceBuffer memory(device, 4096);
    const cuda::PinnedBuffer pinned(device, 4096);
    const ContextGuard guard(*device);
    const auto on_device = cuda::pointer_info(*device, memory.pointer() + 100);
    EXPECT_EQ(on_device.kind, cuda::PointerInfo::Kind::device);
    EXPECT_EQ(on_device.device, 0);
    EXPECT_EQ(on_device.begin, memory.pointer());
    EXPECT_EQ(on_device.bytes, 4096u);
    const auto host = [&](const void* pointer) {
        return cuda::pointer_info(*device, reinterpret_cast<DevicePtr>(pointer));
    };
    EXPECT_EQ(host(pinned.data()).kind, cuda::PointerInfo::Kind::pinned);
    const int local = 0;
    EXPECT_EQ(host(&local).kind, cuda::PointerInfo::Kind::host);
    EXPECT_EQ(host(&local).device, -1);
}

TEST_F(Gpu, GraphReplaysWhatWasRecorded) {
    const DeviceRef device = cuda::Device::open(0);
    const cuda::Stream stream(device);
    const cuda::DeviceBuffer memory(device, 256);
    const cuda::PinnedBuffer up(device, 256), down(device, 256);
    const ContextGuard guard(*device);
    EXPECT_EQ(stream.capture_status(), cuda::CaptureStatus::none);
    stream.begin_capture();
    EXPECT_EQ(stream.capture_status(), cuda::CaptureStatus::active);
    stream.copy_to_device(memory.pointer(), up.data(), 256);
    stream.copy_to_host(down.data(), memory.pointer(), 256);
    const auto captured = stream.end_capture();
    ASSERT_EQ(captured.code, cuda::success);
    EXPECT_EQ(captured.graph.node_count(), 2u);
    const cuda::GraphExec exec = captured.graph.instantiate();
    exec.upload(stream);
    std::memset(down.data(), 0, 256);
    for (const int value : {3, 4, 5}) {
        std::memset(up.data(), value, 256);
        exec.launch(stream);
        stream.synchronize();
        EXPECT_EQ(down.data()[255], value);
    }
}

TEST_F(SimulatedGpu, ErrorsNameTheCallTheDeviceAndTheCause) {
    FAKE(set_devices)(2, 0, 1 << 20);
    const DeviceRef device = cuda::Device::open(1);
    const std::string text = message_of([&] { cuda::DeviceBuffer(device, 1234567); });
    EXPECT_EQ(text, "cuMemAlloc(1.2 MB) on device 1: CUDA_ERROR_OUT_OF_MEMORY: out of memory");
    try {
        cuda::DeviceBuffer(device, 1234567);
        FAIL();
    } catch (const cuda::DriverError& error) {
        EXPECT_EQ(error.code, cuda::out_of_memory);
        EXPECT_FALSE(error.fatal());
    }
}

TEST_F(SimulatedGpu, TypedKernelLaunch) {
    const auto add = [](fake::Dim grid, fake::Dim block, unsigned, void** params, const fake::Memory& memory) {
        const auto count = fake::param<unsigned>(params, 1);
        EXPECT_EQ(grid.x * block.x, 128u);
        float* values = memory.at<float>(fake::param<DevicePtr>(params, 0), count);
        for (unsigned i = 0; i < count; ++i) values[i] += fake::param<float>(params, 2);
    };
    const std::size_t sizes[] = {8, 4, 4};
    FAKE(register_twin)("add", add, sizes, 3);
    const DeviceRef device = cuda::Device::open(0);
    const std::string image = std::string(fake::image_magic) + "add\n";
    const cuda::Module module(device, image.c_str());
    const cuda::Stream stream(device);
    const cuda::DeviceBuffer memory(device, 100 * sizeof(float));
    std::vector<float> values(100, 1.5f);
    const ContextGuard guard(*device);
    const cuda::Kernel<DevicePtr, unsigned, float> kernel(module, "add");
    stream.copy_to_device(memory.pointer(), values.data(), memory.bytes());
    kernel.launch(stream, {2}, {64}, 0, memory.pointer(), 100u, 2.f);
    stream.copy_to_host(values.data(), memory.pointer(), memory.bytes());
    EXPECT_EQ(values, std::vector<float>(100, 3.5f));
    const std::string text = message_of([&] { cuda::Kernel<int>(module, "subtract"); });
    EXPECT_EQ(text, "cuModuleGetFunction(subtract) on device 0: CUDA_ERROR_NOT_FOUND: named symbol not found");
}

TEST_F(SimulatedGpu, UnfitImageTellsWhatToDo) {
    const DeviceRef device = cuda::Device::open(0);
    const std::string text = message_of([&] { cuda::Module(device, "no kernels here"); });
    EXPECT_NE(text.find("CUDA_ERROR_INVALID_IMAGE"), std::string::npos) << text;
    EXPECT_NE(text.find("build the package on this machine"), std::string::npos) << text;
}

TEST_F(SimulatedGpu, PinnedMemoryIsMappedOnIntegratedDevicesOnly) {
    {
        const DeviceRef device = cuda::Device::open(0);
        const cuda::PinnedBuffer pinned(device, 100);
        EXPECT_FALSE(pinned.mapped());
        EXPECT_THROW(pinned.device_pointer(), DeviceError);
    }
    FAKE(set_devices)(1, 1, 1 << 20);
    const DeviceRef device = cuda::Device::open(0);
    EXPECT_TRUE(device->integrated);
    const cuda::PinnedBuffer pinned(device, 100);
    const cuda::DeviceBuffer memory(device, 100);
    const cuda::Stream stream(device);
    const ContextGuard guard(*device);
    pinned.data()[99] = 42;
    std::uint8_t back = 0;
    stream.copy_on_device(memory.pointer(), pinned.device_pointer(), 100);
    stream.copy_to_host(&back, memory.pointer() + 99, 1);
    EXPECT_EQ(back, 42);
}

TEST_F(SimulatedGpu, DevicesAreIsolated) {
    const DeviceRef zero = cuda::Device::open(0);
    const ContextGuard callers_device(*zero);
    {
        const DeviceRef one = cuda::Device::open(1);
        const cuda::Stream stream(one);
        const cuda::DeviceBuffer memory(one, 1000);
        {
            const ContextGuard guard(*one);
            stream.fill(memory.pointer(), 1, 1000);
            stream.synchronize();
        }
        EXPECT_EQ(current(), zero->context);
    }
    EXPECT_EQ(current(), zero->context);
    EXPECT_EQ(FAKE(peak_memory)(0), 0u);
    EXPECT_EQ(FAKE(operations)(0), 0);
    EXPECT_GE(FAKE(operations)(1), 1);
}

TEST_F(SimulatedGpu, EndCaptureSurvivesAnInvalidatedCapture) {
    const DeviceRef device = cuda::Device::open(0);
    const cuda::Stream stream(device);
    const cuda::DeviceBuffer memory(device, 100);
    const ContextGuard guard(*device);
    FAKE(spoil_capture)(1, edgeyolo_fake_once);
    stream.begin_capture();
    EXPECT_THROW(stream.fill(memory.pointer(), 1, 100), DeviceError);
    EXPECT_EQ(stream.capture_status(), cuda::CaptureStatus::invalidated);
    const auto captured = stream.end_capture();
    EXPECT_EQ(captured.code, 901);
    EXPECT_FALSE(captured.graph);
    stream.fill(memory.pointer(), 1, 100);
    stream.synchronize();
}

// Every destroying call may return an earlier error: the handle is gone, nothing is thrown, the failure is counted.
TEST_F(SimulatedGpu, FailingDestructorsReport) {
    const char* calls[] = {"cuStreamDestroy", "cuEventDestroy",  "cuGraphDestroy", "cuGraphExecDestroy",
                           "cuModuleUnload",  "cuMemFree",       "cuMemFreeHost",  "cuDevicePrimaryCtxRelease",
                           "cuCtxPopCurrent", "cuCtxPushCurrent"};
    for (const char* call : calls) {
        const long before = cuda::cleanup_report().failed;
        {
            const DeviceRef device = cuda::Device::open(0);
            const cuda::Module module(device, fake::image_magic);
            const cuda::DeviceBuffer memory(device, 100);
            const cuda::PinnedBuffer pinned(device, 100);
            const cuda::Event event(device);
            const cuda::Stream stream(device);
            cuda::Graph graph;
            cuda::GraphExec exec;
            const ContextGuard guard(*device);
            stream.begin_capture();
            stream.fill(memory.pointer(), 0, 100);
            graph = stream.end_capture().graph;
            exec = graph.instantiate();
            FAKE(fault)(call, 1, 719, edgeyolo_fake_once);
        }
        EXPECT_EQ(live_gpu_objects(), 0) << call;
        EXPECT_EQ(FAKE(faults_hit)(), 1) << call;
        if (std::string(call) != "cuCtxPushCurrent") {
            EXPECT_EQ(cuda::cleanup_report().failed, before + 1) << call;
            EXPECT_EQ(cuda::cleanup_report().last,
                      std::string(call) + " on device 0: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure");
        }
        // Without the push the handle's call finds no context, or the caller's: it is reported, not thrown.
        FAKE(clear_violations)();
        FAKE(reset)();
    }
}

TEST_F(SimulatedGpu, HandlesMayDieAfterTheirDevice) {
    {
        const DeviceRef device = cuda::Device::open(0);
        const cuda::Stream stream(device);
        const cuda::Event event(device);
        const cuda::DeviceBuffer memory(device, 100);
        const cuda::PinnedBuffer pinned(device, 100);
        FAKE(lose_device)(0, 719);
        const ContextGuard guard(*device);
        try {
            stream.fill(memory.pointer(), 0, 100);
            FAIL();
        } catch (const cuda::DriverError& error) {
            EXPECT_TRUE(error.fatal());
        }
    }
    EXPECT_EQ(live_gpu_objects(), 0);
    EXPECT_EQ(FAKE(live)(nullptr), 0);
}

TEST_F(SimulatedGpu, ForkedChildIsToldAndDoesNoHarm) {
    const DeviceRef device = cuda::Device::open(0);
    auto stream = std::make_unique<cuda::Stream>(device);
    const pid_t child = fork();
    if (child == 0) {
        const std::string text = message_of([&] { const ContextGuard guard(*device); });
        const std::string again = message_of([] { cuda::Device::open(0); });
        const long before = cuda::cleanup_report().after_fork;
        stream.reset();
        const bool good = text.find("after fork()") != std::string::npos && again == text &&
                          text.find("Load the model in the child") != std::string::npos &&
                          cuda::cleanup_report().after_fork == before + 1 && live().streams == 0;
        _exit(good ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    EXPECT_EQ(FAKE(live)("stream"), 1) << "the parent's stream";
}

TEST_F(SimulatedGpu, DriverFailuresAtFirstUseAreTyped) {
    FAKE(fault)("cuInit", 1, 100, edgeyolo_fake_once);
    const std::string text = message_of([] { cuda::Driver(EDGEYOLO_FAKE_CUDA_PATH); });
    EXPECT_NE(text.find("cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"), std::string::npos) << text;
    EXPECT_NE(text.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << text;
    for (const char* call :
         {"cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain"}) {
        FAKE(fault)(call, 1, 999, edgeyolo_fake_once);
        EXPECT_THROW(cuda::Device::open(0), DeviceError) << call;
        EXPECT_EQ(live_gpu_objects(), 0) << call;
    }
}

TEST_F(SimulatedGpu, ManyThreadsShareADevice) {
    const DeviceRef device = cuda::Device::open(0);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
        threads.emplace_back([&device, i] {
            const cuda::Stream stream(device);
            const cuda::DeviceBuffer memory(device, 1000);
            const cuda::PinnedBuffer down(device, 1000);
            const ContextGuard guard(*device);
            for (int round = 0; round < 50; ++round) {
                const auto value = static_cast<std::uint8_t>(i * 50 + round);
                stream.fill(memory.pointer(), value, 1000);
                stream.copy_to_host(down.data(), memory.pointer(), 1000);
                stream.synchronize();
                EXPECT_EQ(down.data()[500], value);
            }
        });
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace edgeyolo::test
