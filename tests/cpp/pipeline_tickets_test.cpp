// Frames under way: tickets, slots, threads, devices, results that stay on the GPU, memory, the end.
#include <sys/wait.h>
#include <unistd.h>
#include <atomic>
#include <cmath>
#include <thread>
#include "pipeline_rig.hpp"

namespace edgeyolo::test {
namespace {

using namespace std::chrono_literals;

class Tickets : public Gpu {};
class SimulatedTickets : public SimulatedGpu {};

TEST_F(Tickets, MoreFramesThanSlotsBeforeTheFirstWait) {
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    Pipeline pipeline(load(plan), wanted);
    std::vector<Picture> images;
    std::vector<Ticket> tickets;
    for (unsigned i = 0; i < 20; ++i) {
        images.push_back(picture({60 + static_cast<int>(i) * 7, 90}, i));
        tickets.push_back(pipeline.submit({images.back().view()}));
    }
    for (std::size_t i = 20; i-- > 0;)  // in the other order
        expect_same(pipeline.wait(tickets[i])->at(0), expected(plan, images[i].view(), wanted), std::to_string(i));
    EXPECT_EQ(pipeline.info().frames, 20);
}

TEST_F(Tickets, ResultsAreHandedOutOnce) {
    const PlanText plan;
    const auto engine = load(plan);
    Pipeline pipeline(engine, options_for(plan));
    Pipeline other(engine, options_for(plan));
    const Picture image = picture({50, 50}, 1);
    const Ticket ticket = pipeline.submit({image.view()});
    EXPECT_HAS(message_of<InvalidInput>([&] { other.wait(ticket); }), "no ticket of this detector");
    EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.wait(nullptr); }), "no ticket of this detector");
    EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.wait_on_device(ticket); }), "leave_on_device");
    EXPECT_TRUE(pipeline.wait(ticket));
    EXPECT_TRUE(pipeline.done(ticket));
    EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.wait(ticket); }), "handed out once");
}

TEST_F(Tickets, TimeoutLeavesTheTicketGood) {
    PlanText plan;
    plan.more = "busy 60000\n";
    PipelineOptions wanted = options_for(plan);
    Pipeline pipeline(load(plan), wanted);
    const Picture image = picture({50, 50}, 1);
    const Ticket ticket = pipeline.submit({image.view()});
    EXPECT_FALSE(pipeline.done(ticket));
    EXPECT_FALSE(pipeline.wait(ticket, 0ns));
    EXPECT_FALSE(pipeline.wait(ticket, 2ms));
    const auto found = pipeline.wait(ticket, 60s);
    ASSERT_TRUE(found);
    expect_same(found->at(0), expected(plan, image.view(), wanted), "late");
    EXPECT_TRUE(pipeline.wait(pipeline.submit({image.view()}), std::chrono::nanoseconds::max()));
}

TEST_F(Tickets, SlotsOverlap) {
    PlanText plan;
    plan.more = "busy 40000\n";
    const auto engine = load(plan);
    const Picture image = picture({50, 50}, 1);
    const auto seconds = [&](int slots) {
        PipelineOptions wanted = options_for(plan);
        wanted.slots = slots;
        Pipeline pipeline(engine, wanted);
        const auto start = std::chrono::steady_clock::now();
        std::vector<Ticket> tickets;
        for (int i = 0; i < 6; ++i) tickets.push_back(pipeline.submit({image.view()}));
        for (const Ticket& ticket : tickets) pipeline.wait(ticket);
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    EXPECT_LT(seconds(3), 0.75 * seconds(1));
}

TEST_F(Tickets, DroppedTicketsCostNothing) {
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    Pipeline pipeline(load(plan), wanted);
    const Picture image = picture({50, 50}, 1);
    const Results truth = expected(plan, image.view(), wanted);
    for (int i = 0; i < 50; ++i) {
        pipeline.submit({image.view()});
        if (i % 5 == 0) expect_same(run(pipeline, image.view()), truth, "between");
    }
}

TEST_F(Tickets, CloseReturnsTheMemoryAndKeepsResults) {
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    const auto engine = load(plan);
    const long before = live_gpu_objects();
    Pipeline pipeline(engine, wanted);
    const Picture image = picture({50, 50}, 1);
    const Ticket ticket = pipeline.submit({image.view()});
    const Ticket dropped = pipeline.submit({image.view()});
    pipeline.close();
    pipeline.close();
    EXPECT_EQ(live_gpu_objects(), before);
    EXPECT_TRUE(pipeline.info().closed);
    EXPECT_EQ(pipeline.info().device_bytes, 0u);
    EXPECT_EQ(pipeline.info().graph.replays, 2);
    EXPECT_TRUE(pipeline.done(ticket));
    expect_same(pipeline.wait(ticket)->at(0), expected(plan, image.view(), wanted), "after close");
    EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.submit({image.view()}); }), "is closed");
}

