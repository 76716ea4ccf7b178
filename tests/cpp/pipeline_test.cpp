// The pipeline against the CPU's code, bit for bit: every head, data type, path and kind of engine.
#include "pipeline.hpp"

#include <cmath>
#include "halves.hpp"
#include "pipeline_rig.hpp"

namespace edgeyolo::test {
namespace {

class PipelineTest : public Gpu {};

const Size sizes[] = {{120, 90}, {96, 64}, {192, 128}, {33, 70}, {640, 360}};

TEST_F(PipelineTest, EveryHeadAndTypeEqualsTheCpu) {
    for (const char* head : {"raw", "raw_transposed", "yolov5", "end2end"})
        for (const bool half_input : {false, true})
            for (const bool half_output : {false, true})
                for (const GraphMode mode : {GraphMode::automatic, GraphMode::off}) {
                    PlanText plan;
                    plan.head = head;
                    plan.input = half_input ? "float16" : "float32";
                    plan.output = half_output ? "float16" : "float32";
                    PipelineOptions wanted = options_for(plan);
                    wanted.graph = mode;
                    Pipeline pipeline(load(plan), wanted);
                    std::size_t boxes = 0;
                    for (unsigned i = 0; i < 5; ++i) {
                        const Picture image = picture(sizes[i], i);
                        const Results truth = expected(plan, image.view(), wanted);
                        expect_same(run(pipeline, image.view()), truth, plan.text());
                        boxes += truth.size();
                    }
                    EXPECT_GT(boxes, 20u) << "the pictures must hold something: " << plan.text();
                    const GraphStats stats = pipeline.info().graph;
                    EXPECT_EQ(stats.path, mode == GraphMode::off ? Path::enqueue : Path::graph);
                    EXPECT_EQ(stats.replays, mode == GraphMode::off ? 0 : 5);
                    EXPECT_EQ(stats.enqueued, mode == GraphMode::off ? 5 : 0);
                    EXPECT_EQ(stats.fallbacks, 0) << stats.reason;
                }
}

TEST_F(PipelineTest, ReplayEqualsExecution) {
    for (const char* more : {"", "kernels 30\n", "aux_streams 1\n", "warmups 2\noption differs_in_warmup\n"}) {
        PlanText plan;
        plan.more = more;
        PipelineOptions wanted = options_for(plan);
        const auto engine = load(plan);
        Pipeline replayed(engine, wanted);
        wanted.graph = GraphMode::off;
        Pipeline executed(engine, wanted);
        for (unsigned i = 0; i < 8; ++i) {
            const Picture image = picture(sizes[i % 5], i);
            // The first runs of this engine are off by what its plan says; a capture warms up before.
            if (i >= 4) expect_same(run(replayed, image.view()), run(executed, image.view()), more);
            if (i < 4) run(executed, image.view());
        }
        EXPECT_EQ(replayed.info().graph.replays, 4);
        EXPECT_EQ(replayed.info().graph.captures, 2) << "one per slot";
        EXPECT_EQ(executed.info().graph.enqueued, 8);
    }
}

TEST_F(PipelineTest, EnginesThatAreNotCapturedSayWhy) {
    struct Case {
        const char* more;
        bool dla, nms;
        const char* reason;
    };
    for (const Case& c :
         {Case{"", true, false, "the engine runs on a DLA"}, Case{"", false, true, "the engine contains NMS"},
          Case{"streamable 1000\nbudget 0\n", false, false, "the engine streams its weights"}}) {
        PlanText plan;
        plan.more = c.more;
        PipelineOptions wanted = options_for(plan);
        wanted.dla = c.dla;
        wanted.embedded_nms = c.nms;
        std::vector<std::string> warnings;
        wanted.warn = [&](const std::string& text) { warnings.push_back(text); };
        Pipeline pipeline(load(plan), wanted);
        for (unsigned i = 0; i < 4; ++i) {
            const Picture image = picture(sizes[i], i);
            expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), c.reason);
        }
        const GraphStats stats = pipeline.info().graph;
        EXPECT_EQ(stats.path, Path::execute);
        EXPECT_EQ(stats.reason, c.reason);
        EXPECT_EQ(stats.executed, 4);
        EXPECT_EQ(stats.captures + stats.replays + stats.enqueued, 0);
        EXPECT_TRUE(warnings.empty()) << "known from the start: no reason for a warning";
    }
}

