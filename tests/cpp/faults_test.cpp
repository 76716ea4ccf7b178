// What goes wrong, and what comes of it. A caller who works on GPU 1 uses a detector on GPU 0, and one thing fails:
//   - every call to the driver that a stage makes, one at a time, once or with the device lost;
//   - everything that the engine, the graph or the memory can do wrong.
// Each fault has to leave the right result, by the path that is told, or a typed error; no handle; the caller's device;
// and a detector, or at least a process, that goes on working. The table is printed; run this test alone to read it:
//   edgeyolo_pipeline10_tests --gtest_filter='Faults.*'
#include <cstdio>
#include <functional>
#include <map>
#include "pipeline_rig.hpp"

namespace edgeyolo::test {
namespace {

constexpr int not_supported = 801;
constexpr int launch_failed = 719;

#define EDGEYOLO_NAME(name, ...) #name,
constexpr const char* driver_calls[] = {EDGEYOLO_DRIVER_CALLS(EDGEYOLO_NAME)};
#undef EDGEYOLO_NAME

enum Stage {
    load_stage,
    make_stage,   // buffers, contexts, warm-up, capture, instantiation, self-check
    frame_stage,  // four frames; a dynamic engine is captured at the third
    close_stage
};
constexpr const char* stage_names[] = {"load", "make", "frames", "close"};

// What one detector went through. Every error that is not one of ours fails the test.
struct Story {
    std::string ending;  // of the stage with the fault
    bool failed = false;

    void end(const std::string& text) {
        if (ending.find(text) == std::string::npos) ending += (ending.empty() ? "" : ", ") + text;
    }
    bool attempt(const std::function<void()>& work) {
        try {
            work();
            return true;
        } catch (const DeviceError& error) {
            end("DeviceError");
            last = error.what();
        } catch (const EngineError& error) {
            end("EngineError");
            last = error.what();
        } catch (const std::exception& error) {
            ADD_FAILURE() << "not a DeviceError or EngineError: " << error.what();
        }
        failed = true;
        return false;
    }
    std::string last;  // words
};

struct Kind {
    const char* name;
    PlanText plan;
    PipelineOptions options;
};

Kind kind(const char* name, const PlanText& plan) {
    Kind result{name, plan, options_for(plan)};
    result.options.slots = 1;
    result.options.target = {96, 64};
    return result;
}

std::vector<Kind> kinds() {
    std::vector<Kind> all{kind("static", {}), kind("dynamic", dynamic_text()), kind("dla", {}),
                          kind("data-dependent", {})};
    all[2].options.dla = true;
    all[3].plan.head = "dynamic_rows";
    all[3].options.head = HeadKind::end2end;
    return all;
}

class Faults : public SimulatedGpu {
protected:
    void SetUp() override {
        SimulatedGpu::SetUp();
        if (!IsSkipped()) FAKE(set_delay)(1, 0);
    }

    struct Detector {
        std::shared_ptr<LoadedEngine> engine;
        std::unique_ptr<Pipeline> pipeline;
    };

    Results frame(Pipeline& pipeline) { return run(pipeline, image_.view()); }

    // One stage. True when nothing went wrong; frames go on after one that failed.
    bool stage(const Kind& what, Stage number, Detector& detector, Story& story) {
        switch (number) {
            case load_stage: return story.attempt([&] { detector.engine = load(what.plan); });
            case make_stage:
                return story.attempt(
                    [&] { detector.pipeline = std::make_unique<Pipeline>(detector.engine, what.options); });
            case frame_stage: {
                bool good = true;
                for (int i = 0; i < 4; ++i)
                    good &= story.attempt([&] { expect_same(frame(*detector.pipeline), truth(what), what.name); });
                return good;
            }
            case close_stage: return story.attempt([&] { detector = {}; });
        }
        return false;
    }

    const Results& truth(const Kind& what) {
        auto& known = truths_[what.name];
        if (known.scores.empty()) known = expected(what.plan, image_.view(), what.options);
        return known;
    }

