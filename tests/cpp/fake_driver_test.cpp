// The simulated driver is as strict as a real one: every rule is broken once, and has to be noticed. (Longer than most
// files: one short test per rule.)
#include <fcntl.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "simulated_gpu.hpp"

namespace edgeyolo::test {
namespace {

using cuda::ContextGuard;
using cuda::DevicePtr;
using cuda::DeviceRef;
using cuda::driver;

constexpr int invalid_context = 201;
constexpr int invalid_handle = 400;
constexpr int illegal_address = 700;
constexpr int unsupported_in_capture = 900;
constexpr int capture_invalidated = 901;
constexpr int global_mode = 0;  // CUstreamCaptureMode
constexpr int thread_local_mode = 1;
constexpr int relaxed_mode = 2;

// A kernel that holds its stream up until the test opens it.
std::atomic<bool> gate_open{true};
void gate(fake::Dim, fake::Dim, unsigned, void**, const fake::Memory&) {
    while (!gate_open) std::this_thread::sleep_for(std::chrono::microseconds(100));
}
void store(fake::Dim, fake::Dim, unsigned, void** params, const fake::Memory& memory) {
    *memory.at<int>(fake::param<DevicePtr>(params, 0), 1) = fake::param<int>(params, 1);
}

class FakeDriver : public SimulatedGpu {
protected:
    void SetUp() override {
        SimulatedGpu::SetUp();
        if (IsSkipped()) return;
        const std::size_t sizes[] = {8, 4};
        FAKE(register_twin)("gate", gate, nullptr, 0);
        FAKE(register_twin)("store", store, sizes, 2);
        gate_open = true;
        rig_ = std::make_unique<Rig>();
    }
    void TearDown() override {
        gate_open = true;
        rig_.reset();
        SimulatedGpu::TearDown();
    }

    struct Rig {
        DeviceRef device = cuda::Device::open(0);
        cuda::Module module{device, (std::string(fake::image_magic) + "gate\nstore\n").c_str()};
        cuda::Stream stream{device};
        cuda::DeviceBuffer memory{device, 256};
        cuda::PinnedBuffer pinned{device, 256};
        ContextGuard guard{*device};
        cuda::Kernel<> gate{module, "gate"};
        cuda::Kernel<DevicePtr, int> store{module, "store"};
        cuda::Drain drain{stream};
    };
    std::unique_ptr<Rig> rig_;
    Rig& rig() { return *rig_; }