TEST_F(PipelineTest, EnginesThatCannotBeCapturedFallBackWithOneWarning) {
    for (const char* option : {"refuse_capture", "empty_capture", "differs_in_capture", "host_sync", "allocate"}) {
        PlanText plan;
        plan.more = std::string("option ") + option + "\n";
        PipelineOptions wanted = options_for(plan);
        std::vector<std::string> warnings;
        wanted.warn = [&](const std::string& text) { warnings.push_back(text); };
        Pipeline pipeline(load(plan), wanted);
        for (unsigned i = 0; i < 4; ++i) {
            const Picture image = picture(sizes[i], i);
            expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), option);
        }
        const GraphStats stats = pipeline.info().graph;
        EXPECT_EQ(stats.path, Path::execute) << option;
        EXPECT_EQ(stats.executed, 4) << option;
        EXPECT_EQ(stats.failed_tries, 6) << option << ": three tries per slot";
        ASSERT_EQ(warnings.size(), 1u) << option;
        EXPECT_NE(warnings[0].find("frames run by execute_v2"), std::string::npos) << warnings[0];
        if (!real_gpu()) FAKE(clear_violations)();  // these engines break the rules of a capture on purpose
    }
}

TEST_F(PipelineTest, DataDependentOutputs) {
    PlanText plan;
    plan.head = "dynamic_rows";
    PipelineOptions wanted = options_for(plan);
    wanted.thresholds.conf = 0.26f;
    Pipeline pipeline(load(plan), wanted);
    for (unsigned i = 0; i < 8; ++i) {
        const Picture image = picture(sizes[i % 5], i);
        expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), "rows");
        // No row at all.
        Picture grey = picture({50, 40}, 1);
        std::fill(grey.pixels.begin(), grey.pixels.end(), std::uint8_t{90});
        EXPECT_EQ(run(pipeline, grey.view()).size(), 0u);
    }
    EXPECT_EQ(pipeline.info().graph.path, Path::enqueue);
    EXPECT_EQ(pipeline.info().graph.reason, "the shape of an output depends on the data");
}

TEST_F(PipelineTest, TwelveShapesUseEightGraphs) {
    const PlanText plan = dynamic_text();
    const auto engine = load(plan);
    for (const bool cyclic : {true, false}) {
        PipelineOptions wanted = options_for(plan);
        wanted.slots = 1;
        wanted.captures_per_minute = 12;
        Pipeline pipeline(engine, wanted);
        std::mt19937 random(3);
        const int frames = 240;
        std::size_t most = 0;
        for (int i = 0; i < frames; ++i) {
            const int index = cyclic ? i % 12 : static_cast<int>(random() % 12);
            const Size target{32 * (1 + index), 32 * (1 + (index + 5) % 12)};
            SubmitOptions how;
            how.target = target;
            const Picture image = picture(sizes[i % 5], static_cast<unsigned>(i));
            const Results found = run(pipeline, image.view(), how);
            if (i % 3 == 0 || i < 40)
                expect_same(found, expected(plan, image.view(), wanted, target), shape_text({i, index}));
            most = std::max(most, pipeline.info().graph.graphs);
        }
        const GraphStats stats = pipeline.info().graph;
        EXPECT_EQ(most, 8u);
        EXPECT_LE(stats.captures, 12) << "not a capture per frame";
        EXPECT_GT(stats.replays, frames / 4);
        EXPECT_EQ(stats.replays + stats.enqueued, frames);
        EXPECT_EQ(stats.executed + stats.fallbacks, 0) << stats.reason;
    }
}

TEST_F(PipelineTest, ShapesOutsideTheProfileAreRefused) {
    const PlanText plan = dynamic_text();
    Pipeline pipeline(load(plan), options_for(plan));
    SubmitOptions how;
    how.target = {512, 64};
    const std::string text = message_of<InvalidInput>([&] { run(pipeline, picture({50, 50}, 1).view(), how); });
    EXPECT_HAS(text, "(1, 3, 64, 512)");
    EXPECT_HAS(text, "(1, 3, 32, 32) to (1, 3, 416, 416)");
    how.target = {64, 64};
    run(pipeline, picture({50, 50}, 1).view(), how);

    const PlanText fixed;
    Pipeline one(load(fixed), options_for(fixed));
    EXPECT_HAS(message_of<InvalidInput>([&] { run(one, picture({50, 50}, 1).view(), how); }), "(1, 3, 64, 96)");
}