TEST_F(Tickets, CloseWhileOthersSubmit) {
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    const auto engine = load(plan);
    const Picture image = picture({50, 50}, 1);
    const Results truth = expected(plan, image.view(), wanted);
    for (int round = 0; round < 5; ++round) {
        Pipeline pipeline(engine, wanted);
        std::atomic<int> closed{0};
        std::vector<std::thread> threads;
        for (int t = 0; t < 4; ++t)
            threads.emplace_back([&] {
                try {
                    for (;;) expect_same(run(pipeline, image.view()), truth, "until closed");
                } catch (const InvalidInput& error) {
                    EXPECT_HAS(std::string(error.what()), "is closed");
                    ++closed;
                }
            });
        std::this_thread::sleep_for(10ms);
        pipeline.close();
        for (std::thread& thread : threads) thread.join();
        EXPECT_EQ(closed, 4);
    }
}

TEST_F(Tickets, DestroyedWithFramesInFlight) {
    PlanText plan;
    plan.more = "busy 10000\n";
    const auto engine = load(plan);
    const Picture image = picture({50, 50}, 1);
    Ticket last;
    {
        Pipeline pipeline(engine, options_for(plan));
        for (int i = 0; i < 5; ++i) last = pipeline.submit({image.view()});
    }
    last.reset();
}

TEST_F(Tickets, ResultsThatStayOnTheDevice) {
    PlanText plan;
    plan.batch = "2";
    const PipelineOptions wanted = options_for(plan);
    const auto engine = load(plan);
    const cuda::ContextGuard guard(*engine->device());
    const cuda::Stream stream(engine->device());
    const Picture images[] = {picture({120, 90}, 1), picture({96, 64}, 2)};
    SubmitOptions how;
    how.leave_on_device = true;
    std::vector<DeviceResults> kept;
    {
        Pipeline pipeline(engine, wanted);
        for (int i = 0; i < 4; ++i) {
            const Ticket ticket = pipeline.submit({images[0].view(), images[1].view()}, how);
            EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.wait(ticket); }), "stay on the GPU");
            kept.push_back(std::move(*pipeline.wait_on_device(ticket)));
        }
    }
    for (const DeviceResults& results : kept)  // the pipeline is gone
        for (std::size_t i = 0; i < 2; ++i) {
            const DeviceResults::Picture& on_device = results.pictures.at(i);
            const auto count = static_cast<std::size_t>(on_device.count);
            Results found;
            found.boxes.resize(4 * count);
            found.scores.resize(count);
            found.class_ids.resize(count);
            stream.copy_to_host(found.boxes.data(), on_device.boxes, 16 * count);
            stream.copy_to_host(found.scores.data(), on_device.scores, 4 * count);
            stream.copy_to_host(found.class_ids.data(), on_device.class_ids, 4 * count);
            stream.synchronize();
            EXPECT_GT(count, 0u);
            expect_same(found, expected(plan, images[i].view(), wanted), "on the device");
        }
}

