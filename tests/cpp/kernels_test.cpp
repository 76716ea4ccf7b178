// The GPU kernels against the CPU code, bit for bit, through the driver layer. The same binary runs on the simulated
// driver and, with EDGEYOLO_REQUIRE_GPU=1, on a GPU.
#include "kernels.hpp"

#include <gtest/gtest.h>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include "error.hpp"
#include "gpu_cases.hpp"
#include "letterbox_math.hpp"
#include "nms.hpp"
#include "simulated_gpu.hpp"

namespace edgeyolo {
namespace {

using cases::HeadCase;
using cases::Trouble;

class KernelsTest : public test::Gpu {
protected:
    void SetUp() override {
        Gpu::SetUp();
        device = cuda::Device::open(0);
        guard.emplace(*device);
        kernels.emplace(device);
        stream.emplace(device);
    }
    void TearDown() override {
        stream.reset();
        kernels.reset();
        guard.reset();
        device.reset();
        Gpu::TearDown();
    }

    // Device memory with this content, or filled with a byte that no kernel writes by itself.
    template <class T>
    cuda::DeviceBuffer upload(const std::vector<T>& values) {
        cuda::DeviceBuffer buffer(device, values.size() * sizeof(T));
        if (!values.empty()) stream->copy_to_device(buffer.pointer(), values.data(), buffer.bytes());
        stream->synchronize();
        return buffer;
    }
    cuda::DeviceBuffer poisoned(std::size_t bytes) {
        cuda::DeviceBuffer buffer(device, bytes);
        stream->fill(buffer.pointer(), 0xa5, bytes);
        return buffer;
    }
    template <class T>
    std::vector<T> download(const cuda::DeviceBuffer& buffer) {
        std::vector<T> values(buffer.bytes() / sizeof(T));
        stream->copy_to_host(values.data(), buffer.pointer(), buffer.bytes());
        stream->synchronize();
        return values;
    }

    template <class T>
    std::vector<T> letterbox_on_gpu(const FrameBlock& block, Size target, DType dtype) {
        const auto block_memory = upload(std::vector<FrameBlock>{block});
        const auto planes =
            poisoned(3 * static_cast<std::size_t>(target.width) * static_cast<std::size_t>(target.height) * sizeof(T));
        kernels->letterbox(*stream, block_memory.pointer(), planes.pointer(), dtype, target);
        return download<T>(planes);
    }