TEST_F(PipelineTest, SecondProfile) {
    PlanText plan = dynamic_text();
    plan.more = "profile 1 3 32 32 1 3 64 64 1 3 128 128\nprofile 1 3 160 160 1 3 160 160 1 3 256 256\n";
    PipelineOptions wanted = options_for(plan);
    Pipeline pipeline(load(plan), wanted);
    for (int i = 0; i < 12; ++i) {
        SubmitOptions how;
        how.target = i % 3 == 0 ? Size{64, 96} : Size{224, 160 + 32 * (i % 2)};
        const Picture image = picture(sizes[i % 5], static_cast<unsigned>(i));
        expect_same(run(pipeline, image.view(), how), expected(plan, image.view(), wanted, how.target), "profile");
    }
}

TEST_F(PipelineTest, BatchesOfAStaticEngineMayBeShort) {
    PlanText plan;
    plan.batch = "4";
    for (const GraphMode mode : {GraphMode::automatic, GraphMode::off}) {
        PipelineOptions wanted = options_for(plan);
        wanted.graph = mode;
        Pipeline pipeline(load(plan), wanted);
        EXPECT_EQ(pipeline.batch(), 4);
        for (unsigned i = 0; i < 12; ++i) {
            std::vector<Picture> images;
            std::vector<Frame> frames;
            for (unsigned k = 0; k <= i % 4; ++k) images.push_back(picture(sizes[(i + k) % 5], 100 * i + k));
            for (const Picture& image : images) frames.emplace_back(image.view());
            const auto found = pipeline.wait(pipeline.submit(frames)).value();
            ASSERT_EQ(found.size(), frames.size());
            for (std::size_t k = 0; k < images.size(); ++k)
                expect_same(found[k], expected(plan, images[k].view(), wanted), "picture " + std::to_string(k));
        }
        const Picture image = picture({50, 50}, 1);
        EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.submit({}); }), "1 to 4 frames");
        EXPECT_HAS(message_of<InvalidInput>([&] { pipeline.submit(std::vector<Frame>(5, image.view())); }), "found 5");
    }
}

TEST_F(PipelineTest, DynamicBatchRunsAsManyAsThereAre) {
    PlanText plan;
    plan.batch = "-1";
    plan.more = "profile 2 3 64 96 2 3 64 96 4 3 64 96\n";
    PipelineOptions wanted = options_for(plan);
    wanted.slots = 1;
    Pipeline pipeline(load(plan), wanted);
    for (unsigned i = 0; i < 16; ++i) {
        std::vector<Picture> images;
        std::vector<Frame> frames;
        for (unsigned k = 0; k <= i % 4; ++k) images.push_back(picture(sizes[(i + k) % 5], 100 * i + k));
        for (const Picture& image : images) frames.emplace_back(image.view());
        const auto found = pipeline.wait(pipeline.submit(frames)).value();
        ASSERT_EQ(found.size(), frames.size());
        for (std::size_t k = 0; k < images.size(); ++k)
            expect_same(found[k], expected(plan, images[k].view(), wanted), "picture " + std::to_string(k));
    }
    // One picture runs as the profile's minimum of two: three input shapes in all.
    EXPECT_EQ(pipeline.info().graph.captures, 3);
}

TEST_F(PipelineTest, ThresholdsAndFilter) {
    PlanText plan;
    plan.classes = 70;
    PipelineOptions wanted = options_for(plan);
    wanted.thresholds.conf = 0.1f;
    wanted.thresholds.agnostic = true;
    wanted.thresholds.max_det = 7;
    wanted.thresholds.allowed.assign(70, 1);
    for (std::size_t i = 0; i < 70; i += 3) wanted.thresholds.allowed[i] = 0;
    Pipeline pipeline(load(plan), wanted);
    for (unsigned i = 0; i < 5; ++i) {
        const Picture image = picture(sizes[i], i);
        expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), "filter");
    }
    const auto refuse = [&](const char* part, auto&& change) {
        PipelineOptions bad = options_for(plan);
        change(bad);
        const auto engine = load(plan);
        EXPECT_HAS(message_of<InvalidInput>([&] { Pipeline(engine, bad); }), part);
    };
    refuse("conf must be between 0 and 1", [](PipelineOptions& o) { o.thresholds.conf = 1.5f; });
    refuse("iou must be between 0 and 1", [](PipelineOptions& o) { o.thresholds.iou = NAN; });
    refuse("1 to 1024 on the GPU", [](PipelineOptions& o) { o.thresholds.max_det = 1025; });
    refuse("slots must be 1 to 16", [](PipelineOptions& o) { o.slots = 0; });
    refuse("filter was made for 3 classes", [](PipelineOptions& o) { o.thresholds.allowed.assign(3, 1); });
    refuse("it has: output0", [](PipelineOptions& o) { o.output = "boxes"; });
}