TEST_F(Tickets, TimingsTellTheStagesOfAnEagerFrame) {
    PlanText plan;
    plan.more = "busy 5000\n";
    const auto engine = load(plan);
    const Picture image = picture({640, 480}, 1);
    SubmitOptions how;
    how.timings = true;
    for (const GraphMode mode : {GraphMode::automatic, GraphMode::off}) {
        PipelineOptions wanted = options_for(plan);
        wanted.graph = mode;
        Pipeline pipeline(engine, wanted);
        const Ticket ticket = pipeline.submit({image.view()}, how);
        EXPECT_HAS(message_of<InvalidInput>([&] { Pipeline::timings(ticket); }), "after wait()");
        expect_same(pipeline.wait(ticket)->at(0), expected(plan, image.view(), wanted), "timed");
        const auto times = Pipeline::timings(ticket);
        ASSERT_TRUE(times);
        EXPECT_GE(times->upload, 0);
        EXPECT_GE(times->frame, 4);
        EXPECT_EQ(std::isnan(times->network), mode == GraphMode::automatic);
        if (mode == GraphMode::off) {
            EXPECT_GE(times->network, 4);
            EXPECT_NEAR(times->letterbox + times->network + times->postprocess, times->frame, 0.01);
        }
        const Ticket plain = pipeline.submit({image.view()});
        pipeline.wait(plain);
        EXPECT_FALSE(Pipeline::timings(plain));
    }
}

// 8 threads, their first calls at once, frames of mixed sizes: every result is that of the CPU.
void mixed_frames(Pipeline& pipeline, const PlanText& plan, const PipelineOptions& wanted, int frames) {
    std::vector<Picture> images;
    std::vector<Results> truth;
    for (unsigned i = 0; i < 24; ++i) {
        images.push_back(picture({20 + static_cast<int>(i * 37 % 400), 20 + static_cast<int>(i * 61 % 300)}, i,
                                 i % 4 == 0   ? PixelFormat::gray
                                 : i % 4 == 1 ? PixelFormat::bgra
                                              : PixelFormat::bgr));
        truth.push_back(expected(plan, images.back().view(), wanted));
    }
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 8; ++t)
        threads.emplace_back([&, t] {
            ++ready;
            while (ready < 8) std::this_thread::yield();
            std::mt19937 random(t);
            const auto buffer = pipeline.frame_buffer({64, 48}, PixelFormat::bgr);
            const Picture own = picture({64, 48}, 1000 + t);
            std::memcpy(buffer->data(), own.pixels.data(), own.pixels.size());
            const Results own_truth = expected(plan, own.view(), wanted);
            for (int i = 0; i < frames; ++i) {
                const std::size_t index = random() % images.size();
                if (i % 7 == 0) {
                    expect_same(run(pipeline, buffer), own_truth, "pinned");
                } else if (i % 7 == 1) {
                    const Ticket first = pipeline.submit({images[index].view()});
                    const Ticket second = pipeline.submit({images[(index + 1) % images.size()].view()});
                    expect_same(pipeline.wait(second)->at(0), truth[(index + 1) % images.size()], "second");
                    expect_same(pipeline.wait(first, 60s)->at(0), truth[index], "first");
                } else {
                    expect_same(run(pipeline, images[index].view()), truth[index], "mixed");
                }
            }
        });
    for (std::thread& thread : threads) thread.join();
}

TEST_F(Tickets, EightThreadsEqualTheSerialRun) {
    for (const int slots : {1, 2, 3}) {
        const PlanText plan;
        PipelineOptions wanted = options_for(plan);
        wanted.slots = slots;
        Pipeline pipeline(load(plan), wanted);
        mixed_frames(pipeline, plan, wanted, slots == 2 ? 200 : 50);
        EXPECT_EQ(pipeline.info().graph.enqueued + pipeline.info().graph.executed, 0);
    }
}

TEST_F(Tickets, EightThreadsOnADynamicEngine) {
    const PlanText plan = dynamic_text();
    PipelineOptions wanted = options_for(plan);
    wanted.target = {96, 64};
    Pipeline pipeline(load(plan), wanted);
    mixed_frames(pipeline, plan, wanted, 40);
    EXPECT_EQ(pipeline.info().graph.captures, 2);
}

