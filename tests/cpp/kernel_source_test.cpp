// The source of the GPU kernels, run thread by thread on the host (cuda_on_host.hpp), against the CPU code: indices,
// barriers and shared memory without a GPU. Buffers are allocated at their exact size, for AddressSanitizer.
#include "../fakes/cuda_on_host.hpp"

#include "../../cpp/decode.cu"
#include "../../cpp/letterbox.cu"
#include "../../cpp/nms.cu"

#include <gtest/gtest.h>
#include "gpu_cases.hpp"
#include "letterbox.hpp"
#include "nms.hpp"

namespace edgeyolo {
namespace {

using cases::HeadCase;
using cases::Trouble;
using cuda_on_host::run;

unsigned blocks(int items, int per_block) {
    return static_cast<unsigned>(std::max(1, (items + per_block - 1) / per_block));
}

template <class T>
std::vector<T> to_type(const std::vector<float>& values) {
    std::vector<T> out(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) store_float(&out[i], values[i]);
    return out;
}

FrameBlock frame_block(Size source, Size target) {
    const Letterbox g = fit(source, target);
    FrameBlock block{};
    block.source_width = source.width;
    block.source_height = source.height;
    block.resized_width = g.resized.width;
    block.resized_height = g.resized.height;
    block.left = g.left;
    block.top = g.top;
    block.step_x = axis_step(source.width, g.resized.width);
    block.step_y = axis_step(source.height, g.resized.height);
    return block;
}

template <class T>
void check_letterbox(void (*kernel)(const FrameBlock*, T*, int, int)) {
    unsigned seed = 0;
    for (const Size source : {Size{150, 100}, Size{66, 40}, Size{1, 1}, Size{20, 300}, Size{133, 133}}) {
        for (const Size target : {Size{160, 96}, Size{33, 20}, Size{131, 9}}) {
            const auto pixels = cases::random_bytes(static_cast<std::size_t>(3 * source.width * source.height), seed++);
            const ImageView image{pixels.data(), source, 3 * source.width, 3, 1, PixelFormat::bgr};
            FrameBlock block = frame_block(source, target);
            block.pixels = reinterpret_cast<std::uint64_t>(pixels.data());
            block.row_stride = 3 * source.width;
            block.pixel_stride = 3;
            block.red = 2;
            block.green = 1;
            const std::size_t count = static_cast<std::size_t>(3 * target.width * target.height);
            // Packs of pixels need the alignment that device memory has.
            struct alignas(16) Unit {
                unsigned char bytes[16];
            };
            std::vector<Unit> memory(count * sizeof(T) / 16 + 1);
            T* planes = reinterpret_cast<T*>(memory.data());
            run(
                {blocks(target.width, block_columns), blocks(target.height, block_rows)}, {32, block_rows},
                [&] { kernel(&block, planes, target.width, target.height); }, seed);
            std::vector<float> expected(count);
            LetterboxWorkspace workspace;
            letterbox(image, fit(source, target), expected.data(), workspace, Isa::scalar);
            const auto typed = to_type<T>(expected);
            for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(planes[i], typed[i]) << source.width << " " << i;
        }
    }
}

TEST(KernelSource, Letterbox) {
    check_letterbox<float>(edgeyolo_letterbox_f32);
    check_letterbox<std::uint16_t>(edgeyolo_letterbox_f16);
}

struct Thresholds {
    float conf;
    double iou;
    int max_det;
    bool agnostic;
};

template <class T>
void check_postprocess(const HeadCase& c, const Thresholds& t, int rows) {
    const Head& head = c.head;
    const auto data = to_type<T>(cases::make_head(c));
    std::vector<float> exact(data.size());
    for (std::size_t i = 0; i < data.size(); ++i) exact[i] = load_float(&data[i]);
    FrameBlock block = frame_block({1280, 720}, {640, 640});
    block.conf = t.conf;
    block.iou = iou_threshold(t.iou);
    block.max_det = t.max_det;
    block.agnostic = t.agnostic ? 1 : 0;

    const auto anchors = static_cast<std::size_t>(head.rows);
    std::size_t list_length = 2;
    while (list_length < anchors) list_length *= 2;
    std::vector<std::uint64_t> keys(anchors, 77), list(list_length, 77);
    std::vector<StoredBox> boxes(anchors);
    std::vector<std::int32_t> ids(anchors, -7);
    std::vector<std::uint64_t> memory(result_bytes(rows) / 8, 0xa5a5a5a5a5a5a5a5u);
    constexpr bool half = sizeof(T) == 2;
    const T* input = data.data();
    Box* box_data = reinterpret_cast<Box*>(boxes.data());
    const unsigned seed = c.seed;
    if (head.kind == HeadKind::end2end) {
        run(
            {}, {1024},
            [&] {
                if constexpr (half)
                    edgeyolo_end2end_f16(&block, input, head.rows, head.classes, memory.data(), rows);
                else
                    edgeyolo_end2end_f32(&block, input, head.rows, head.classes, memory.data(), rows);
            },
            seed);
    } else {
        const int objectness = head.kind == HeadKind::yolov5 ? 1 : 0;
        const bool columns = head.kind == HeadKind::raw;
        run(
            {blocks(head.rows, columns ? 32 : 8)}, {32, 8},
            [&] {
                if constexpr (half) {
                    if (columns)
                        edgeyolo_decode_columns_f16(&block, input, head.rows, head.classes, keys.data(), box_data,
                                                    ids.data());
                    else
                        edgeyolo_decode_rows_f16(&block, input, head.rows, head.classes, objectness, keys.data(),
                                                 box_data, ids.data());
                } else {
                    if (columns)
                        edgeyolo_decode_columns_f32(&block, input, head.rows, head.classes, keys.data(), box_data,
                                                    ids.data());
                    else
                        edgeyolo_decode_rows_f32(&block, input, head.rows, head.classes, objectness, keys.data(),
                                                 box_data, ids.data());
                }
            },
            seed);
        run(
            {}, {1024},
            [&] {
                edgeyolo_nms(&block, keys.data(), box_data, ids.data(), head.rows, list.data(), memory.data(), rows);
            },
            seed);
    }

    Candidates found;
    decode(exact.data(), head, {t.conf, nullptr}, found, Isa::scalar);
    std::vector<std::int32_t> kept;
    Nms nms;
    if (head.kind != HeadKind::end2end)
        kept = nms.run(found, {t.iou, t.max_det, t.agnostic}, Isa::scalar);
    else
        kept = nms.order(found, t.max_det);
    std::vector<std::uint64_t> wanted(memory.size(), 0);
    const ResultView out = result_view(wanted.data(), rows);
    *out.header = {static_cast<std::int32_t>(kept.size()), static_cast<std::int32_t>(found.size()), {0, 0}};
    for (std::size_t row = 0; row < kept.size(); ++row) {
        const auto i = static_cast<std::size_t>(kept[row]);
        out.boxes[row] = found.box(i);
        out.scores[row] = found.score[i];
        out.class_ids[row] = found.class_id[i];
    }
    to_source(fit({1280, 720}, {640, 640}), &out.boxes->x1, out.header->count);
    EXPECT_EQ(memory, wanted) << "head " << static_cast<int>(head.kind) << " rows " << head.rows << " trouble "
                              << static_cast<int>(c.trouble) << " half " << half;
}

TEST(KernelSource, Postprocess) {
    unsigned seed = 1;
    for (const HeadKind kind : {HeadKind::raw, HeadKind::raw_transposed, HeadKind::yolov5, HeadKind::end2end})
        for (const Trouble trouble : {Trouble::none, Trouble::crowd, Trouble::ties, Trouble::not_finite})
            for (const int rows : {1, 65, 300}) {
                const Thresholds t{0.2f, 0.6, 100, ++seed % 2 == 0};
                check_postprocess<float>({{kind, rows, 20}, trouble, 0.3, seed}, t, 100);
                check_postprocess<std::uint16_t>({{kind, rows, 20}, trouble, 0.3, seed}, t, 100);
            }
}

TEST(KernelSource, ListsAroundTheSortersTile) {
    for (const int rows : {2047, 2048, 2049, 4097, 8400})
        check_postprocess<float>({{HeadKind::raw, rows, 2}, Trouble::ties, 1., static_cast<unsigned>(rows)},
                                 {0.001f, 0.3, 70, rows % 2 == 0}, 70);
    check_postprocess<float>({{HeadKind::end2end, 2500, 5}, Trouble::none, 0.4, 5}, {0.3f, 0.3, 1000, false}, 1000);
}

}  // namespace
}  // namespace edgeyolo