    // The whole life of a detector, with `arm` just before the stage. `lost`: nothing can work on this device after.
    Story live_through(const Kind& what, Stage when, const std::function<void()>& arm, bool lost) {
        const std::string where = std::string(what.name) + ", " + stage_names[when];
        Story story;
        {
            const cuda::DeviceRef other = cuda::Device::open(1);
            const cuda::ContextGuard caller(*other);
            Detector detector;
            Story before;
            for (int i = 0; i < when && !before.failed; ++i) stage(what, static_cast<Stage>(i), detector, before);
            EXPECT_FALSE(before.failed) << where << ": " << before.last;
            if (before.failed) return before;
            const long hits = FAKE(faults_hit)();
            arm();
            stage(what, when, detector, story);
            EXPECT_TRUE(FAKE(faults_hit)() > hits || !must_hit_) << where << ": the fault did not happen";
            if (!lost) FAKE(clear_faults)();
            cuda::ContextHandle current = nullptr;
            cuda::driver().cuCtxGetCurrent(&current);
            EXPECT_EQ(current, other->context) << where << ": the caller's device changed";

            if (detector.pipeline && !lost) {
                // It still works, whatever it said before.
                expect_same(frame(*detector.pipeline), truth(what), where);
                const GraphStats stats = detector.pipeline->info().graph;
                if (when != close_stage && !story.failed) story.end(std::string("right, by ") + path_name(stats.path));
                if (when != close_stage && story.failed) story.end("then right");
                if (stats.path == Path::execute) {
                    EXPECT_NE(stats.reason, "") << where;
                }
            } else if (detector.pipeline && when != close_stage) {
                EXPECT_THROW(frame(*detector.pipeline), DeviceError) << where;
            }
            detector = {};
            if (story.ending.empty()) story.end("done");
            EXPECT_EQ(FAKE(live)("stream") + FAKE(live)("event") + FAKE(live)("module") + FAKE(live)("graph") +
                          FAKE(live)("exec") + FAKE(live)("device_memory") + FAKE(live)("pinned_memory"),
                      0)
                << where << ": leaked";
            EXPECT_EQ(broken_rules(), "") << where;
        }
        if (lost) {
            EXPECT_EQ(FAKE(reset)(), 0) << where << ": leaked";
        }
        // The process works on: a new detector, from the file to a result.
        Detector fresh;
        Story after;
        for (int i = 0; i <= close_stage && !after.failed; ++i) stage(what, static_cast<Stage>(i), fresh, after);
        EXPECT_FALSE(after.failed) << where << ": " << after.last;
        return story;
    }

    // The rules of the driver that were broken, and a clean sheet. A handle whose context could not be made current is
    // destroyed without it rather than leaked, which CUDA allows and the simulated driver tells.
    std::string broken_rules() const {
        std::string text = violations();
        FAKE(clear_violations)();
        return without_context_ && text.find("wrong context") != std::string::npos ? "" : text;
    }
    bool without_context_ = false;
    bool must_hit_ = true;

    // How often each call is made in a stage when all goes well.
    std::map<std::string, long> calls_of(const Kind& what, Stage when) {
        std::map<std::string, long> count;
        Detector detector;
        Story story;
        for (int i = 0; i < when; ++i) stage(what, static_cast<Stage>(i), detector, story);
        for (const char* call : driver_calls) count[call] = -FAKE(calls)(call);
        stage(what, when, detector, story);
        for (const char* call : driver_calls) count[call] += FAKE(calls)(call);
        EXPECT_FALSE(story.failed) << story.last;
        return count;
    }

    void row(const std::string& what, const std::string& stage, const std::string& fault, long cases,
             const std::string& ending) {
        std::printf("| %-14s | %-6s | %-40s | %5ld | %s\n", what.c_str(), stage.c_str(), fault.c_str(), cases,
                    ending.c_str());
        ++rows_;
    }
    void head(const char* title) {
        std::printf("\n%s\n", title);
        std::printf("| engine         | stage  | fault                                    | cases | what came of it\n");
    }