TEST_F(Tickets, MemoryIsFlat) {
    const PlanText plan;
    const auto engine = load(plan);
    Pipeline pipeline(engine, options_for(plan));
    long first = 0;
    for (int round = 0; round < 20; ++round) {
        for (unsigned i = 0; i < 24; ++i) {
            const Picture image = picture({30 + static_cast<int>(i) * 13, 40 + static_cast<int>(i * i) % 200}, i);
            run(pipeline, image.view());
            run(pipeline, pipeline.frame_buffer({30, 20}, PixelFormat::bgr));
        }
        if (round == 1) first = live_gpu_objects();
        if (round > 1) {
            EXPECT_EQ(live_gpu_objects(), first);
        }
    }
}

TEST_F(SimulatedTickets, SecondDeviceAlone) {
    if (IsSkipped()) return;
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    const cuda::DeviceRef first = cuda::Device::open(0);
    const cuda::ContextGuard current(*first);
    const auto operations = FAKE(operations)(0);
    const auto memory = FAKE(memory)(0);
    {
        Pipeline pipeline(load(plan, 1), wanted);
        for (unsigned i = 0; i < 6; ++i) {
            const Picture image = picture({50, 50}, i);
            expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), "device 1");
        }
        EXPECT_GT(FAKE(operations)(1), 0);
        EXPECT_GT(FAKE(memory)(1), 0u);
    }
    EXPECT_EQ(FAKE(operations)(0), operations);
    EXPECT_EQ(FAKE(memory)(0), memory);
    EXPECT_EQ(FAKE(peak_memory)(0), memory);
    cuda::ContextHandle now = nullptr;
    ASSERT_EQ(cuda::driver().cuCtxGetCurrent(&now), 0);
    EXPECT_EQ(now, first->context) << "the caller's device";
}

TEST_F(SimulatedTickets, TwoDevicesFromTwoThreads) {
    if (IsSkipped()) return;
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    std::vector<std::thread> threads;
    for (int ordinal = 0; ordinal < 2; ++ordinal)
        threads.emplace_back([&, ordinal] {
            Pipeline pipeline(load(plan, ordinal), wanted);
            for (unsigned i = 0; i < 100; ++i) {
                const Picture image = picture({30 + static_cast<int>(i), 50}, i * 2 + static_cast<unsigned>(ordinal));
                expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), "both");
            }
        });
    for (std::thread& thread : threads) thread.join();
}

#if defined(__SANITIZE_THREAD__)
constexpr bool fork_is_possible = false;  // ThreadSanitizer does not follow a fork of a process with threads
#else
constexpr bool fork_is_possible = true;
#endif

TEST_F(Tickets, AfterForkThereIsAnError) {
    if (!fork_is_possible) GTEST_SKIP();
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    auto pipeline = std::make_unique<Pipeline>(load(plan), wanted);
    const Picture image = picture({50, 50}, 1);
    const auto buffer = pipeline->frame_buffer({50, 50}, PixelFormat::bgr);
    Ticket ticket = pipeline->submit({image.view()});
    const pid_t child = fork();
    if (child == 0) {
        int wrong = 0;
        const auto fails = [&](auto&& work) {
            try {
                work();
                ++wrong;
            } catch (const DeviceError&) {
            } catch (...) {
                ++wrong;
            }
        };
        fails([&] { pipeline->submit({image.view()}); });
        fails([&] { pipeline->submit({buffer}); });
        fails([&] { pipeline->wait(ticket); });
        fails([&] { pipeline->done(ticket); });
        fails([&] { pipeline->close(); });
        fails([&] { pipeline->frame_buffer({8, 8}, PixelFormat::bgr); });
        fails([&] { load(plan); });
        ticket.reset();
        pipeline.reset();
        _exit(wrong);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    expect_same(pipeline->wait(ticket)->at(0), expected(plan, image.view(), wanted), "the parent goes on");
}

}  // namespace
}  // namespace edgeyolo::test
