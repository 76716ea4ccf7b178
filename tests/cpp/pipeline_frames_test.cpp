// Where frames come from: host memory of any strides, pinned buffers, GPU memory of other streams and devices.
#include <cstdlib>
#include <thread>
#include "pipeline_rig.hpp"

namespace edgeyolo::test {
namespace {

class Frames : public Gpu {
protected:
    void TearDown() override {
        pipeline.reset();
        engine.reset();
        Gpu::TearDown();
    }
    void open(const PipelineOptions& how) {
        engine = load(plan);
        wanted = how;
        pipeline = std::make_unique<Pipeline>(engine, how);
    }
    void compare(const Frame& frame, const ImageView& image, const std::string& what) {
        expect_same(run(*pipeline, frame), expected(plan, image, wanted), what);
    }
    // A copy of `bytes` on the device of the pipeline.
    cuda::DeviceBuffer upload(const std::vector<std::uint8_t>& bytes) {
        const cuda::DeviceRef& device = engine->device();
        const cuda::ContextGuard guard(*device);
        cuda::DeviceBuffer buffer(device, bytes.size());
        const cuda::Stream stream(device);
        stream.copy_to_device(buffer.pointer(), bytes.data(), bytes.size());
        stream.synchronize();
        return buffer;
    }

    PlanText plan;
    PipelineOptions wanted;
    std::shared_ptr<LoadedEngine> engine;
    std::unique_ptr<Pipeline> pipeline;
};

constexpr PixelFormat formats[] = {PixelFormat::bgr, PixelFormat::rgb, PixelFormat::gray, PixelFormat::bgra,
                                   PixelFormat::rgba};

struct NamedView {
    const char* name;
    ImageView view;
};

// A picture on the device without gaps.
DeviceImage packed(const cuda::DeviceBuffer& memory, const Picture& picture) {
    const ImageView view = picture.view();
    DeviceImage frame;
    frame.pixels = memory.pointer();
    frame.size = view.size;
    frame.row_stride = view.row_stride;
    frame.pixel_stride = view.pixel_stride;
    frame.format = view.format;
    return frame;
}

// The ways in which NumPy hands out a picture without copying it.
std::vector<NamedView> views(const Picture& picture) {
    const ImageView whole = picture.view();
    const Size size = whole.size;
    std::vector<NamedView> all{{"whole", whole}};
    ImageView view = whole;
    view.data += (size.height - 1) * whole.row_stride;
    view.row_stride = -whole.row_stride;
    all.push_back({"upside down", view});
    view = whole;
    view.data += (size.width - 1) * whole.pixel_stride;
    view.pixel_stride = -whole.pixel_stride;
    all.push_back({"mirrored", view});
    view = whole;
    view.data += whole.row_stride * 3 + whole.pixel_stride * 5;
    view.size = {size.width - 11, size.height - 7};
    all.push_back({"cropped", view});
    view = whole;
    view.pixel_stride *= 2;
    view.size.width = (size.width + 1) / 2;
    all.push_back({"every other column", view});
    view = whole;
    std::swap(view.row_stride, view.pixel_stride);
    std::swap(view.size.width, view.size.height);
    all.push_back({"transposed", view});
    if (channels(whole.format) == 3) {
        view = whole;
        view.data += 2;
        view.channel_stride = -1;
        all.push_back({"channels backwards", view});
        view = whole;  // the same bytes as planes
        view.channel_stride = size.width * size.height;
        view.pixel_stride = 1;
        view.row_stride = size.width;
        all.push_back({"planes", view});
    }
    return all;
}

TEST_F(Frames, AnyFormatAndStride) {
    open(options_for(plan));
    unsigned seed = 0;
    for (const PixelFormat format : formats) {
        const Picture image = picture({77, 58}, ++seed, format);
        for (const NamedView& one : views(image)) compare(one.view, one.view, one.name);
    }
    // Larger than one chunk of the upload, with and without gaps between rows.
    const Picture large = picture({701, 500}, 9);
    for (const NamedView& one : views(large)) compare(one.view, one.view, one.name);
    EXPECT_EQ(pipeline->info().graph.captures, 2) << "no size, place or format needs another graph";
    EXPECT_EQ(pipeline->info().graph.enqueued + pipeline->info().graph.executed, 0);
}

// Helpers copy pieces of a large picture; a machine of few cores has none by default.
TEST_F(Frames, HelpersCopyLargePictures) {
    setenv("EDGEYOLO_COPY_THREADS", "3", 1);
    open(options_for(plan));
    unsetenv("EDGEYOLO_COPY_THREADS");
    for (unsigned seed = 0; seed < 4; ++seed) {
        const Picture large = picture({1203, 701}, seed);
        for (const NamedView& one : views(large)) compare(one.view, one.view, one.name);
    }
}

TEST_F(Frames, BadFramesTakeNoSlot) {
    open(options_for(plan));
    const Picture image = picture({77, 58}, 1);
    for (int i = 0; i < 5; ++i) {
        EXPECT_HAS(message_of<InvalidInput>([&] { run(*pipeline, ImageView{}); }), "found 0 x 0");
        ImageView none = image.view();
        none.data = nullptr;
        EXPECT_HAS(message_of<InvalidInput>([&] { run(*pipeline, none); }), "null pointer");
        EXPECT_HAS(message_of<InvalidInput>([&] { run(*pipeline, std::shared_ptr<FrameBuffer>()); }), "0 x 0");
        EXPECT_HAS(message_of<InvalidInput>([&] { pipeline->frame_buffer({0, 4}, PixelFormat::bgr); }), "0 x 4");
    }
    compare(image.view(), image.view(), "afterwards");
}

TEST_F(Frames, PinnedBuffers) {
    open(options_for(plan));
    for (const PixelFormat format : formats) {
        const auto buffer = pipeline->frame_buffer({90, 50}, format);
        for (unsigned i = 0; i < 3; ++i) {
            const Picture image = picture({90, 50}, i, format);
            ASSERT_EQ(buffer->bytes(), image.pixels.size());
            std::memcpy(buffer->data(), image.pixels.data(), image.pixels.size());
            compare(buffer, image.view(), "pinned");
        }
    }
}

TEST_F(Frames, BufferInFlightIsNotSubmittedAgain) {
    plan.more = "busy 20000\n";
    open(options_for(plan));
    const auto buffer = pipeline->frame_buffer({90, 50}, PixelFormat::bgr);
    const Picture image = picture({90, 50}, 4);
    std::memcpy(buffer->data(), image.pixels.data(), image.pixels.size());
    Ticket ticket = pipeline->submit({buffer});
    EXPECT_HAS(message_of<InvalidInput>([&] { pipeline->submit({buffer}); }), "still in flight");
    expect_same(pipeline->wait(ticket)->at(0), expected(plan, image.view(), wanted), "first");
    ticket = pipeline->submit({buffer});
    while (!pipeline->done(ticket)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Ticket again = pipeline->submit({buffer});  // done is enough
    expect_same(pipeline->wait(ticket)->at(0), expected(plan, image.view(), wanted), "second");
    expect_same(pipeline->wait(again)->at(0), expected(plan, image.view(), wanted), "third");
    // A refused submit leaves no mark.
    EXPECT_THROW(pipeline->submit({buffer, buffer}), InvalidInput);
    pipeline->submit({buffer});
}

TEST_F(Frames, BufferOutlivesThePipeline) {
    open(options_for(plan));
    const auto buffer = pipeline->frame_buffer({90, 50}, PixelFormat::bgr);
    std::memset(buffer->data(), 1, buffer->bytes());
    pipeline->submit({buffer});
    pipeline.reset();
    std::memset(buffer->data(), 2, buffer->bytes());
}

TEST_F(Frames, GpuFramesWithoutACopy) {
    open(options_for(plan));
    for (const PixelFormat format : formats) {
        const Picture image = picture({77, 58}, 3, format);
        const cuda::DeviceBuffer memory = upload(image.pixels);
        for (const NamedView& one : views(image)) {
            DeviceImage frame;
            frame.pixels = memory.pointer() + static_cast<cuda::DevicePtr>(one.view.data - image.pixels.data());
            frame.size = one.view.size;
            frame.row_stride = one.view.row_stride;
            frame.pixel_stride = one.view.pixel_stride;
            frame.channel_stride = one.view.channel_stride;
            frame.format = one.view.format;
            compare(frame, one.view, one.name);
        }
    }
}

TEST_F(Frames, GpuFrameIsHeldUntilItIsDone) {
    plan.more = "busy 5000\n";
    open(options_for(plan));
    const Picture image = picture({77, 58}, 3);
    auto memory = std::make_shared<cuda::DeviceBuffer>(upload(image.pixels));
    DeviceImage frame = packed(*memory, image);
    frame.keep = memory;
    std::weak_ptr<cuda::DeviceBuffer> alive = memory;
    memory.reset();
    const Ticket ticket = pipeline->submit({frame});
    frame.keep.reset();
    EXPECT_FALSE(alive.expired());
    expect_same(pipeline->wait(ticket)->at(0), expected(plan, image.view(), wanted), "held");
    EXPECT_TRUE(alive.expired());
}

TEST_F(Frames, ProducersStreamIsWaitedFor) {
    open(options_for(plan));
    if (!real_gpu()) FAKE(set_delay)(1, 3000);
    const cuda::DeviceRef device = engine->device();
    const cuda::ContextGuard guard(*device);
    const cuda::Stream producer(device);
    const Picture image = picture({300, 200}, 5);
    const cuda::PinnedBuffer host(device, image.pixels.size());
    std::memcpy(host.data(), image.pixels.data(), image.pixels.size());
    const cuda::DeviceBuffer memory(device, image.pixels.size());
    for (int i = 0; i < 10; ++i) {
        producer.fill(memory.pointer(), 0, memory.bytes());
        for (int k = 0; k < 5; ++k) producer.copy_to_device(memory.pointer(), host.data(), host.bytes());
        DeviceImage frame = packed(memory, image);
        frame.producer = producer.get();
        compare(frame, image.view(), "produced");
    }
    producer.synchronize();
}

TEST_F(Frames, Nv12) {
    open(options_for(plan));
    // Grey of the full range of an NV12 camera, and colour: compared with the picture that the formula gives.
    const Size size{64, 48};
    std::vector<std::uint8_t> bytes(static_cast<std::size_t>(80 * 48 + 80 * 24), 128);
    std::mt19937 random(1);
    std::vector<std::uint8_t> rgb;
    for (int i = 0; i < 80 * 72; ++i)
        bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(90 + (random() >> 26));
    for (int y = 0; y < size.height; ++y)
        for (int x = 0; x < size.width; ++x) {
            const auto at = [&](int row, int column) {
                return static_cast<double>(bytes[static_cast<std::size_t>(row * 80 + column)]);
            };
            const double luma = (at(y, x) - 16) * 255 / 219;
            const double u = at(48 + y / 2, x / 2 * 2) - 128;
            const double v = at(48 + y / 2, x / 2 * 2 + 1) - 128;
            for (const double value : {luma + 1.5748 * v * 255 / 224, luma - (0.1873 * u + 0.4681 * v) * 255 / 224,
                                       luma + 1.8556 * u * 255 / 224})
                rgb.push_back(static_cast<std::uint8_t>(std::min(255., std::max(0., value + 0.5))));
        }
    const cuda::DeviceBuffer memory = upload(bytes);
    DeviceImage frame;
    frame.pixels = memory.pointer();
    frame.row_stride = 80;
    frame.size = size;
    frame.chroma = memory.pointer() + 80 * 48;
    frame.chroma_stride = 80;
    wanted.thresholds.conf = 0.3f;
    const Results found = run(*pipeline, frame);
    const Results truth = expected(plan, {rgb.data(), size, 3 * 64, 3, 1, PixelFormat::rgb}, wanted);
    ASSERT_GT(truth.size(), 5u);
    ASSERT_EQ(found.size(), truth.size());
    for (std::size_t i = 0; i < truth.size(); ++i) EXPECT_NEAR(found.scores[i], truth.scores[i], 3. / 255) << i;
    frame.chroma_stride = 160;
    EXPECT_HAS(message_of<InvalidInput>([&] { run(*pipeline, frame); }), "UV plane of a GPU frame reaches beyond");
}

TEST_F(Frames, GpuFramesThatCannotBeRead) {
    open(options_for(plan));
    const Picture image = picture({77, 58}, 3);
    const cuda::DeviceBuffer memory = upload(image.pixels);
    const auto refused = [&](const DeviceImage& frame) {
        return message_of<InvalidInput>([&] { run(*pipeline, frame); });
    };
    const DeviceImage good = packed(memory, image);
    DeviceImage bad = good;
    bad.pixels = 0;
    EXPECT_HAS(refused(bad), "null pointer");
    bad.pixels = reinterpret_cast<cuda::DevicePtr>(image.pixels.data());
    EXPECT_HAS(refused(bad), "is in host memory");
    bad = good;
    bad.size.height = 59;
    EXPECT_HAS(refused(bad), "reaches beyond its memory of 13398 bytes");
    bad = good;
    bad.row_stride = -231;
    EXPECT_HAS(refused(bad), "reaches beyond");
    if (cuda::driver().device_count > 1) {
        const cuda::DeviceRef other = cuda::Device::open(1);
        const cuda::DeviceBuffer elsewhere(other, image.pixels.size());
        bad = good;
        bad.pixels = elsewhere.pointer();
        EXPECT_HAS(refused(bad), "the frame is on GPU 1, the detector on GPU 0");
        const auto buffer = std::make_shared<FrameBuffer>(other, Size{8, 8}, PixelFormat::bgr);
        EXPECT_HAS(message_of<InvalidInput>([&] { run(*pipeline, buffer); }), "belongs to GPU 1");
    }
    compare(good, image.view(), "good");
}

class IntegratedFrames : public SimulatedGpu {};

TEST_F(IntegratedFrames, AreReadInPlace) {
    if (IsSkipped()) return;
    FAKE(set_devices)(1, 1, 1ull << 30);
    const PlanText plan;
    const PipelineOptions wanted = options_for(plan);
    Pipeline pipeline(load(plan), wanted);
    const std::size_t before = pipeline.info().device_bytes;
    const Picture image = picture({640, 480}, 2);
    for (int i = 0; i < 4; ++i) expect_same(run(pipeline, image.view()), expected(plan, image.view(), wanted), "host");
    const auto buffer = pipeline.frame_buffer({640, 480}, PixelFormat::bgr);
    std::memcpy(buffer->data(), image.pixels.data(), image.pixels.size());
    expect_same(run(pipeline, buffer), expected(plan, image.view(), wanted), "pinned");
    EXPECT_EQ(pipeline.info().device_bytes, before) << "no second copy of a frame";
}

}  // namespace
}  // namespace edgeyolo::test