    cuda::DeviceRef device;
    std::optional<cuda::ContextGuard> guard;
    std::optional<Kernels> kernels;
    std::optional<cuda::Stream> stream;
};

template <class T>
void expect_same_bits(const std::vector<T>& found, const std::vector<T>& expected, const std::string& what) {
    ASSERT_EQ(found.size(), expected.size()) << what;
    if (std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0) return;
    std::size_t i = 0;
    while (std::memcmp(&found[i], &expected[i], sizeof(T)) == 0) ++i;
    ADD_FAILURE() << what << ": element " << i << " is " << found[i] << ", expected " << expected[i];
}

std::vector<float> letterbox_on_cpu(const ImageView& image, const Letterbox& geometry) {
    std::vector<float> planes(3 * static_cast<std::size_t>(geometry.target.width) *
                              static_cast<std::size_t>(geometry.target.height));
    LetterboxWorkspace workspace;
    letterbox(image, geometry, planes.data(), workspace, Isa::scalar);
    return planes;
}

std::vector<std::uint16_t> to_halves(const std::vector<float>& values) {
    std::vector<std::uint16_t> halves(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) halves[i] = float_to_half(values[i]);
    return halves;
}

TEST_F(KernelsTest, LetterboxEqualsTheCpu) {
    const Size sources[] = {{1920, 1080}, {1280, 720}, {640, 640},   {641, 479}, {1, 1},     {1, 300},  {300, 1},
                            {2, 2},       {33, 17},    {1280, 1280}, {97, 500},  {2000, 31}, {320, 320}};
    const Size targets[] = {{640, 640}, {640, 384}, {33, 31}, {130, 9}};
    const PixelFormat formats[] = {PixelFormat::bgr, PixelFormat::rgb, PixelFormat::gray, PixelFormat::bgra,
                                   PixelFormat::rgba};
    unsigned seed = 0;
    for (const Size source : sources) {
        for (const Size target : targets) {
            const PixelFormat format = formats[seed % 5];
            const int bytes = channels(format);
            const std::ptrdiff_t stride = static_cast<std::ptrdiff_t>(source.width) * bytes + (seed % 3 == 0 ? 0 : 13);
            const auto pixels = cases::random_bytes(static_cast<std::size_t>(stride * source.height), seed);
            const auto memory = upload(pixels);
            // Every other frame is upside down.
            const bool flipped = seed % 2 == 1;
            const std::ptrdiff_t start = flipped ? stride * (source.height - 1) : 0;
            const ImageView image{pixels.data() + start, source, flipped ? -stride : stride, bytes, 1, format};
            const Letterbox geometry = fit(source, target);
            FrameBlock block{};
            set_frame(block, image, memory.pointer() + static_cast<cuda::DevicePtr>(start), geometry);
            const std::string what = std::to_string(source.width) + "x" + std::to_string(source.height) + " to " +
                                     std::to_string(target.width) + "x" + std::to_string(target.height);
            const auto expected = letterbox_on_cpu(image, geometry);
            expect_same_bits(letterbox_on_gpu<float>(block, target, DType::float32), expected, what);
            expect_same_bits(letterbox_on_gpu<std::uint16_t>(block, target, DType::float16), to_halves(expected), what);
            ++seed;
        }
    }
}

TEST_F(KernelsTest, LetterboxReadsAnyStrides) {
    // A picture mirrored and with its channels backwards: negative steps in all three directions.
    constexpr int width = 150, height = 90;
    const auto pixels = cases::random_bytes(width * height * 3, 5);
    const auto memory = upload(pixels);
    constexpr std::ptrdiff_t start = width * height * 3 - 1;
    const ImageView image{pixels.data() + start, {width, height}, -3 * width, -3, -1, PixelFormat::rgb};
    const Letterbox geometry = fit(image.size, {64, 64});
    FrameBlock block{};
    set_frame(block, image, memory.pointer() + start, geometry);
    expect_same_bits(letterbox_on_gpu<float>(block, {64, 64}, DType::float32), letterbox_on_cpu(image, geometry),
                     "mirrored");
}

TEST_F(KernelsTest, RefusesARowThatIsTooLong) {
    FrameBlock block{};
    const ImageView image{nullptr, {32767, 4}, 1, 1 << 20, 1, PixelFormat::bgr};
    EXPECT_THROW(set_frame(block, image, 0, fit(image.size, {64, 64})), InvalidInput);
}

// BT.601 and BT.709 in double precision, from their luma coefficients.
std::array<double, 3> exact_rgb(double y, double u, double v, double kr, double kb) {
    const double luma = 255. / 219. * std::max(0., y - 16.);
    const double red = luma + 255. / 112. * (1. - kr) * (v - 128.);
    const double blue = luma + 255. / 112. * (1. - kb) * (u - 128.);
    return {red, (luma - kr * red - kb * blue) / (1. - kr - kb), blue};
}

TEST_F(KernelsTest, Nv12IsConvertedBeforeItIsResampled) {
    for (const YuvMatrix matrix : {YuvMatrix::bt601, YuvMatrix::bt709}) {
        for (const Size source : {Size{96, 64}, Size{101, 57}, Size{128, 128}}) {
            const int pairs = (source.width + 1) / 2, lines = (source.height + 1) / 2;
            const int luma_stride = source.width + 7, chroma_stride = 2 * pairs + 10;
            const auto luma = cases::random_bytes(static_cast<std::size_t>(luma_stride * source.height), 1);
            const auto chroma = cases::random_bytes(static_cast<std::size_t>(chroma_stride * lines), 2);
            const bool bt601 = matrix == YuvMatrix::bt601;
            std::vector<std::uint8_t> rgb;
            for (int y = 0; y < source.height; ++y) {
                for (int x = 0; x < source.width; ++x) {
                    const auto* uv = &chroma[static_cast<std::size_t>(y / 2 * chroma_stride + x / 2 * 2)];
                    const auto exact = exact_rgb(luma[static_cast<std::size_t>(y * luma_stride + x)], uv[0], uv[1],
                                                 bt601 ? 0.299 : 0.2126, bt601 ? 0.114 : 0.0722);
                    for (const double value : exact)
                        rgb.push_back(static_cast<std::uint8_t>(std::lround(std::clamp(value, 0., 255.))));
                }
            }
            const Letterbox geometry = fit(source, {64, 64});
            const auto expected =
                letterbox_on_cpu({rgb.data(), source, 3 * source.width, 3, 1, PixelFormat::rgb}, geometry);
            const auto luma_memory = upload(luma), chroma_memory = upload(chroma);
            FrameBlock block{};
            set_frame_nv12(block, luma_memory.pointer(), luma_stride, chroma_memory.pointer(), chroma_stride, matrix,
                           geometry);
            const auto found = letterbox_on_gpu<float>(block, {64, 64}, DType::float32);
            // The rounding of the conversion may differ by one level, and so may the mean of such values.
            for (std::size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1.01f / 255.f) << i;
        }
    }
}

struct Thresholds {
    float conf = 0.25f;
    double iou = 0.7;
    int max_det = 300;
    bool agnostic = false;
    std::vector<std::uint8_t> allowed;
    const std::uint8_t* filter() const { return allowed.empty() ? nullptr : allowed.data(); }
};

// A result buffer as the CPU code would fill it: decode > nms > to_source.
std::vector<std::uint8_t> expected_result(const std::vector<float>& data, const Head& head, const Thresholds& t,
                                          const Letterbox& geometry, int rows) {
    Candidates found;
    decode(data.data(), head, {t.conf, t.filter()}, found, Isa::scalar);
    std::vector<std::int32_t> kept;
    Nms nms;
    if (head.kind != HeadKind::end2end) {
        kept = nms.run(found, {t.iou, t.max_det, t.agnostic}, Isa::scalar);
    } else {
        kept = nms.order(found, t.max_det);
    }
    std::vector<std::uint8_t> buffer(result_bytes(rows), 0);
    const ResultView out = result_view(buffer.data(), rows);
    out.header->count = static_cast<std::int32_t>(kept.size());
    out.header->candidates = static_cast<std::int32_t>(found.size());
    for (std::size_t row = 0; row < kept.size(); ++row) {
        const auto i = static_cast<std::size_t>(kept[row]);
        out.boxes[row] = found.box(i);
        out.scores[row] = found.score[i];
        out.class_ids[row] = found.class_id[i];
    }
    to_source(geometry, &out.boxes->x1, out.header->count);
    return buffer;
}

class PostprocessTest : public KernelsTest {
protected:
    void compare(const HeadCase& c, const Thresholds& t, int rows = 300) {
        const std::string what = "head " + std::to_string(static_cast<int>(c.head.kind)) + " rows " +
                                 std::to_string(c.head.rows) + " classes " + std::to_string(c.head.classes) +
                                 " trouble " + std::to_string(static_cast<int>(c.trouble)) + " conf " +
                                 std::to_string(t.conf) + " iou " + std::to_string(t.iou) + " max_det " +
                                 std::to_string(t.max_det) + " agnostic " + std::to_string(t.agnostic);
        const auto data = cases::make_head(c);
        const auto halves = to_halves(data);
        std::vector<float> rounded(halves.size());
        for (std::size_t i = 0; i < halves.size(); ++i) rounded[i] = half_to_float(halves[i]);
        expect_same_bits(on_gpu(data, DType::float32, c.head, t, rows),
                         expected_result(data, c.head, t, geometry, rows), what + " float32");
        expect_same_bits(on_gpu(halves, DType::float16, c.head, t, rows),
                         expected_result(rounded, c.head, t, geometry, rows), what + " float16");
    }
    template <class T>
    std::vector<std::uint8_t> on_gpu(const std::vector<T>& data, DType dtype, const Head& head, const Thresholds& t,
                                     int rows) {
        FrameBlock block{};
        set_frame(block, {nullptr, geometry.source, 0, 3, 1, PixelFormat::bgr}, 0, geometry);
        set_thresholds(block, t.conf, t.iou, t.max_det, t.agnostic, t.filter(), head.classes);
        const auto block_memory = upload(std::vector<FrameBlock>{block});
        const auto output = upload(data);
        const auto workspace = poisoned(CandidateBuffers::bytes(head.rows));
        const auto result = poisoned(result_bytes(rows));
        kernels->postprocess(*stream, block_memory.pointer(), output.pointer(), dtype, head,
                             CandidateBuffers::in(workspace.pointer(), head.rows), result.pointer(), rows);
        const auto first = download<std::uint8_t>(result);
        stream->fill(result.pointer(), 0x5a, result.bytes());
        kernels->postprocess(*stream, block_memory.pointer(), output.pointer(), dtype, head,
                             CandidateBuffers::in(workspace.pointer(), head.rows), result.pointer(), rows);
        expect_same_bits(download<std::uint8_t>(result), first, "second run");
        return first;
    }

