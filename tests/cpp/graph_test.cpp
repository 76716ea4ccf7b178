// The graph runner: capture, self-check, replay, fallback, the cache over shapes, and a table of driver faults. (Longer
// than most files: one rig, one short test per rule.)
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "graph.hpp"
#include "simulated_gpu.hpp"

namespace edgeyolo::test {
namespace {

using cuda::ContextGuard;
using cuda::DeviceRef;
using Shape = GraphRunner::Shape;

// A slot with a toy network that copies its input: frame (pinned) > input > raw > result (pinned). Copies only, so that
// it runs on a real GPU as it is.
class Copier final : public FrameProgram {
public:
    explicit Copier(const DeviceRef& device, std::size_t bytes = 1024)
        : frame(device, bytes), result(device, bytes), input_(device, bytes), raw_(device, bytes) {}

    bool enqueue(const cuda::Stream& stream) override {
        const bool capturing = stream.capture_status() != cuda::CaptureStatus::none;
        if (capturing && ++captures > 0 && throw_in_capture) throw InvalidInput("thrown inside a capture");
        if (capturing && sync_in_capture) stream.synchronize();
        if (capturing && on_capture) on_capture();
        if (refuse_always || (capturing && refuse_in_capture)) return false;
        if (capturing && freeze_in_capture)
            stream.fill(input_.pointer(), 17, frame.bytes());  // what the first picture of the self-check holds
        else
            stream.copy_to_device(input_.pointer(), frame.data(), frame.bytes());
        for (int i = 0; i < copies; ++i) stream.copy_on_device(raw_.pointer(), input_.pointer(), frame.bytes());
        if (throw_foreign) throw std::runtime_error("not an error of edgeyolo");
        if (noise > 0) stream.fill(raw_.pointer(), static_cast<std::uint8_t>(noise + runs++ % 2), 4);
        stream.copy_to_host(result.data(), raw_.pointer(), frame.bytes());
        return true;
    }
    bool execute(const cuda::Stream& stream) override {
        stream.synchronize();
        if (refuse_execute) return false;
        stream.copy_to_device(input_.pointer(), frame.data(), frame.bytes());
        stream.copy_on_device(raw_.pointer(), input_.pointer(), frame.bytes());
        stream.copy_to_host(result.data(), raw_.pointer(), frame.bytes());
        return true;
    }
    std::string last_errors() const override { return "toy words"; }
    void prepare_check(const cuda::Stream& stream, unsigned seed) override {
        std::memset(frame.data(), static_cast<int>(seed * 17), frame.bytes());
        std::memset(result.data(), 0xee, frame.bytes());
        stream.fill(raw_.pointer(), 0xdd, frame.bytes());
    }
    ProgramOutput read_check(const cuda::Stream& stream) override {
        stream.synchronize();
        ProgramOutput output;
        output.exact.assign(result.data(), result.data() + result.bytes());
        output.values.assign(result.data(), result.data() + result.bytes());
        return output;
    }