    const Picture image_ = picture({120, 90}, 7);
    std::map<std::string, Results> truths_;
    int rows_ = 0;
};

// Made once per process, when the driver is opened (cuda_test.cpp), or while an error is told.
bool is_left_out(const std::string& call) {
    for (const char* name : {"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetErrorName", "cuGetErrorString"})
        if (call == name) return true;
    return false;
}

// Endings with the number of cases each.
std::string summary(const std::map<std::string, long>& endings) {
    std::string text;
    for (const auto& [ending, count] : endings)
        text += (text.empty() ? "" : "; ") + std::to_string(count) + " x " + ending;
    return text;
}

// Positions of a call to fail at: all of a few, else a dozen of them, the first and the last included.
std::vector<long> positions(long calls, long most) {
    std::vector<long> result;
    const long count = std::min(calls, most);
    for (long i = 0; i < count; ++i) result.push_back(count == 1 ? 1 : 1 + i * (calls - 1) / (count - 1));
    return result;
}

TEST_F(Faults, EveryDriverCallFailsOnce) {
    if (IsSkipped()) return;
    head("A call to the driver fails once");
    long cases = 0;
    for (const Kind& what : kinds())
        for (const Stage when : {load_stage, make_stage, frame_stage, close_stage})
            for (const auto& [call, calls] : calls_of(what, when)) {
                if (calls <= 0 || is_left_out(call)) continue;
                without_context_ = call == "cuCtxPushCurrent";
                std::map<std::string, long> endings;
                const std::vector<long> at = positions(calls, std::string(what.name) == "static" ? 12 : 4);
                for (const long nth : at) {
                    SCOPED_TRACE(call + " number " + std::to_string(nth));
                    const int code = call.find("Alloc") != std::string::npos ? cuda::out_of_memory : not_supported;
                    const auto arm = [&, name = call] { FAKE(fault)(name.c_str(), nth, code, edgeyolo_fake_once); };
                    ++endings[live_through(what, when, arm, false).ending];
                }
                cases += static_cast<long>(at.size());
                row(what.name, stage_names[when], call, static_cast<long>(at.size()), summary(endings));
            }
    std::printf("%ld cases in %d rows\n", cases, rows_);
    EXPECT_GT(rows_, 60);
}

TEST_F(Faults, DeviceIsLostAtEveryDriverCall) {
    if (IsSkipped()) return;
    head("The device is lost in a call to the driver");
    const std::vector<Kind> all = kinds();
    for (const Kind& what : {all[0], all[2]})
        for (const Stage when : {load_stage, make_stage, frame_stage, close_stage})
            for (const auto& [call, calls] : calls_of(what, when)) {
                if (calls <= 0 || is_left_out(call)) continue;
                if (call == "cuCtxPushCurrent") continue;  // would lose the device that is current, the caller's
                std::map<std::string, long> endings;
                const std::vector<long> at = positions(calls, 3);
                for (const long nth : at) {
                    SCOPED_TRACE(call + " number " + std::to_string(nth));
                    const auto arm = [&, name = call] {
                        FAKE(fault)(name.c_str(), nth, launch_failed, edgeyolo_fake_lost);
                    };
                    const Story story = live_through(what, when, arm, true);
                    ++endings[story.ending];
                    // The two calls that end a guard may be the last of a stage: the next one finds out.
                    const bool ends_a_guard = call == "cuCtxPopCurrent" || call == "cuThreadExchangeStreamCaptureMode";
                    if (when != close_stage && !(ends_a_guard && story.ending == "done")) {
                        EXPECT_EQ(story.ending, "DeviceError") << story.last;
                    }
                }
                row(what.name, stage_names[when], call, static_cast<long>(at.size()), summary(endings));
            }
}

TEST_F(Faults, EnginesAndGraphsThatMisbehave) {
    if (IsSkipped()) return;
    head("Engine, graph or memory");
    struct Case {
        const char* name;
        Stage when;
        const char* more;  // lines of the plan
        std::function<void()> arm;
        const char* ending;
    };
    const auto nothing = [] {};
    const Case cases[] = {
        {"the plan is refused", load_stage, "option refuse_load\n", nothing, "EngineError"},
        {"an error is logged while loading", load_stage, "option error_load\n", nothing, "EngineError"},
        {"no execution context", make_stage, "option refuse_context\n", nothing, "EngineError"},
        {"an error is logged for a context", make_stage, "option error_context\n", nothing, "EngineError"},
        {"enqueue and execute refused", frame_stage, "option refuse_enqueue refuse_execute\n", nothing, "EngineError"},
        {"enqueue refused while capturing", make_stage, "option refuse_capture\n", nothing, "right, by execute_v2"},
        {"nothing launched while capturing", make_stage, "option empty_capture\n", nothing, "right, by execute_v2"},
        {"the graph computes something else", make_stage, "option differs_in_capture\n", nothing,
         "right, by execute_v2"},
        {"two runs allocate first", make_stage, "warmups 2\n", nothing, "right, by graph"},
        {"capture spoilt once", make_stage, "", [] { FAKE(spoil_capture)(1, edgeyolo_fake_once); }, "right, by graph"},
        {"capture spoilt always", make_stage, "", [] { FAKE(spoil_capture)(1, edgeyolo_fake_always); },
         "right, by execute_v2"},
        {"empty graph once", make_stage, "", [] { FAKE(empty_graph)(1, edgeyolo_fake_once); }, "right, by graph"},
        {"empty graph always", make_stage, "", [] { FAKE(empty_graph)(1, edgeyolo_fake_always); },
         "right, by execute_v2"},
        {"graph runs nothing once", make_stage, "", [] { FAKE(stale_graph)(1, edgeyolo_fake_once); },
         "right, by graph"},
        {"graph runs nothing always", make_stage, "", [] { FAKE(stale_graph)(1, edgeyolo_fake_always); },
         "right, by execute_v2"},
        {"instantiation refused always", make_stage, "",
         [] { FAKE(fault)("cuGraphInstantiateWithFlags", 1, not_supported, edgeyolo_fake_always); },
         "right, by execute_v2"},
        {"replay refused always", frame_stage, "",
         [] { FAKE(fault)("cuGraphLaunch", 1, not_supported, edgeyolo_fake_always); }, "right, by execute_v2"},
        {"no memory, always", make_stage, "",
         [] { FAKE(fault)("cuMemAlloc", 1, cuda::out_of_memory, edgeyolo_fake_always); }, "DeviceError"},
        {"no pinned memory, always", frame_stage, "",
         [] { FAKE(fault)("cuMemHostAlloc", 1, cuda::out_of_memory, edgeyolo_fake_always); },
         "DeviceError, then right"},
    };
    for (const Case& c : cases) {
        SCOPED_TRACE(c.name);
        Kind what = kind("static", {});
        what.plan.more = c.more;
        std::string ending;
        const bool broken = c.ending == std::string("EngineError");
        if (broken) {  // from birth: no good detector can be made of it
            const cuda::DeviceRef other = cuda::Device::open(1);
            const cuda::ContextGuard caller(*other);
            Story story;
            Detector detector;
            for (int i = 0; i <= frame_stage && !story.failed; ++i) {
                stage(what, static_cast<Stage>(i), detector, story);
                if (story.failed) {
                    EXPECT_EQ(i, c.when) << story.last;
                }
            }
            ending = story.ending;
        } else {
            must_hit_ = c.more[0] == '\0';  // else the engine itself is the fault
            ending = live_through(what, c.when, c.arm, false).ending;
        }
        EXPECT_EQ(ending, c.ending);
        row("static", stage_names[c.when], c.name, 1, ending);
    }
}

TEST_F(Faults, OutOfMemoryForOneFrame) {
    if (IsSkipped()) return;
    const Kind what = kind("static", {});
    FAKE(set_devices)(2, 0, 8u << 20);
    Detector detector;
    Story story;
    ASSERT_TRUE(stage(what, load_stage, detector, story) && stage(what, make_stage, detector, story)) << story.last;
    const Picture large = picture({2400, 1600}, 1);
    for (int i = 0; i < 2; ++i) {
        const std::string text = message_of<DeviceError>([&] { run(*detector.pipeline, large.view()); });
        EXPECT_HAS(text, "cuMemAlloc(11.5 MB)");
        EXPECT_HAS(text, "CUDA_ERROR_OUT_OF_MEMORY");
        expect_same(frame(*detector.pipeline), truth(what), "a smaller one");
    }
    head("Memory");
    row("static", "frames", "a frame larger than the memory", 1, "DeviceError, then right");
}

}  // namespace
}  // namespace edgeyolo::test