    void close_gate() {
        gate_open = false;
        rig().gate.launch(rig().stream, {}, {}, 0);
    }
    int device_value(DevicePtr pointer) {
        int value = 0;
        rig().stream.copy_to_host(&value, pointer, sizeof value);
        return value;
    }
    // Begins a capture, breaks a rule in it, and sees the capture end without a graph.
    void expect_invalidated(int answer, int expected_answer = unsupported_in_capture) {
        EXPECT_EQ(answer, expected_answer);
        EXPECT_EQ(rig().stream.capture_status(), cuda::CaptureStatus::invalidated);
        EXPECT_EQ(rig().stream.end_capture().code, capture_invalidated);
    }
};

TEST_F(FakeDriver, DeviceAddressesFaultOnTheHostAndDifferPerDevice) {
    int pipes[2];
    ASSERT_EQ(pipe(pipes), 0);
    // The kernel reads on our behalf, and tells instead of killing us.
    const ssize_t written = write(pipes[1], reinterpret_cast<const void*>(rig().memory.pointer()), 1);
    EXPECT_EQ(written, -1);
    EXPECT_EQ(errno, EFAULT);
    close(pipes[0]);
    close(pipes[1]);
    const DeviceRef one = cuda::Device::open(1);
    const cuda::DeviceBuffer other(one, 256);
    EXPECT_NE(other.pointer(), rig().memory.pointer());
    DevicePtr freed = 0;
    {
        const cuda::DeviceBuffer once(rig().device, 256);
        freed = once.pointer();
    }
    const cuda::DeviceBuffer again(rig().device, 256);
    EXPECT_NE(again.pointer(), freed) << "addresses are not given twice";
}

TEST_F(FakeDriver, PinnedMemoryIsReadLatePageableAtOnce) {
    std::vector<std::uint8_t> pageable(4, 1);
    std::memset(rig().pinned.data(), 1, 256);
    close_gate();
    rig().stream.copy_to_device(rig().memory.pointer(), rig().pinned.data(), 4);
    rig().stream.copy_to_device(rig().memory.pointer() + 4, pageable.data(), 4);
    std::memset(rig().pinned.data(), 2, 256);
    std::fill(pageable.begin(), pageable.end(), std::uint8_t{2});
    gate_open = true;
    EXPECT_EQ(device_value(rig().memory.pointer()), 0x02020202);
    EXPECT_EQ(device_value(rig().memory.pointer() + 4), 0x01010101);
}

TEST_F(FakeDriver, LaunchCopiesItsParameters) {
    DevicePtr to = rig().memory.pointer();
    int value = 11;
    void* params[] = {&to, &value};
    close_gate();
    cuda::launch_kernel(rig().stream, rig().module.function("store"), "store", {}, {}, 0, params);
    to = 0;
    value = 12;
    gate_open = true;
    EXPECT_EQ(device_value(rig().memory.pointer()), 11);
}

TEST_F(FakeDriver, StreamsAreAsynchronous) {
    close_gate();
    EXPECT_FALSE(rig().stream.done());
    const cuda::Event event(rig().device);
    event.record(rig().stream);
    EXPECT_FALSE(event.done());
    const cuda::Stream other(rig().device);
    other.fill(rig().memory.pointer(), 3, 4);
    other.synchronize();  // not held up
    other.wait(event);
    EXPECT_FALSE(other.done());
    gate_open = true;
    other.synchronize();
    EXPECT_TRUE(event.done());
}

TEST_F(FakeDriver, DefaultStreamIsRefused) {
    EXPECT_EQ(driver().cuMemsetD8Async(rig().memory.pointer(), 0, 4, nullptr), invalid_handle);
    expect_violation("cuMemsetD8Async: the default stream");
    // A producer's default stream may be waited for.
    const cuda::Event event(rig().device);
    event.record(reinterpret_cast<cuda::StreamHandle>(1));
    EXPECT_TRUE(event.done());
}

TEST_F(FakeDriver, BlockingStreamIsReported) {
    cuda::StreamHandle stream = nullptr;
    ASSERT_EQ(driver().cuStreamCreate(&stream, 0), 0);
    expect_violation("waits for the legacy default stream");
    driver().cuStreamDestroy(stream);
}

TEST_F(FakeDriver, ContextMustBeCurrent) {
    const int answer = std::async(std::launch::async, [&] {
                           return driver().cuMemsetD8Async(rig().memory.pointer(), 0, 4, rig().stream.get());
                       }).get();
    EXPECT_EQ(answer, invalid_context);
    expect_violation("cuMemsetD8Async: no context is current");
    const DeviceRef one = cuda::Device::open(1);
    {
        const ContextGuard guard(*one);
        EXPECT_THROW(rig().stream.fill(rig().memory.pointer(), 0, 4), DeviceError);
    }
    expect_violation("wrong context: a stream of device 0 while device 1 is current");
    {
        const ContextGuard guard(*one);
        const cuda::Event event(rig().device);
        EXPECT_EQ(driver().cuEventRecord(event.get(), rig().stream.get()), invalid_handle);
    }
    expect_violation("wrong context: a event of device 0");
}

TEST_F(FakeDriver, MemoryOfAnotherDeviceIsIllegal) {
    const DeviceRef one = cuda::Device::open(1);
    const cuda::DeviceBuffer other(one, 256);
    rig().stream.fill(other.pointer(), 0, 4);
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("memory of device 1");
    EXPECT_EQ(driver().cuMemsetD8Async(rig().memory.pointer(), 0, 4, rig().stream.get()), illegal_address)
        << "the error stays";
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, OutOfBoundsIsIllegal) {
    rig().stream.fill(rig().memory.pointer() + 250, 0, 7);
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("out of bounds of an allocation of 256 bytes");
    FAKE(lose_device)(0, 0);
    rig().store.launch(rig().stream, {}, {}, 0, rig().memory.pointer() + 254, 1);  // in a kernel
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("kernel store");
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, HostPointerInAKernelIsIllegal) {
    rig().store.launch(rig().stream, {}, {}, 0, reinterpret_cast<DevicePtr>(rig().pinned.data()), 1);
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("not device memory");
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, DevicePointerAsHostMemoryIsRefused) {
    const auto* pointer = reinterpret_cast<const void*>(rig().memory.pointer());
    EXPECT_THROW(rig().stream.copy_to_device(rig().memory.pointer(), pointer, 4), DeviceError);
    expect_violation("a device address where host memory is expected");
    EXPECT_THROW(rig().stream.copy_to_device(rig().memory.pointer(), rig().pinned.data() + 250, 7), DeviceError);
    expect_violation("out of bounds of pinned memory");
}

TEST_F(FakeDriver, ReplayAfterFreeIsIllegal) {
    cuda::GraphExec exec;
    {
        const cuda::DeviceBuffer buffer(rig().device, 64);
        rig().stream.begin_capture();
        rig().stream.fill(buffer.pointer(), 1, 64);
        exec = rig().stream.end_capture().graph.instantiate();
    }
    exec.launch(rig().stream);
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("freed memory");
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, FreeUnderRunningWorkIsIllegal) {
    {
        const cuda::DeviceBuffer buffer(rig().device, 64);
        close_gate();
        rig().stream.fill(buffer.pointer(), 1, 64);
    }
    gate_open = true;
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("freed memory");
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, WrongFreesAreReported) {
    EXPECT_EQ(driver().cuMemFree(rig().memory.pointer() + 1), 1);
    expect_violation("which is no allocation's begin");
    DevicePtr pointer = 0;
    ASSERT_EQ(driver().cuMemAlloc(&pointer, 10), 0);
    EXPECT_EQ(driver().cuMemFree(pointer), 0);
    EXPECT_EQ(driver().cuMemFree(pointer), 1);
    expect_violation("twice");
    int local = 0;
    EXPECT_EQ(driver().cuMemFreeHost(&local), 1);
    expect_violation("not pinned");
}

TEST_F(FakeDriver, DestroyedAndForeignHandlesAreReported) {
    cuda::StreamHandle gone = nullptr;
    {
        const cuda::Stream stream(rig().device);
        gone = stream.get();
    }
    EXPECT_EQ(driver().cuStreamSynchronize(gone), invalid_handle);
    expect_violation("is used after it was destroyed");
    EXPECT_EQ(driver().cuStreamSynchronize(reinterpret_cast<cuda::StreamHandle>(0x1234)), invalid_handle);
    expect_violation("not a handle of this driver");
    const cuda::Event event(rig().device);
    EXPECT_EQ(driver().cuStreamSynchronize(reinterpret_cast<cuda::StreamHandle>(event.get())), invalid_handle);
    expect_violation("expected a stream, found a event");
}

TEST_F(FakeDriver, KernelOfAnUnloadedModuleIsIllegal) {
    cuda::GraphExec exec;
    {
        const cuda::Module module(rig().device, (std::string(fake::image_magic) + "store\n").c_str());
        const cuda::Kernel<DevicePtr, int> kernel(module, "store");
        rig().stream.begin_capture();
        kernel.launch(rig().stream, {}, {}, 0, rig().memory.pointer(), 1);
        exec = rig().stream.end_capture().graph.instantiate();
    }
    exec.launch(rig().stream);
    EXPECT_EQ(driver().cuStreamSynchronize(rig().stream.get()), illegal_address);
    expect_violation("after its module was unloaded");
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, ImagesAndKernelNamesAreChecked) {
    cuda::ModuleHandle module = nullptr;
    EXPECT_EQ(driver().cuModuleLoadData(&module, "something else"), 200);
    cuda::FunctionHandle function = nullptr;
    const cuda::Module named(rig().device, (std::string(fake::image_magic) + "store\nunknown\n").c_str());
    EXPECT_THROW(named.function("gate"), DeviceError) << "not in this image";
    EXPECT_THROW(named.function("unknown"), DeviceError) << "has no twin";
    const std::uint32_t fatbin[] = {0xba55ed50, 0, 0, 0};
    ASSERT_EQ(driver().cuModuleLoadData(&module, fatbin), 0);
    EXPECT_EQ(driver().cuModuleGetFunction(&function, module, "store"), 0);
    EXPECT_EQ(driver().cuModuleUnload(module), 0);
}

TEST_F(FakeDriver, LaunchShapesAreChecked) {
    EXPECT_THROW(rig().gate.launch(rig().stream, {0}, {1}, 0), DeviceError);
    EXPECT_THROW(rig().gate.launch(rig().stream, {1}, {1025}, 0), DeviceError);
    EXPECT_THROW(rig().gate.launch(rig().stream, {1}, {32, 33}, 0), DeviceError);
    EXPECT_THROW(rig().gate.launch(rig().stream, {1, 65536}, {1}, 0), DeviceError);
    EXPECT_THROW(rig().gate.launch(rig().stream, {1}, {1}, 49 * 1024), DeviceError);
    EXPECT_EQ(FAKE(violations)(), 5);
    FAKE(clear_violations)();
}

TEST_F(FakeDriver, RecordedCopyFreezesItsPointers) {
    const cuda::PinnedBuffer other(rig().device, 256);
    const void* source = rig().pinned.data();
    std::memset(rig().pinned.data(), 1, 256);
    std::memset(other.data(), 9, 256);
    rig().stream.begin_capture();
    rig().stream.copy_to_device(rig().memory.pointer(), source, 4);
    source = other.data();
    static_cast<void>(source);
    const cuda::GraphExec exec = rig().stream.end_capture().graph.instantiate();
    rig().stream.fill(rig().memory.pointer(), 0, 4);
    EXPECT_EQ(device_value(rig().memory.pointer()), 0) << "recording ran nothing";
    std::memset(rig().pinned.data(), 2, 256);
    exec.launch(rig().stream);
    EXPECT_EQ(device_value(rig().memory.pointer()), 0x02020202) << "the pointer is frozen, the content is not";
}

TEST_F(FakeDriver, CaptureForbidsOnItsThread) {
    const cuda::Event event(rig().device);
    DevicePtr pointer = 0;
    void* host = nullptr;
    cuda::ModuleHandle module = nullptr;
    const auto& stream = rig().stream;
    stream.begin_capture();
    expect_invalidated(driver().cuMemAlloc(&pointer, 10));
    stream.begin_capture();
    expect_invalidated(driver().cuMemFree(rig().memory.pointer()));
    stream.begin_capture();
    expect_invalidated(driver().cuMemHostAlloc(&host, 10, 0));
    stream.begin_capture();
    expect_invalidated(driver().cuMemFreeHost(rig().pinned.data()));
    stream.begin_capture();
    expect_invalidated(driver().cuModuleLoadData(&module, fake::image_magic));
    stream.begin_capture();
    expect_invalidated(driver().cuEventQuery(event.get()));
    stream.begin_capture();
    expect_invalidated(driver().cuEventSynchronize(event.get()));
    stream.begin_capture();
    expect_invalidated(raw<int()>("cuCtxSynchronize")());
    EXPECT_EQ(FAKE(violations)(), 0);
    stream.begin_capture();
    expect_invalidated(driver().cuStreamSynchronize(stream.get()));
    expect_violation("cuStreamSynchronize of a stream that captures");
    stream.begin_capture();
    expect_invalidated(driver().cuStreamQuery(stream.get()));
    expect_violation("cuStreamQuery of a stream that captures");
    stream.begin_capture();
    int pageable = 0;
    expect_invalidated(driver().cuMemcpyHtoDAsync(rig().memory.pointer(), &pageable, 4, stream.get()));
    expect_violation("pageable memory in a capture");
}

// What a thread may do while another one captures depends on both: the mode of the capture and of the thread.
TEST_F(FakeDriver, CaptureModesDifferForOtherThreads) {
    const cuda::Stream side(rig().device);
    const cuda::Event event(rig().device);
    const auto elsewhere = [&](int mode, const std::function<int()>& call) {
        return std::async(std::launch::async,
                          [&] {
                              driver().cuThreadExchangeStreamCaptureMode(&mode);
                              driver().cuCtxPushCurrent(rig().device->context);
                              const int answer = call();
                              cuda::ContextHandle popped = nullptr;
                              driver().cuCtxPopCurrent(&popped);
                              driver().cuThreadExchangeStreamCaptureMode(&mode);
                              return answer;
                          })
            .get();
    };
    int value = 0;
    const std::function<int()> calls[] = {
        [] {
            DevicePtr pointer = 0;
            const int answer = driver().cuMemAlloc(&pointer, 10);
            if (answer == 0) driver().cuMemFree(pointer);
            return answer;
        },
        [&] { return driver().cuStreamSynchronize(side.get()); },
        [&] { return driver().cuStreamQuery(side.get()); },
        [&] { return driver().cuMemcpyDtoHAsync(&value, rig().memory.pointer(), 4, side.get()); },
        [&] { return driver().cuEventQuery(event.get()); },
    };
    for (const auto& call : calls) {
        for (const int mode : {global_mode, thread_local_mode, relaxed_mode}) {
            rig().stream.begin_capture();  // in thread-local mode
            EXPECT_EQ(elsewhere(mode, call), 0);
            EXPECT_EQ(rig().stream.end_capture().code, 0);
            ASSERT_EQ(driver().cuStreamBeginCapture(rig().stream.get(), global_mode), 0);
            if (mode == global_mode) {
                expect_invalidated(elsewhere(mode, call));
            } else {
                EXPECT_EQ(elsewhere(mode, call), 0);
                EXPECT_EQ(rig().stream.end_capture().code, 0);
            }
        }
    }
}

// A thread's mode guards it from others; its own capture it may spoil in any but the relaxed one.
TEST_F(FakeDriver, AThreadsModeLeavesItsOwnCaptureAlone) {
    for (const int captured : {global_mode, thread_local_mode}) {
        int mode = thread_local_mode;
        driver().cuThreadExchangeStreamCaptureMode(&mode);
        DevicePtr pointer = 0;
        ASSERT_EQ(driver().cuStreamBeginCapture(rig().stream.get(), captured), 0);
        expect_invalidated(driver().cuMemAlloc(&pointer, 10));
        driver().cuThreadExchangeStreamCaptureMode(&mode);
        EXPECT_EQ(mode, thread_local_mode);
    }
    int mode = 3;
    EXPECT_EQ(driver().cuThreadExchangeStreamCaptureMode(&mode), 1);
}

TEST_F(FakeDriver, DeviceSynchroniseAnywhereSpoilsACapture) {
    rig().stream.begin_capture();
    const int answer = std::async(std::launch::async, [&] {
                           const ContextGuard guard(*rig().device);
                           return raw<int()>("cuCtxSynchronize")();
                       }).get();
    expect_invalidated(answer);
}

TEST_F(FakeDriver, CaptureEndsOnItsThreadAndStream) {
    rig().stream.begin_capture();
    cuda::GraphHandle graph = nullptr;
    const int answer = std::async(std::launch::async, [&] {
                           const ContextGuard guard(*rig().device);
                           return driver().cuStreamEndCapture(rig().stream.get(), &graph);
                       }).get();
    EXPECT_EQ(answer, 908);
    expect_violation("on another thread");
    EXPECT_EQ(driver().cuStreamBeginCapture(rig().stream.get(), 1), 401);
    expect_violation("captures already");
    EXPECT_EQ(rig().stream.end_capture().code, 0);
    EXPECT_EQ(driver().cuStreamEndCapture(rig().stream.get(), &graph), 401) << "not capturing";
}

TEST_F(FakeDriver, ForksMustBeJoined) {
    const cuda::Stream side(rig().device);
    const cuda::Event fork(rig().device), join(rig().device);
    const auto& stream = rig().stream;
    for (const bool joined : {true, false}) {
        stream.begin_capture();
        fork.record(stream);
        side.wait(fork);
        EXPECT_EQ(side.capture_status(), cuda::CaptureStatus::active);
        side.fill(rig().memory.pointer(), 5, 4);
        join.record(side);
        if (joined) stream.wait(join);
        const auto captured = stream.end_capture();
        EXPECT_EQ(captured.code, joined ? 0 : 904);
        EXPECT_EQ(side.capture_status(), cuda::CaptureStatus::none);
        if (!joined) continue;
        captured.graph.instantiate().launch(stream);
        EXPECT_EQ(device_value(rig().memory.pointer()), 0x05050505);
    }
    expect_violation("not joined");
}

TEST_F(FakeDriver, CapturesAreIsolated) {
    const cuda::Event outside(rig().device), inside(rig().device);
    const auto& stream = rig().stream;
    outside.record(stream);
    stream.begin_capture();
    expect_invalidated(driver().cuStreamWaitEvent(stream.get(), outside.get(), 0), 905);
    expect_violation("depend on work outside");
    stream.begin_capture();
    inside.record(stream);
    expect_invalidated(driver().cuEventQuery(inside.get()), 907);
    expect_violation("an event inside a capture");
    EXPECT_EQ(driver().cuStreamWaitEvent(stream.get(), inside.get(), 0), capture_invalidated);
}

TEST_F(FakeDriver, GraphLaunchIntoACaptureSpoilsIt) {
    rig().stream.begin_capture();
    rig().stream.fill(rig().memory.pointer(), 1, 4);
    const cuda::GraphExec exec = rig().stream.end_capture().graph.instantiate();
    rig().stream.begin_capture();
    expect_invalidated(driver().cuGraphLaunch(exec.get(), rig().stream.get()));
    expect_violation("cuGraphLaunch into a stream that captures");
}

TEST_F(FakeDriver, StreamDestroyedInACaptureIsReported) {
    {
        const cuda::Stream stream(rig().device);
        stream.begin_capture();
    }
    expect_violation("cuStreamDestroy of a stream that captures");
    rig().stream.begin_capture();
    EXPECT_EQ(rig().stream.end_capture().code, 0);
}

TEST_F(FakeDriver, FaultsArriveWhereTheyWereAskedFor) {
    FAKE(fault)("cuMemGetInfo", 3, 801, edgeyolo_fake_once);
    FAKE(fault)("cuStreamQuery", 2, 999, edgeyolo_fake_always);
    std::size_t free = 0, total = 0;
    const int answers[] = {driver().cuMemGetInfo(&free, &total), driver().cuMemGetInfo(&free, &total),
                           driver().cuMemGetInfo(&free, &total), driver().cuMemGetInfo(&free, &total)};
    EXPECT_EQ(std::vector<int>(answers, answers + 4), (std::vector<int>{0, 0, 801, 0}));
    rig().stream.synchronize();
    EXPECT_EQ(driver().cuStreamQuery(rig().stream.get()), 0);
    EXPECT_EQ(driver().cuStreamQuery(rig().stream.get()), 999);
    EXPECT_EQ(driver().cuStreamQuery(rig().stream.get()), 999);
    EXPECT_EQ(FAKE(faults_hit)(), 3);
    FAKE(fault)("cuMemGetInfo", 1, 719, edgeyolo_fake_lost);
    EXPECT_EQ(driver().cuMemGetInfo(&free, &total), 719);
    EXPECT_EQ(driver().cuMemsetD8Async(rig().memory.pointer(), 0, 4, rig().stream.get()), 719);
    FAKE(lose_device)(0, 0);
}

TEST_F(FakeDriver, FaultsComeFromTheEnvironmentToo) {
    rig_.reset();
    setenv("EDGEYOLO_FAKE_FAULTS", "cuMemAlloc:2:2:once,cuStreamCreate:1:46:lost", 1);
    setenv("EDGEYOLO_FAKE_DEVICES", "5", 1);
    setenv("EDGEYOLO_FAKE_EMPTY", "1:always", 1);
    FAKE(reset)();
    unsetenv("EDGEYOLO_FAKE_FAULTS");
    unsetenv("EDGEYOLO_FAKE_DEVICES");
    unsetenv("EDGEYOLO_FAKE_EMPTY");
    int count = 0;
    EXPECT_EQ(driver().cuDeviceGetCount(&count), 0);
    EXPECT_EQ(count, 5);
    {
        const DeviceRef device = cuda::Device::open(0);
        const cuda::DeviceBuffer first(device, 10);
        EXPECT_THROW(cuda::DeviceBuffer(device, 10), DeviceError);
        EXPECT_THROW(cuda::Stream{device}, DeviceError);
        EXPECT_THROW(cuda::DeviceBuffer(device, 10), DeviceError) << "lost";
    }
    EXPECT_EQ(FAKE(reset)(), 0);
    setenv("EDGEYOLO_FAKE_FAULTS", "nonsense", 1);
    FAKE(reset)();
    unsetenv("EDGEYOLO_FAKE_FAULTS");
    expect_violation("expected call:nth:code:mode");
}

TEST_F(FakeDriver, MemoryIsFiniteAndCounted) {
    EXPECT_EQ(FAKE(memory)(0), 256u);
    {
        const cuda::DeviceBuffer large(rig().device, 1000000);
        EXPECT_EQ(FAKE(memory)(0), 1000256u);
    }
    EXPECT_EQ(FAKE(memory)(0), 256u);
    EXPECT_EQ(FAKE(peak_memory)(0), 1000256u);
    EXPECT_THROW(cuda::DeviceBuffer(rig().device, std::size_t{1} << 30), DeviceError);
    EXPECT_EQ(FAKE(live)("stream"), 1);
    EXPECT_EQ(FAKE(live)("device_memory"), 1);
    EXPECT_EQ(FAKE(live)("pinned_memory"), 1);
    EXPECT_EQ(FAKE(live)("module"), 1);
    EXPECT_EQ(FAKE(live)("context"), 1);
    EXPECT_EQ(FAKE(live)(nullptr), 5);
}

TEST_F(FakeDriver, ContextThatEndsBeforeItsHandlesIsReported) {
    cuda::ContextHandle context = nullptr;
    ASSERT_EQ(driver().cuDevicePrimaryCtxRetain(&context, 1), 0);
    ASSERT_EQ(driver().cuCtxPushCurrent(context), 0);
    DevicePtr pointer = 0;
    ASSERT_EQ(driver().cuMemAlloc(&pointer, 10), 0);
    EXPECT_EQ(driver().cuCtxPopCurrent(&context), 0);
    EXPECT_EQ(driver().cuDevicePrimaryCtxRelease(1), 0);
    expect_violation("ends with 1 live handles or allocations");
    const ContextGuard guard(*rig().device);
    driver().cuMemFree(pointer);
    expect_violation("memory of device 1 freed while device 0 is current");
}

TEST_F(FakeDriver, FunctionsAreAskedForAtOneVersion) {
    EXPECT_THROW(driver().lookup("cuMemAlloc", 11000), DeviceError) << "too old";
    EXPECT_NE(driver().lookup("cuMemAlloc", 12080), nullptr);
    expect_violation("at version 12080");
    EXPECT_THROW(driver().lookup("cuNothing"), DeviceError);
}

}  // namespace
}  // namespace edgeyolo::test