    cuda::PinnedBuffer frame, result;
    bool refuse_always = false;
    bool refuse_in_capture = false;
    bool refuse_execute = false;
    bool throw_in_capture = false;
    bool sync_in_capture = false;
    bool freeze_in_capture = false;
    bool throw_foreign = false;
    std::function<void()> on_capture;
    int copies = 1;
    int noise = 0;
    int captures = 0;
    int runs = 0;

private:
    cuda::DeviceBuffer input_, raw_;
};

// One frame as the pipeline runs it; the byte that comes out.
int run_frame(GraphRunner& runner, const cuda::Stream& stream, const Shape& shape, Copier& slot,
              const std::shared_ptr<Copier>& own, int value) {
    std::shared_ptr<Copier> captured = own;
    runner.prepare(stream, shape, [&] { return captured; });
    // A graph of its own reads its own frame: here both are written, the pipeline shares one buffer.
    std::memset(slot.frame.data(), value, slot.frame.bytes());
    std::memset(own->frame.data(), value, own->frame.bytes());
    std::memset(slot.result.data(), 0, slot.result.bytes());
    std::memset(own->result.data(), 0, own->result.bytes());
    const long replays = runner.stats().replays;
    runner.run(stream, shape, slot);
    stream.synchronize();
    const cuda::PinnedBuffer& result = runner.stats().replays > replays ? own->result : slot.result;
    for (std::size_t i = 1; i < result.bytes(); ++i)
        if (result.data()[i] != result.data()[0]) return -1;
    return result.data()[0];
}

struct Rig {
    explicit Rig(int ordinal = 0)
        : device(cuda::Device::open(ordinal)), stream(device), guard(*device), slot(std::make_shared<Copier>(device)) {
        options.warn = [this](const std::string& text) { warnings.push_back(text); };
    }
    int frame(GraphRunner& runner, int value) { return run_frame(runner, stream, {}, *slot, slot, value); }
    DeviceRef device;
    cuda::Stream stream;
    ContextGuard guard;
    std::shared_ptr<Copier> slot;
    GraphRunner::Options options;
    std::vector<std::string> warnings;
};

const PathChoice static_graph = choose_path(GraphMode::automatic, {});

TEST(ChoosePath, FollowsTheTable) {
    EngineTraits traits;
    EXPECT_EQ(choose_path(GraphMode::automatic, traits).path, Path::graph);
    EXPECT_EQ(choose_path(GraphMode::automatic, traits).captured_at_use, 1);
    EXPECT_EQ(choose_path(GraphMode::off, traits).path, Path::enqueue);
    EXPECT_EQ(choose_path(GraphMode::off, traits).reason, "graph=\"off\"");
    traits.dynamic_shapes = true;
    EXPECT_EQ(choose_path(GraphMode::automatic, traits).path, Path::graph);
    EXPECT_EQ(choose_path(GraphMode::automatic, traits).captured_at_use, 3);
    for (bool EngineTraits::* member :
         {&EngineTraits::dla, &EngineTraits::embedded_nms, &EngineTraits::weight_streaming}) {
        EngineTraits one;
        one.*member = true;
        EXPECT_EQ(choose_path(GraphMode::automatic, one).path, Path::execute);
        EXPECT_NE(choose_path(GraphMode::automatic, one).reason, "");
        EXPECT_EQ(choose_path(GraphMode::off, one).path, Path::enqueue);
        one.data_dependent_outputs = true;
        EXPECT_EQ(choose_path(GraphMode::automatic, one).path, Path::enqueue);
    }
    EngineTraits rtx;
    rtx.compiles_at_run_time = true;
    EXPECT_EQ(choose_path(GraphMode::automatic, rtx).path, Path::enqueue);
}

class Graphs : public Gpu {};
class GraphFaults : public SimulatedGpu {};

TEST_F(Graphs, StaticEngineReplaysEveryFrame) {
    Rig rig;
    GraphRunner runner(static_graph, rig.options);
    for (int value = 1; value < 20; ++value) EXPECT_EQ(rig.frame(runner, value), value);
    const GraphStats stats = runner.stats();
    EXPECT_EQ(stats.path, Path::graph);
    EXPECT_EQ(stats.reason, "");
    EXPECT_EQ(stats.captures, 1);
    EXPECT_EQ(stats.replays, 19);
    EXPECT_EQ(stats.enqueued + stats.executed + stats.fallbacks + stats.failed_tries, 0);
    EXPECT_GT(stats.capture_ms, 0);
    EXPECT_EQ(rig.slot->captures, 1);
    EXPECT_TRUE(rig.warnings.empty());
}

TEST_F(Graphs, OffRunsStepByStep) {
    Rig rig;
    GraphRunner runner(choose_path(GraphMode::off, {}), rig.options);
    for (int value = 1; value < 5; ++value) EXPECT_EQ(rig.frame(runner, value), value);
    EXPECT_EQ(runner.stats().enqueued, 4);
    EXPECT_EQ(runner.stats().path, Path::enqueue);
    EXPECT_EQ(rig.slot->captures, 0);
}

// What the engine may do wrong inside a capture, with the reason that is told.
TEST_F(Graphs, RefusalsFallBackToExecute) {
    struct Case {
        bool Copier::* fault;
        const char* reason;
    };
    for (const Case& c : {Case{&Copier::refuse_in_capture, "the engine refused to be captured: toy words"},
                          Case{&Copier::throw_in_capture, "thrown inside a capture"},
                          Case{&Copier::sync_in_capture, "cuStreamSynchronize"},
                          Case{&Copier::freeze_in_capture, "the graph's results differ from the engine's"},
                          Case{&Copier::refuse_always, "the engine refused to warm up: toy words"}}) {
        Rig rig;
        (*rig.slot).*c.fault = true;
        GraphRunner runner(static_graph, rig.options);
        for (int value = 1; value < 5; ++value) EXPECT_EQ(rig.frame(runner, value), value) << c.reason;
        const GraphStats stats = runner.stats();
        EXPECT_EQ(stats.path, Path::execute);
        EXPECT_NE(stats.reason.find(c.reason), std::string::npos) << stats.reason;
        EXPECT_EQ(stats.executed, 4);
        EXPECT_EQ(stats.failed_tries, 3);
        EXPECT_EQ(stats.fallbacks, 1);
        EXPECT_EQ(rig.warnings.size(), 1u) << "one warning";
        EXPECT_EQ(rig.stream.capture_status(), cuda::CaptureStatus::none);
        if (!real_gpu()) FAKE(clear_violations)();  // the engine that synchronises in a capture is one
    }
}

TEST_F(Graphs, LastPathRefusedIsAnEngineError) {
    Rig rig;
    rig.slot->refuse_always = rig.slot->refuse_execute = true;
    GraphRunner runner(static_graph, rig.options);
    try {
        rig.frame(runner, 1);
        FAIL();
    } catch (const EngineError& error) {
        EXPECT_STREQ(error.what(), "the engine refused to run by execute_v2: toy words");
    }
}

TEST_F(Graphs, RefusedBeforeTheThirdUseGoesToExecute) {
    Rig rig;
    rig.slot->refuse_always = true;
    EngineTraits dynamic;
    dynamic.dynamic_shapes = true;
    GraphRunner runner(choose_path(GraphMode::automatic, dynamic), rig.options);
    for (int value = 1; value < 5; ++value) EXPECT_EQ(rig.frame(runner, value), value);
    EXPECT_EQ(runner.stats().executed, 4);
    EXPECT_EQ(runner.stats().failed_tries, 0);
}

TEST_F(Graphs, NondeterministicEngineIsToldAndReplayed) {
    Rig rig;
    rig.slot->noise = 5;  // raw bytes differ by one from run to run
    GraphRunner runner(static_graph, rig.options);
    runner.prepare(rig.stream, {}, [&] { return rig.slot; });
    EXPECT_EQ(runner.stats().path, Path::graph);
    EXPECT_NE(runner.stats().reason.find("nondeterministic engine"), std::string::npos) << runner.stats().reason;
    EXPECT_EQ(runner.stats().fallbacks, 0);
}

TEST_F(GraphFaults, WarmUpIsOverBeforeTheCapture) {
    Rig rig;
    FAKE(set_delay)(1, 2000);
    long operations = 0;
    rig.slot->on_capture = [&] { operations = FAKE(operations)(0); };
    GraphRunner runner(static_graph, rig.options);
    runner.prepare(rig.stream, {}, [&] { return rig.slot; });
    EXPECT_EQ(operations, 2 * 3) << "two runs of three copies";
}

TEST_F(GraphFaults, ForeignExceptionFreesNothingInUse) {
    Rig rig;
    FAKE(set_delay)(1, 2000);
    GraphRunner runner(static_graph, rig.options);
    const auto make = [&] {
        auto program = std::make_shared<Copier>(rig.device);
        program->throw_foreign = true;
        program->copies = 50;
        return program;
    };
    EXPECT_THROW(runner.prepare(rig.stream, {}, make), std::runtime_error);
    rig.stream.synchronize();
}

TEST_F(GraphFaults, SpoiltOnceIsTriedAgain) {
    Rig rig;
    FAKE(spoil_capture)(1, edgeyolo_fake_once);
    GraphRunner runner(static_graph, rig.options);
    EXPECT_EQ(rig.frame(runner, 9), 9);
    EXPECT_EQ(runner.stats().path, Path::graph);
    EXPECT_EQ(runner.stats().failed_tries, 1);
    EXPECT_TRUE(rig.warnings.empty());
}

TEST_F(GraphFaults, BadGraphsAreNeverReplayed) {
    struct Case {
        const char* control;
        const char* reason;
    };
    for (const Case& c : {Case{"edgeyolo_fake_spoil_capture", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
                          Case{"edgeyolo_fake_empty_graph", "the capture recorded nothing"},
                          Case{"edgeyolo_fake_stale_graph", "the graph's results differ from the engine's"}}) {
        Rig rig;
        FAKE(clear_faults)();
        control<void(long, int)>(c.control)(1, edgeyolo_fake_always);
        GraphRunner runner(static_graph, rig.options);
        for (int value = 1; value < 5; ++value) EXPECT_EQ(rig.frame(runner, value), value) << c.control;
        const GraphStats stats = runner.stats();
        EXPECT_EQ(stats.path, Path::execute) << c.control;
        EXPECT_NE(stats.reason.find(c.reason), std::string::npos) << stats.reason;
        EXPECT_EQ(stats.replays, 0);
        EXPECT_EQ(rig.warnings.size(), 1u);
        EXPECT_EQ(FAKE(live)("graph") + FAKE(live)("exec"), 0);
    }
}

TEST_F(GraphFaults, StaleGraphOfANondeterministicEngineIsFound) {
    Rig rig;
    rig.slot->noise = 5;
    FAKE(stale_graph)(1, edgeyolo_fake_always);
    GraphRunner runner(static_graph, rig.options);
    runner.prepare(rig.stream, {}, [&] { return rig.slot; });
    EXPECT_EQ(runner.stats().path, Path::execute);
}

TEST_F(GraphFaults, ReplayRefusedLosesNoFrame) {
    Rig rig;
    GraphRunner runner(static_graph, rig.options);
    EXPECT_EQ(rig.frame(runner, 1), 1);
    FAKE(fault)("cuGraphLaunch", 1, 801, edgeyolo_fake_once);
    for (int value = 2; value < 6; ++value) EXPECT_EQ(rig.frame(runner, value), value);
    EXPECT_EQ(runner.stats().path, Path::execute);
    EXPECT_EQ(runner.stats().replays, 1);
    EXPECT_EQ(runner.stats().executed, 4);
    EXPECT_EQ(runner.stats().device_bytes, 0u);
    EXPECT_EQ(FAKE(live)("exec"), 0);
}

struct DynamicRig : Rig {
    DynamicRig() {
        traits.dynamic_shapes = true;
        options.clock = [this] { return now; };
    }
    int frame(GraphRunner& runner, int shape, int value) {
        const Shape key{1, 3, shape, shape};
        std::shared_ptr<Copier> own;
        const auto found = programs.find(shape);
        own = found == programs.end() ? nullptr : found->second.lock();
        runner.prepare(stream, key, [&] {
            own = std::make_shared<Copier>(device);
            programs[shape] = own;
            ++made;
            return own;
        });
        Copier& target = own ? *own : *slot;
        const long replays = runner.stats().replays;
        for (Copier* program : {&target, slot.get()}) {
            std::memset(program->frame.data(), value, program->frame.bytes());
            std::memset(program->result.data(), 0, program->result.bytes());
        }
        runner.run(stream, key, *slot);
        stream.synchronize();
        return (runner.stats().replays > replays ? target : *slot).result.data()[7];
    }
    EngineTraits traits;
    std::chrono::steady_clock::time_point now{};
    std::map<int, std::weak_ptr<Copier>> programs;
    int made = 0;
};

TEST_F(Graphs, DynamicShapeIsCapturedAtItsThirdUse) {
    DynamicRig rig;
    GraphRunner runner(choose_path(GraphMode::automatic, rig.traits), rig.options);
    for (int use = 1; use <= 5; ++use) {
        EXPECT_EQ(rig.frame(runner, 320, use), use);
        EXPECT_EQ(runner.stats().enqueued, std::min(use, 2));
        EXPECT_EQ(runner.stats().replays, std::max(0, use - 2));
    }
    EXPECT_EQ(rig.made, 1);
}

TEST_F(Graphs, TwelveShapesUseEightGraphs) {
    for (const bool cyclic : {true, false}) {
        DynamicRig rig;
        GraphRunner runner(choose_path(GraphMode::automatic, rig.traits), rig.options);
        std::mt19937 random(7);
        const int frames = 600;
        for (int i = 0; i < frames; ++i) {
            const int shape = 32 * (1 + (cyclic ? i % 12 : static_cast<int>(random() % 12)));
            EXPECT_EQ(rig.frame(runner, shape, 1 + i % 200), 1 + i % 200);
            EXPECT_LE(runner.stats().graphs, 8u);
            rig.now += std::chrono::milliseconds(500);
        }
        // 600 frames in 300 s of the clock: at most 4 captures a minute.
        EXPECT_LE(runner.stats().captures, 4 * 5);
        EXPECT_GE(runner.stats().captures, 8);
        EXPECT_EQ(runner.stats().graphs, 8u);
        EXPECT_EQ(runner.stats().replays + runner.stats().enqueued, frames);
        EXPECT_EQ(runner.stats().executed, 0);
        if (!real_gpu()) {
            EXPECT_EQ(FAKE(live)("exec"), 8);
        }
    }
}

TEST_F(GraphFaults, EvictionWaitsForTheLastReplay) {
    DynamicRig rig;
    rig.options.graphs = 1;
    GraphRunner runner(choose_path(GraphMode::automatic, rig.traits), rig.options);
    for (int use = 1; use <= 3; ++use) {
        EXPECT_EQ(rig.frame(runner, 64, use), use);
        if (use < 3) {
            EXPECT_EQ(rig.frame(runner, 96, use), use);
        }
    }
    FAKE(set_delay)(1, 2000);
    for (int i = 0; i < 50; ++i) runner.run(rig.stream, {1, 3, 64, 64}, *rig.slot);
    EXPECT_EQ(rig.frame(runner, 96, 9), 9);
    EXPECT_EQ(runner.stats().captures, 2);
    EXPECT_EQ(runner.stats().graphs, 1u);
}

TEST_F(GraphFaults, ShapeThatCannotBeCapturedGoesAlone) {
    DynamicRig rig;
    GraphRunner runner(choose_path(GraphMode::automatic, rig.traits), rig.options);
    for (int use = 1; use <= 3; ++use) EXPECT_EQ(rig.frame(runner, 64, use), use);
    FAKE(fault)("cuGraphInstantiateWithFlags", 1, 2, edgeyolo_fake_always);
    for (int use = 1; use <= 4; ++use) EXPECT_EQ(rig.frame(runner, 96, use), use);
    EXPECT_EQ(rig.frame(runner, 64, 77), 77);
    const GraphStats stats = runner.stats();
    EXPECT_EQ(stats.path, Path::graph);
    EXPECT_EQ(stats.replays, 2);
    EXPECT_EQ(stats.executed, 2);
    EXPECT_NE(stats.reason.find("(1, 3, 96, 96)"), std::string::npos) << stats.reason;
    EXPECT_NE(stats.reason.find("CUDA_ERROR_OUT_OF_MEMORY"), std::string::npos) << stats.reason;
}

TEST_F(GraphFaults, ThreadsCaptureAtOnceWhileAnotherSynchronisesTheDevice) {
    const DeviceRef device = cuda::Device::open(0);
    std::atomic<bool> stop{false};
    std::thread spoiler([&] {
        const ContextGuard guard(*device);
        auto* synchronize = raw<int()>("cuCtxSynchronize");
        while (!stop) {
            synchronize();
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    });
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t)
        threads.emplace_back([t] {
            Rig rig;
            GraphRunner runner(static_graph, rig.options);
            for (int i = 0; i < 40; ++i) EXPECT_EQ(rig.frame(runner, 1 + (t * 40 + i) % 250), 1 + (t * 40 + i) % 250);
            EXPECT_EQ(runner.stats().replays + runner.stats().executed, 40);
        });
    for (std::thread& thread : threads) thread.join();
    stop = true;
    spoiler.join();
}

// One life of a detector's slot on device 1, with device 0 current: load, capture, frames, close.
void life(std::vector<int>& results) {
    const DeviceRef device = cuda::Device::open(1);
    const cuda::Stream stream(device);
    const ContextGuard guard(*device);
    const auto slot = std::make_shared<Copier>(device);
    const cuda::Event done(device);
    GraphRunner runner(static_graph, {});
    const cuda::Drain drain(stream);
    for (int value = 1; value <= 4; ++value) {
        runner.prepare(stream, {}, [&] { return slot; });
        std::memset(slot->frame.data(), value, slot->frame.bytes());
        std::memset(slot->result.data(), 0, slot->result.bytes());
        runner.run(stream, {}, *slot);
        done.record(stream);
        done.synchronize();
        results.push_back(slot->result.data()[3]);
    }
}

// Every driver call of that life fails once, at each place where it is made; fails from then on; takes the device with
// it. Whatever happens: right results or a typed error, nothing leaked, the caller's device unchanged, and the next
// life is a good one.
TEST_F(GraphFaults, EveryCallFailingAnywhere) {
    const std::vector<int> expected{1, 2, 3, 4};
    FAKE(set_delay)(1, 0);
    const DeviceRef callers = cuda::Device::open(0);
    const ContextGuard callers_guard(*callers);
    std::map<std::string, long> calls;
    {
        std::vector<int> results;
        std::map<std::string, long> before;
#define COUNT_BEFORE(name, ...) before[#name] = FAKE(calls)(#name);
        EDGEYOLO_DRIVER_CALLS(COUNT_BEFORE)
        life(results);
        ASSERT_EQ(results, expected);
#define COUNT(name, ...) calls[#name] = FAKE(calls)(#name) - before[#name];
        EDGEYOLO_DRIVER_CALLS(COUNT)
    }
    const long live_before = live_gpu_objects();
    const long handles_before = FAKE(live)(nullptr);
    int cases = 0, right = 0, refused = 0;
    const char* const modes[] = {"once", "always", "lost"};
    for (const auto& [call, count] : calls) {
        // The caller's own guard is closed by these two as well: only single failures end inside the life.
        for (long nth = 1; nth <= count; ++nth) {
            for (const int mode : {edgeyolo_fake_once, edgeyolo_fake_always, edgeyolo_fake_lost}) {
                const int code = mode == edgeyolo_fake_lost ? 719 : 801;
                const std::string name = call + " #" + std::to_string(nth) + " " + modes[mode];
                FAKE(fault)(call.c_str(), nth, code, mode);
                std::vector<int> results;
                std::string error;
                try {
                    life(results);
                } catch (const Error& typed) {
                    error = typed.what();
                }
                ++cases;
                const bool good = results == expected;
                good ? ++right : ++refused;
                EXPECT_TRUE(good || (!error.empty() && error.find("CUDA_ERROR_") != std::string::npos))
                    << name << ": " << error;
                for (std::size_t i = 0; i < results.size(); ++i) EXPECT_EQ(results[i], expected[i]) << name;
                FAKE(clear_faults)();
                FAKE(lose_device)(1, 0);
                cuda::ContextHandle context = nullptr;
                cuda::driver().cuCtxGetCurrent(&context);
                EXPECT_EQ(context, callers->context) << name;
                EXPECT_EQ(live_gpu_objects(), live_before) << name;
                EXPECT_EQ(FAKE(live)(nullptr), handles_before) << name;
                EXPECT_EQ(FAKE(memory)(1), 0u) << name;
                if (call != "cuCtxPushCurrent") {
                    EXPECT_EQ(violations(), "") << name;
                }
                FAKE(clear_violations)();
                if (HasFailure()) return;
            }
        }
    }
    std::vector<int> results;
    life(results);
    EXPECT_EQ(results, expected);
    std::printf("%d faults: %d with the right results, %d with a typed error\n", cases, right, refused);
    EXPECT_GT(cases, 200);
    EXPECT_GT(right, 50);
}

}  // namespace
}  // namespace edgeyolo::test
