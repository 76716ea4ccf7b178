// The real adapter against the test TensorRT (tests/fakes/nvinfer.cpp). (Longer than most files: one short test per promise.)
#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>
#include "cuda.hpp"
#include "trt/log_ring.hpp"
#include "trt_test.hpp"

namespace edgeyolo {
namespace {

const std::string dynamic_plan =
    "edgeyolo toy plan 1\ninput images float32 1 3 -1 -1\nprofile 1 3 32 32 1 3 64 64 1 3 128 128\n"
    "profile 1 3 128 128 1 3 160 160 1 3 256 256\noutput output0 float32 raw 3\nstrides 8\n";

// A plane-wise picture whose pixels differ everywhere.
std::vector<float> picture(std::int64_t height, std::int64_t width, unsigned seed) {
    std::vector<float> values(static_cast<std::size_t>(3 * height * width));
    for (std::size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>((i * 2654435761u + seed * 40503u) >> 7 & 255u) / 255.0f;
    return values;
}

class Adapter : public test::Gpu {
protected:
    void SetUp() override {
        test::Gpu::SetUp();
        device_ = cuda::Device::open(0);
        guard_ = std::make_unique<cuda::ContextGuard>(*device_);
        stream_ = cuda::Stream(device_);
    }
    void TearDown() override {
        stream_ = {};
        guard_.reset();
        device_.reset();
        test::Gpu::TearDown();
    }
    std::unique_ptr<Engine> load(const std::string& plan) {
        return trt::load_engine(plan.data(), plan.size(), options());
    }
    static void* pointer(const cuda::DeviceBuffer& buffer) { return reinterpret_cast<void*>(buffer.pointer()); }

    struct Buffers {
        cuda::DeviceBuffer input, output;
        std::size_t count = 0;
    };
    Buffers buffers(Context& context, const std::vector<float>& image) {
        Buffers result;
        result.input = cuda::DeviceBuffer(device_, image.size() * sizeof(float));
        stream_.copy_to_device(result.input.pointer(), image.data(), image.size() * sizeof(float));
        result.count = static_cast<std::size_t>(context.max_output_size("output0")) / sizeof(float);
        result.output = cuda::DeviceBuffer(device_, result.count * sizeof(float));
        stream_.fill(result.output.pointer(), 0xAB, result.count * sizeof(float));
        stream_.synchronize();
        return result;
    }
    std::vector<float> download(const Buffers& from) {
        std::vector<float> values(from.count);
        stream_.copy_to_host(values.data(), from.output.pointer(), values.size() * sizeof(float));
        stream_.synchronize();
        return values;
    }
    std::vector<float> run(Context& context, const std::vector<float>& image) {
        const Buffers memory = buffers(context, image);
        EXPECT_TRUE(context.set_address("images", pointer(memory.input)));
        EXPECT_TRUE(context.set_address("output0", pointer(memory.output)));
        EXPECT_TRUE(context.enqueue(stream_.get()));
        return download(memory);
    }
    std::vector<float> execute(Context& context, const std::vector<float>& image) {
        const Buffers memory = buffers(context, image);
        void* bindings[] = {pointer(memory.input), pointer(memory.output)};
        EXPECT_TRUE(context.execute(bindings));
        return download(memory);
    }

    cuda::DeviceRef device_;
    std::unique_ptr<cuda::ContextGuard> guard_;
    cuda::Stream stream_;
};

TEST_F(Adapter, DescribesTheEngine) {
    const auto engine = load(
        "edgeyolo toy plan 1\nname net\ninput images float16 2 3 64 96\noutput output0 float32 raw 3\n"
        "strides 8\nscratch 12345\naux_streams 1\n");
    EXPECT_EQ(engine->name(), "net");
    ASSERT_EQ(engine->io().size(), 2u);
    const TensorInfo& in = engine->io()[0];
    EXPECT_EQ(in.name, "images");
    EXPECT_TRUE(in.input && in.linear && !in.on_host);
    EXPECT_EQ(in.dtype, DType::float16);
    EXPECT_EQ(in.dtype_text, "float16");
    EXPECT_EQ(in.shape, (Shape{2, 3, 64, 96}));
    ASSERT_EQ(in.profiles.size(), 1u);
    EXPECT_EQ(in.profiles[0].max, in.shape);
    const TensorInfo& out = engine->io()[1];
    EXPECT_FALSE(out.input);
    EXPECT_EQ(out.dtype, DType::float32);
    EXPECT_EQ(out.shape, (Shape{2, 7, 96}));
    EXPECT_TRUE(out.profiles.empty());
    EXPECT_EQ(engine->profiles(), 1);
    EXPECT_EQ(engine->aux_streams(), 1);
    EXPECT_EQ(engine->device_memory_size(), 12345);
    EXPECT_EQ(engine->dla_core(), -1);
    EXPECT_FALSE(streams_weights(*engine));
    EXPECT_HAS(engine->inspect(), "toy_head");
    EXPECT_EQ(engine->last_errors().find("does not implement"), std::string::npos);
}

TEST_F(Adapter, EnqueueGivesTheValuesOfThePixels) {
    const auto engine = load(static_plan);
    const auto context = engine->create_context();
    EXPECT_EQ(context->shape("output0"), (Shape{1, 7, 96}));
    EXPECT_EQ(context->shape("nothing"), Shape{});
    const auto image = picture(64, 96, 1);
    const auto values = run(*context, image);

    // Cell (x 5, y 3) of 12 x 8, computed apart from the toy's own code.
    const std::size_t pixel = (3 * 8 + 4) * 96 + 5 * 8 + 4;
    const float r = image[pixel];
    const float g = image[pixel + 64 * 96];
    const float b = image[pixel + 2 * 64 * 96];
    const std::size_t cell = 3 * 12 + 5;
    EXPECT_EQ(values[cell], 44.0f + (r - 0.5f) * 8.0f);
    EXPECT_EQ(values[96 + cell], 28.0f + (g - 0.5f) * 8.0f);
    EXPECT_EQ(values[2 * 96 + cell], 8.0f * (1.0f + 3.0f * b));
    EXPECT_EQ(values[3 * 96 + cell], 8.0f * (1.0f + 3.0f * r));
    const float best = std::max({r, g, b}) - std::min({r, g, b});
    EXPECT_EQ(std::max({values[4 * 96 + cell], values[5 * 96 + cell], values[6 * 96 + cell]}), best);

    EXPECT_EQ(run(*context, image), values);
    EXPECT_EQ(execute(*context, image), values);
    EXPECT_NE(run(*context, picture(64, 96, 2)), values);
}

TEST_F(Adapter, GreyHasNoObject) {
    const auto engine = load(static_plan);
    const auto context = engine->create_context();
    const auto values = run(*context, std::vector<float>(3 * 64 * 96, 114.0f / 255.0f));
    for (std::size_t i = 4 * 96; i < values.size(); ++i) ASSERT_EQ(values[i], 0.0f);
}

TEST_F(Adapter, ManyKernelsAuxStreamsAndWarmupsChangeNothing) {
    const auto image = picture(64, 96, 1);
    const auto expected = run(*load(static_plan)->create_context(), image);
    EXPECT_EQ(run(*load(static_plan + "kernels 50\nbusy 100\n")->create_context(), image), expected);
    EXPECT_EQ(run(*load(static_plan + "aux_streams 1\n")->create_context(), image), expected);
    const auto context = load(static_plan + "aux_streams 1\nwarmups 2\n")->create_context();
    const cuda::Stream aux(device_);
    void* const streams[] = {aux.get()};
    context->set_aux_streams(streams, 1);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(run(*context, image), expected);
}

TEST_F(Adapter, ContextOutlivesEngine) {
    auto engine = load(static_plan);
    const auto context = engine->create_context();
    const auto values = run(*context, picture(64, 96, 1));
    engine.reset();
    EXPECT_EQ(run(*context, picture(64, 96, 1)), values);
}

TEST_F(Adapter, DynamicShapesAndProfiles) {
    const auto engine = load(dynamic_plan);
    EXPECT_EQ(engine->profiles(), 2);
    const TensorInfo& in = engine->io()[0];
    EXPECT_EQ(in.shape, (Shape{1, 3, -1, -1}));
    ASSERT_EQ(in.profiles.size(), 2u);
    EXPECT_EQ(in.profiles[0].min, (Shape{1, 3, 32, 32}));
    EXPECT_EQ(in.profiles[0].opt, (Shape{1, 3, 64, 64}));
    EXPECT_EQ(in.profiles[1].max, (Shape{1, 3, 256, 256}));
    EXPECT_EQ(engine->io()[1].shape, (Shape{1, 7, -1}));

    const auto context = engine->create_context();
    EXPECT_EQ(context->max_output_size("output0"), -1);
    EXPECT_EQ(context->shape("output0"), (Shape{1, 7, -1}));
    EXPECT_FALSE(context->enqueue(stream_.get()));
    EXPECT_HAS(engine->last_errors(), "not all input dimensions are specified");
    ASSERT_TRUE(context->set_input_shape("images", {1, 3, 64, 96}));
    EXPECT_EQ(context->shape("output0"), (Shape{1, 7, 96}));
    EXPECT_EQ(context->max_output_size("output0"), 4 * 7 * 96);
    const auto image = picture(64, 96, 1);
    EXPECT_EQ(run(*context, image), run(*load(static_plan)->create_context(), image));

    EXPECT_FALSE(context->set_input_shape("images", {1, 3, 160, 160}));
    EXPECT_HAS(engine->last_errors(), "do not satisfy profile 0");
    EXPECT_FALSE(context->set_input_shape("images", Shape(9, 1)));
    EXPECT_FALSE(context->set_profile(2, stream_.get()));
    ASSERT_TRUE(context->set_profile(1, stream_.get()));
    EXPECT_EQ(context->profile(), 1);
    EXPECT_EQ(context->shape("images"), (Shape{1, 3, -1, -1}));
    EXPECT_TRUE(context->set_input_shape("images", {1, 3, 160, 160}));
    EXPECT_EQ(context->shape("output0"), (Shape{1, 7, 400}));
}

TEST_F(Adapter, HeadsAndTypes) {
    const std::string start =
        "edgeyolo toy plan 1\ninput images float32 1 3 64 96\nstrides 8\nrows 20\noutput output0 float32 ";
    const auto image = picture(64, 96, 3);
    const auto values = run(*load(start + "raw 3\n")->create_context(), image);
    const auto transposed = run(*load(start + "raw_transposed 3\n")->create_context(), image);
    ASSERT_EQ(transposed.size(), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_EQ(transposed[i % 96 * 7 + i / 96], values[i]);

    const auto objectness = run(*load(start + "yolov5 3\n")->create_context(), image);
    ASSERT_EQ(objectness.size(), 96u * 8);
    EXPECT_EQ(objectness[4], 0.875f);
    EXPECT_EQ(objectness[5], values[4 * 96]);

    const auto rows = run(*load(start + "end2end 3\n")->create_context(), image);
    ASSERT_EQ(rows.size(), 20u * 6);
    std::vector<float> best(96);
    for (std::size_t i = 0; i < 96; ++i)
        best[i] = std::max({values[4 * 96 + i], values[5 * 96 + i], values[6 * 96 + i]});
    std::sort(best.begin(), best.end(), std::greater<>());
    for (std::size_t i = 0; i < 20; ++i) EXPECT_EQ(rows[i * 6 + 4], best[i]) << i;
}

// Grows device memory on demand and remembers what it was told.
class Memory final : public OutputAllocator {
public:
    explicit Memory(const cuda::DeviceRef& device) : device_(device) {}
    void* allocate(const char* tensor, void* current, std::size_t bytes, std::size_t alignment,
                   void*) noexcept override {
        EXPECT_STREQ(tensor, "output0");
        EXPECT_EQ(current, last_);
        EXPECT_LE(alignment, 256u);
        if (refuse) return nullptr;
        if (buffer.bytes() < bytes) buffer = cuda::DeviceBuffer(device_, bytes);
        return last_ = reinterpret_cast<void*>(buffer.pointer());
    }
    void set_shape(const char*, const std::int64_t* dims, int rank) noexcept override {
        shape.assign(dims, dims + rank);
    }
    cuda::DeviceBuffer buffer;
    Shape shape;
    bool refuse = false;

private:
    const cuda::DeviceRef& device_;
    void* last_ = nullptr;
};

TEST_F(Adapter, DataDependentOutput) {
    const auto engine =
        load("edgeyolo toy plan 1\ninput images float32 1 3 64 96\noutput output0 float32 dynamic_rows 3\nstrides 8\n");
    const auto raw = run(*load(static_plan)->create_context(), picture(64, 96, 5));
    Memory memory(device_);  // outlives the context
    const auto context = engine->create_context();
    EXPECT_EQ(context->shape("output0"), (Shape{-1, 6}));
    EXPECT_EQ(context->max_output_size("output0"), 96 * 6 * 4);
    const Buffers input = buffers(*context, picture(64, 96, 5));
    ASSERT_TRUE(context->set_address("images", pointer(input.input)));
    EXPECT_FALSE(context->enqueue(stream_.get()));
    EXPECT_HAS(engine->last_errors(), "no allocator");
    EXPECT_FALSE(context->set_output_allocator("images", &memory));
    ASSERT_TRUE(context->set_output_allocator("output0", &memory));

    std::vector<float> expected;  // scores above 0.25, in the order of the anchors
    for (std::size_t i = 0; i < 96; ++i) {
        const float score = std::max({raw[4 * 96 + i], raw[5 * 96 + i], raw[6 * 96 + i]});
        if (score > 0.25f) expected.push_back(score);
    }
    ASSERT_GT(expected.size(), 10u);
    for (int round = 0; round < 2; ++round) {
        ASSERT_TRUE(context->enqueue(stream_.get())) << engine->last_errors();
        ASSERT_EQ(memory.shape, (Shape{static_cast<std::int64_t>(expected.size()), 6}));
        std::vector<float> rows(expected.size() * 6);
        stream_.copy_to_host(rows.data(), memory.buffer.pointer(), rows.size() * sizeof(float));
        stream_.synchronize();
        for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_EQ(rows[i * 6 + 4], expected[i]);
    }
    memory.refuse = true;
    EXPECT_FALSE(context->enqueue(stream_.get()));
    memory.refuse = false;
    EXPECT_TRUE(context->set_output_allocator("output0", nullptr));
    EXPECT_FALSE(context->enqueue(stream_.get()));
    stream_.synchronize();
}

TEST_F(Adapter, CaptureAndReplay) {
    const auto image = picture(64, 96, 1);
    for (const char* extra : {"", "kernels 30\n", "aux_streams 1\n", "warmups 2\n"}) {
        const auto engine = load(static_plan + extra);
        const auto context = engine->create_context();
        const Buffers memory = buffers(*context, image);
        context->set_address("images", pointer(memory.input));
        context->set_address("output0", pointer(memory.output));
        for (int i = 0; i < 2; ++i) ASSERT_TRUE(context->enqueue(stream_.get()));
        const auto expected = download(memory);
        stream_.begin_capture();
        const bool enqueued = context->enqueue(stream_.get());
        const auto captured = stream_.end_capture();
        ASSERT_TRUE(enqueued && captured.code == cuda::success) << extra << engine->last_errors();
        ASSERT_GT(captured.graph.node_count(), 0u);
        const cuda::GraphExec graph = captured.graph.instantiate();
        stream_.fill(memory.output.pointer(), 0xAB, memory.output.bytes());
        graph.launch(stream_);
        EXPECT_EQ(download(memory), expected) << extra;
    }
}

TEST_F(Adapter, FaultsDuringCapture) {
    const auto image = picture(64, 96, 1);
    struct Case {
        const char* extra;
        bool enqueued, valid;
    };
    for (const Case& wanted :
         {Case{"option refuse_capture\n", false, true}, Case{"option empty_capture\n", true, true},
          Case{"option host_sync\n", false, false}, Case{"option allocate\n", false, false},
          Case{"streamable 100\nbudget 0\n", false, false}, Case{"option differs_in_capture\n", true, true}}) {
        const auto engine = load(static_plan + wanted.extra);
        const auto context = engine->create_context();
        const Buffers memory = buffers(*context, image);
        context->set_address("images", pointer(memory.input));
        context->set_address("output0", pointer(memory.output));
        ASSERT_TRUE(context->enqueue(stream_.get())) << wanted.extra;
        stream_.synchronize();
        stream_.begin_capture();
        const bool enqueued = context->enqueue(stream_.get());
        const auto captured = stream_.end_capture();
        EXPECT_EQ(enqueued, wanted.enqueued) << wanted.extra;
        EXPECT_EQ(captured.code == cuda::success, wanted.valid) << wanted.extra;
        if (std::strstr(wanted.extra, "empty")) {
            EXPECT_EQ(captured.graph ? captured.graph.node_count() : 0u, 0u);
        }
        ASSERT_TRUE(context->enqueue(stream_.get())) << "the context works after " << wanted.extra;
        stream_.synchronize();
    }
    // These engines broke the rules on purpose.
    if (!test::real_gpu()) FAKE(clear_violations)();
}

TEST_F(Adapter, WarmupsAndNoise) {
    const auto image = picture(64, 96, 1);
    const auto expected = run(*load(static_plan)->create_context(), image);
    const auto warm = load(static_plan + "warmups 2\noption differs_in_warmup\n")->create_context();
    EXPECT_NE(run(*warm, image), expected);
    EXPECT_NE(run(*warm, image), expected);
    EXPECT_EQ(run(*warm, image), expected);
    const auto noisy = load(static_plan + "option nondeterministic\n")->create_context();
    const auto first = run(*noisy, image);
    EXPECT_NE(run(*noisy, image), first);
}

TEST_F(Adapter, WeightStreaming) {
    const auto engine = load(static_plan + "streamable 1000\nbudget 100\n");
    EXPECT_TRUE(streams_weights(*engine));
    EXPECT_EQ(engine->streamable_weights_size(), 1000);
    EXPECT_EQ(engine->weight_streaming_budget(), 100);
    {
        const auto context = engine->create_context();
        EXPECT_FALSE(engine->set_weight_streaming_budget(1000));
    }
    EXPECT_TRUE(engine->set_weight_streaming_budget(1000));
    EXPECT_FALSE(streams_weights(*engine));
    EXPECT_FALSE(streams_weights(*load(static_plan + "streamable 1000\n")));
}

TEST_F(Adapter, RefusalsQuoteTensorRT) {
    const auto load_error = [&](const std::string& plan) { return message_of<EngineError>([&] { load(plan); }); };
    const std::string garbage = load_error("no plan at all");
    EXPECT_HAS(garbage, "the magic tag does not match");
    EXPECT_HAS(garbage, test_library);
    EXPECT_HAS(garbage, "export it again");
    EXPECT_HAS(load_error(""), "the magic tag does not match");
    EXPECT_HAS(load_error(static_plan + "tensorrt 9\n"), "Serialized Engine Version: 9");
    EXPECT_HAS(load_error(static_plan + "option refuse_load\n"), "asks to be refused");
    // An error that is logged is a failure, also when a pointer comes back.
    EXPECT_HAS(load_error(static_plan + "option error_load\n"), "does not act on");

    for (const char* option : {"refuse_context", "error_context"}) {
        const auto engine = load(static_plan + "option " + option + "\n");
        EXPECT_HAS(message_of<EngineError>([&] { engine->create_context(); }),
                   "createExecutionContext: as the plan asks");
    }
    for (const char* option : {"refuse_enqueue", "error_enqueue"}) {
        const auto engine = load(static_plan + "option " + option + "\n");
        const auto context = engine->create_context();
        const Buffers memory = buffers(*context, picture(64, 96, 1));
        context->set_address("images", pointer(memory.input));
        EXPECT_FALSE(context->enqueue(stream_.get()));
        EXPECT_HAS(engine->last_errors(), "has no address");
        context->set_address("output0", pointer(memory.output));
        EXPECT_FALSE(context->enqueue(stream_.get()));
        EXPECT_HAS(engine->last_errors(), "enqueueV3: Error Code 7");
        EXPECT_FALSE(context->set_address("nothing", nullptr));
        stream_.synchronize();
    }
    const auto engine = load(static_plan + "option refuse_execute\n");
    const auto context = engine->create_context();
    const Buffers memory = buffers(*context, picture(64, 96, 1));
    void* bindings[] = {pointer(memory.input), pointer(memory.output)};
    EXPECT_FALSE(context->execute(bindings));
    EXPECT_HAS(engine->last_errors(), "executeV2");
}

TEST_F(Adapter, DriverFaultsAreToldAndLeakNothing) {
    if (test::real_gpu()) GTEST_SKIP() << "needs the simulated driver";
    const auto fail_once = [](const char* call) { FAKE(fault)(call, 1, cuda::out_of_memory, edgeyolo_fake_once); };
    for (const char* call : {"cuModuleLoadData", "cuModuleGetFunction"}) {
        fail_once(call);
        EXPECT_HAS(message_of<EngineError>([&] { load(static_plan); }), "CUDA_ERROR_OUT_OF_MEMORY");
    }
    const auto engine = load(static_plan + "aux_streams 1\n");
    for (const char* call :
         {"cuMemAlloc", "cuMemsetD8Async", "cuStreamCreate", "cuEventCreate", "cuStreamSynchronize"}) {
        fail_once(call);
        const std::string message = message_of<EngineError>([&] { engine->create_context(); });
        EXPECT_HAS(message, call);
        EXPECT_HAS(message, "CUDA_ERROR_OUT_OF_MEMORY");
        EXPECT_HAS(message, "4096 bytes per context");
    }
    const auto context = engine->create_context();
    const auto image = picture(64, 96, 1);
    const auto expected = run(*context, image);
    const Buffers memory = buffers(*context, image);
    context->set_address("images", pointer(memory.input));
    context->set_address("output0", pointer(memory.output));
    for (const char* call : {"cuLaunchKernel", "cuEventRecord", "cuStreamWaitEvent"}) {
        fail_once(call);
        EXPECT_FALSE(context->enqueue(stream_.get())) << call;
        EXPECT_HAS(engine->last_errors(), call);
    }
    EXPECT_EQ(run(*context, image), expected);
}

TEST_F(Adapter, DlaCores) {
    trt::Options with = options();
    with.dla_core = 1;
    EXPECT_EQ(trt::load_engine(static_plan.data(), static_plan.size(), with)->dla_core(), 1);
    with.dla_core = 2;
    EXPECT_HAS(message_of<EngineError>([&] { trt::load_engine(static_plan.data(), static_plan.size(), with); }),
               "this device has 2");
}

TEST_F(Adapter, AnotherContextIsRefused) {
    if (cuda::driver().device_count < 2) GTEST_SKIP() << "needs two devices";
    const auto engine = load(static_plan);
    const auto context = engine->create_context();
    const Buffers memory = buffers(*context, picture(64, 96, 1));
    context->set_address("images", pointer(memory.input));
    context->set_address("output0", pointer(memory.output));
    const cuda::DeviceRef second = cuda::Device::open(1);
    const cuda::ContextGuard guard(*second);
    EXPECT_FALSE(context->enqueue(stream_.get()));
    EXPECT_HAS(engine->last_errors(), "context");
}

TEST_F(Adapter, ErrorsOfOtherThreadsAreNotOurs) {
    const auto good = load(static_plan);
    const auto bad = load(static_plan + "option refuse_context\n");
    const auto context = good->create_context();
    std::thread other([&] {
        const cuda::ContextGuard guard(*device_);
        for (int i = 0; i < 200; ++i) EXPECT_THROW(bad->create_context(), EngineError);
    });
    const auto image = picture(64, 96, 1);
    const auto expected = run(*context, image);
    for (int i = 0; i < 50; ++i) ASSERT_EQ(run(*context, image), expected);
    other.join();
}

TEST(LogRing, KeepsTheNewestAndPrefersThisThread) {
    trt::LogRing ring;
    for (int i = 0; i < 100; ++i) ring.add(true, ("line " + std::to_string(i)).c_str());
    ring.add(false, "a warning");
    EXPECT_EQ(ring.errors(), "line 92\nline 93\nline 94\nline 95\nline 96\nline 97\nline 98\nline 99");
    const std::uint64_t mark = ring.mark();
    EXPECT_EQ(ring.errors(mark), "");
    std::thread([&] { ring.add(true, "elsewhere"); }).join();
    EXPECT_EQ(ring.errors(mark), "elsewhere");
    ring.add(true, "here");
    ring.add(true, nullptr);
    EXPECT_EQ(ring.errors(mark), "here");
}

}  // namespace
}  // namespace edgeyolo