    Letterbox geometry = fit({1280, 720}, {640, 640});
};

constexpr HeadKind every_kind[] = {HeadKind::raw, HeadKind::raw_transposed, HeadKind::yolov5, HeadKind::end2end};

TEST_F(PostprocessTest, EveryHeadEveryTrouble) {
    unsigned seed = 1;
    for (const HeadKind kind : every_kind)
        for (const Trouble trouble : {Trouble::none, Trouble::crowd, Trouble::ties, Trouble::not_finite})
            for (const bool agnostic : {false, true}) {
                Thresholds t;
                t.agnostic = agnostic;
                t.iou = trouble == Trouble::ties ? 0.5 : 0.7;
                const int rows = kind == HeadKind::end2end ? 300 : 1500;
                compare({{kind, rows, 80}, trouble, 0.1, seed++}, t);
            }
}

TEST_F(PostprocessTest, Sizes) {
    unsigned seed = 100;
    for (const HeadKind kind : every_kind)
        for (const int rows : {1, 2, 31, 32, 33, 63, 65, 1023, 1025, 2047, 2049, 3000})
            for (const int classes : {1, 5, 133})
                compare({{kind, rows, classes}, Trouble::crowd, 1., seed++}, {0.3f, 0.5, 300, seed % 2 == 0, {}});
}

TEST_F(PostprocessTest, Thresholds) {
    unsigned seed = 200;
    for (const HeadKind kind : every_kind)
        for (const float conf : {0.f, 0.001f, 0.9f, 1.f})
            for (const double iou : {0., 0.6, 1.})
                for (const int max_det : {1, 7, 64, 65}) {
                    const int rows = kind == HeadKind::end2end ? 100 : 400;
                    compare({{kind, rows, 3}, seed % 3 ? Trouble::none : Trouble::ties, 0.3, seed},
                            {conf, iou, max_det, false, {}}, 65);
                    ++seed;
                }
}

TEST_F(PostprocessTest, ClassFilter) {
    unsigned seed = 300;
    for (const HeadKind kind : every_kind) {
        Thresholds t{0.2f, 0.6, 300, false, std::vector<std::uint8_t>(80, 0)};
        for (const std::size_t id : {0u, 31u, 32u, 79u}) t.allowed[id] = 1;
        compare({{kind, 900, 80}, Trouble::none, 0.5, seed++}, t);
        t.allowed.assign(80, 0);
        compare({{kind, 900, 80}, Trouble::none, 0.5, seed++}, t);
    }
}

TEST_F(PostprocessTest, FullHeads) {
    for (const bool agnostic : {false, true}) {
        compare({{HeadKind::raw, 8400, 80}, Trouble::none, 0.04, 400}, {0.25f, 0.7, 300, agnostic, {}});
        compare({{HeadKind::raw, 8400, 80}, Trouble::crowd, 1., 401}, {0.001f, 0.7, 1000, agnostic, {}}, 1000);
    }
    compare({{HeadKind::yolov5, 25200, 80}, Trouble::none, 0.02, 402}, {0.25f, 0.45, 300, false, {}});
    // A 1280-pixel input whose 33,600 anchors are all candidates.
    compare({{HeadKind::raw, 33600, 2}, Trouble::crowd, 1., 403}, {0.001f, 0.5, 300, false, {}});
}

TEST_F(PostprocessTest, AnEmptyHeadGivesZeroRows) {
    for (const HeadKind kind : every_kind) compare({{kind, 0, 80}, Trouble::none, 0., 1}, {});
}

TEST_F(PostprocessTest, RefusesWhatTheKernelsCannotHold) {
    FrameBlock block{};
    const std::vector<std::uint8_t> many(FrameBlock::max_classes + 1, 1);
    EXPECT_THROW(set_thresholds(block, .25f, .7, 300, false, many.data(), FrameBlock::max_classes + 1), InvalidInput);
    EXPECT_NO_THROW(set_thresholds(block, .25f, .7, 300, false, nullptr, FrameBlock::max_classes + 1));
    EXPECT_THROW(set_thresholds(block, .25f, .7, 0, false, nullptr, 80), InvalidInput);
    EXPECT_THROW(set_thresholds(block, .25f, .7, max_result_rows + 1, false, nullptr, 80), InvalidInput);
    EXPECT_THROW(kernels->letterbox(*stream, 0, 0, DType::int8, {64, 64}), EngineError);
}

// One graph, recorded once, serves frames of any size, format and threshold: only the block changes.
TEST_F(PostprocessTest, AGraphFollowsItsBlock) {
    const Size target{160, 160};
    const Head head{HeadKind::raw, 500, 7};
    const auto data = cases::make_head({head, Trouble::none, 0.3, 9});
    const auto output = upload(data);
    const auto workspace = poisoned(CandidateBuffers::bytes(head.rows));
    const auto result = poisoned(result_bytes(50));
    const auto planes = poisoned(3 * 160 * 160 * sizeof(float));
    const cuda::DeviceBuffer block_memory(device, sizeof(FrameBlock));
    stream->synchronize();
    stream->begin_capture();
    kernels->letterbox(*stream, block_memory.pointer(), planes.pointer(), DType::float32, target);
    kernels->postprocess(*stream, block_memory.pointer(), output.pointer(), DType::float32, head,
                         CandidateBuffers::in(workspace.pointer(), head.rows), result.pointer(), 50);
    const auto captured = stream->end_capture();
    ASSERT_EQ(captured.code, cuda::success);
    EXPECT_EQ(captured.graph.node_count(), 3u);
    const cuda::GraphExec exec = captured.graph.instantiate();
    unsigned seed = 0;
    for (const Size source : {Size{320, 240}, Size{99, 201}, Size{160, 160}, Size{640, 360}}) {
        const PixelFormat format = seed % 2 ? PixelFormat::gray : PixelFormat::bgra;
        const int bytes = channels(format);
        const auto pixels = cases::random_bytes(static_cast<std::size_t>(source.width * source.height * bytes), seed);
        const auto memory = upload(pixels);
        const ImageView image{pixels.data(), source, source.width * bytes, bytes, 1, format};
        const Letterbox fitted = fit(source, target);
        const Thresholds t{0.1f * static_cast<float>(seed), 0.5, 50, seed % 2 == 0, {}};
        FrameBlock block{};
        set_frame(block, image, memory.pointer(), fitted);
        set_thresholds(block, t.conf, t.iou, t.max_det, t.agnostic, t.filter(), head.classes);
        stream->copy_to_device(block_memory.pointer(), &block, sizeof block);
        exec.launch(*stream);
        expect_same_bits(download<float>(planes), letterbox_on_cpu(image, fitted), "planes");
        expect_same_bits(download<std::uint8_t>(result), expected_result(data, head, t, fitted, 50), "result");
        ++seed;
    }
}

}  // namespace
}  // namespace edgeyolo