TEST_F(PipelineTest, HeadsThatDoNotFitAreRefused) {
    const PlanText plan;
    const auto engine = load(plan);
    PipelineOptions wanted = options_for(plan);
    wanted.classes = 4;
    const std::string text = message_of<EngineError>([&] { Pipeline(engine, wanted); });
    EXPECT_HAS(text, "(1, 7, 96)");
    EXPECT_HAS(text, "8 values per box (4 classes)");
    wanted = options_for(plan);
    wanted.head = HeadKind::end2end;
    EXPECT_HAS(message_of<EngineError>([&] { Pipeline(engine, wanted); }), "6 values per box");
}

TEST_F(PipelineTest, FactsBeforeAnythingIsDecided) {
    PlanText plan = dynamic_text();
    const std::string header = "{\"task\": \"detect\"}";
    std::string bytes(4, '\0');
    bytes[0] = static_cast<char>(header.size());
    const std::string body = plan.text();
    bytes += header + body;
    const auto engine = LoadedEngine::open(file_of(bytes), 0, options());
    EXPECT_EQ(engine->header(), header);
    EXPECT_EQ(engine->plan_bytes(), body.size());
    EXPECT_EQ(engine->plan_digest(), load(plan)->plan_digest());
    EXPECT_EQ(engine->library().path, test_library);
    EXPECT_EQ(trt::major_of(engine->library().version), test_major);
    EXPECT_TRUE(engine->dynamic());
    EXPECT_EQ(engine->default_target(), (Size{64, 64}));
    EXPECT_EQ(engine->largest_batch(), 1);
    EXPECT_EQ(engine->output_shape({96, 64}), (Shape{1, 7, 96}));
    EXPECT_EQ(engine->output_shape({32, 64}, 1, "output0"), (Shape{1, 7, 32}));
    EXPECT_HAS(message_of<InvalidInput>([&] { engine->output_shape({512, 64}); }), "(1, 3, 32, 32) to");
    EXPECT_EQ(load(PlanText{})->output_shape({96, 64}), (Shape{1, 7, 96}));
    EXPECT_HAS(message_of<InvalidInput>([&] { LoadedEngine::open(file_of(body), 7, options()); }),
               "device must be between 0 and");
}

TEST_F(PipelineTest, HalvesAroundAnotherNetwork) {
    for (const bool half : {false, true}) {
        PlanText plan;
        plan.input = plan.output = half ? "float16" : "float32";
        const PipelineOptions wanted = options_for(plan);
        const auto engine = load(plan);
        HalvesOptions how;
        how.target = {96, 64};
        how.input = how.output = half ? DType::float16 : DType::float32;
        how.head = {HeadKind::raw, 96, plan.classes};
        how.thresholds = wanted.thresholds;
        Halves halves(engine->device(), how);
        const cuda::ContextGuard guard(*engine->device());
        const cuda::DeviceBuffer input(engine->device(), halves.input_bytes());
        const cuda::DeviceBuffer output(engine->device(), halves.output_bytes());
        const auto context = engine->engine().create_context();
        context->set_address("images", reinterpret_cast<void*>(input.pointer()));
        context->set_address("output0", reinterpret_cast<void*>(output.pointer()));
        EXPECT_HAS(message_of<InvalidInput>([&] { halves.finish(output.pointer()); }), "call begin() first");
        for (unsigned i = 0; i < 10; ++i) {
            const Picture image = picture(sizes[i % 5], i);
            halves.begin({image.view()}, input.pointer());
            ASSERT_TRUE(context->enqueue(halves.stream()));
            expect_same(halves.finish(output.pointer()).at(0), expected(plan, image.view(), wanted), "halves");
        }
    }
}

}  // namespace
}  // namespace edgeyolo::test
