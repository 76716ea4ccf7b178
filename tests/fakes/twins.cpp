// The host twins of the GPU kernels. They use the same formulas (cpp/*_math.hpp, letterbox_sample.hpp) in plain loops:
// what they prove is those formulas and the order of the launches, not the kernels' indexing, barriers or shared
// memory.
#include "twins.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <vector>
#include "candidate_math.hpp"
#include "letterbox_sample.hpp"

namespace edgeyolo::fake {
namespace {

using Ptr = unsigned long long;

const FrameBlock& block_at(void** params, const Memory& memory) {
    return *memory.at<FrameBlock>(param<Ptr>(params, 0), 1);
}

// An array that may be empty.
template <class T>
T* array_at(const Memory& memory, Ptr pointer, int count) {
    return count == 0 ? nullptr : memory.at<T>(pointer, static_cast<std::size_t>(count));
}

// The first byte of row 0, of `rows` rows that hold `row_bytes` bytes each. Strides may be negative.
const std::uint8_t* rows_at(const Memory& memory, Ptr first_row, std::int64_t stride, int rows,
                            std::int64_t row_bytes) {
    const std::int64_t span = (rows - 1) * std::abs(stride);
    const Ptr lowest = stride < 0 ? first_row - static_cast<Ptr>(span) : first_row;
    const auto* start = memory.at<std::uint8_t>(lowest, static_cast<std::size_t>(span + row_bytes));
    return stride < 0 ? start + span : start;
}

Picture picture_at(const FrameBlock& block, const Memory& memory) {
    const int width = block.source_width;
    const int height = block.source_height;
    if (block.layout == FrameLayout::nv12) {
        const int pairs = (width + 1) / 2;
        return make_picture(block, rows_at(memory, block.pixels, block.row_stride, height, width),
                            rows_at(memory, block.chroma, block.chroma_stride, (height + 1) / 2, 2 * pairs));
    }
    // The bytes of a row relative to `pixels`, wherever its strides lead.
    const std::int64_t last = static_cast<std::int64_t>(width - 1) * block.pixel_stride;
    const auto [low, high] = std::minmax({block.red, block.green, block.blue});
    const std::int64_t begin = std::min<std::int64_t>(last, 0) + low;
    const std::int64_t end = std::max<std::int64_t>(last, 0) + high + 1;
    const std::uint8_t* row =
        rows_at(memory, block.pixels + static_cast<Ptr>(begin), block.row_stride, height, end - begin);
    return make_picture(block, row - begin, nullptr);
}

template <class T>
void letterbox(Dim, Dim, unsigned, void** params, const Memory& memory) {
    const int width = param<int>(params, 2);
    const int height = param<int>(params, 3);
    if (width == 0 || height == 0) return;
    const FrameBlock& block = block_at(params, memory);
    const std::size_t plane = static_cast<std::size_t>(width) * static_cast<std::size_t>(height);
    T* out = memory.at<T>(param<Ptr>(params, 1), 3 * plane);
    const Picture picture = picture_at(block, memory);
    const Size source{block.source_width, block.source_height};
    const Size resized{block.resized_width, block.resized_height};
    const bool half = is_half(source, resized);
    for (int y = 0; y < height; ++y) {
        const int row_index = y - block.top;
        for (int x = 0; x < width; ++x, ++out) {
            const int column_index = x - block.left;
            Rgb pixel{kBorder, kBorder, kBorder};
            if (row_index >= 0 && row_index < resized.height && column_index >= 0 && column_index < resized.width) {
                const Taps row = row_taps(row_index, source.height, block.step_y);
                const Taps column = column_taps(column_index, source.width, block.step_x);
                const SourceRow upper = source_row(picture, row.first);
                const SourceRow lower = source_row(picture, row.second);
                pixel = block.layout == FrameLayout::nv12
                            ? sample<FrameLayout::nv12>(picture, upper, lower, column, row, half)
                            : sample<FrameLayout::packed>(picture, upper, lower, column, row, half);
            }
            store_float(out, unit_value(pixel.red));
            store_float(out + plane, unit_value(pixel.green));
            store_float(out + 2 * plane, unit_value(pixel.blue));
        }
    }
}

struct CandidateOutput {
    std::uint64_t* keys;
    Box* boxes;
    std::int32_t* class_ids;

    static CandidateOutput at(void** params, int first, int anchors, const Memory& memory) {
        return {array_at<std::uint64_t>(memory, param<Ptr>(params, first), anchors),
                array_at<Box>(memory, param<Ptr>(params, first + 1), anchors),
                array_at<std::int32_t>(memory, param<Ptr>(params, first + 2), anchors)};
    }
    void write(const FrameBlock& block, int anchor, float score, int class_id, const Box& box) const {
        const bool passes = is_candidate(score, block.conf) && class_allowed(block, class_id) && is_box(box);
        keys[anchor] = passes ? candidate_key(score, anchor) : 0;
        if (!passes) return;
        boxes[anchor] = box;
        class_ids[anchor] = class_id;
    }
};

// Element (row, column) of one anchor's numbers stands at data[column * step].
template <class T>
void decode_anchor(const FrameBlock& block, const T* data, std::size_t step, int classes, bool objectness, int anchor,
                   const CandidateOutput& out) {
    const auto number = [&](int column) { return load_float(data + static_cast<std::size_t>(column) * step); };
    const int before = objectness ? 5 : 4;
    const float factor = objectness ? number(4) : 1.f;
    float best = -std::numeric_limits<float>::infinity();
    int best_class = 0;
    for (int c = 0; c < classes && (!objectness || factor > block.conf); ++c) {
        const float score = factor * number(before + c);
        if (score > best) {
            best = score;
            best_class = c;
        }
    }
    out.write(block, anchor, best, best_class, corners(number(0), number(1), number(2), number(3)));
}

template <class T>
void decode_columns(Dim, Dim, unsigned, void** params, const Memory& memory) {
    const int anchors = param<int>(params, 2);
    const int classes = param<int>(params, 3);
    if (anchors == 0) return;
    const FrameBlock& block = block_at(params, memory);
    const auto step = static_cast<std::size_t>(anchors);
    const T* head = memory.at<T>(param<Ptr>(params, 1), step * static_cast<std::size_t>(4 + classes));
    const auto out = CandidateOutput::at(params, 4, anchors, memory);
    for (int anchor = 0; anchor < anchors; ++anchor)
        decode_anchor(block, head + anchor, step, classes, false, anchor, out);
}

template <class T>
void decode_rows(Dim, Dim, unsigned, void** params, const Memory& memory) {
    const int anchors = param<int>(params, 2);
    const int classes = param<int>(params, 3);
    const bool objectness = param<int>(params, 4) != 0;
    if (anchors == 0) return;
    const FrameBlock& block = block_at(params, memory);
    const auto length = static_cast<std::size_t>((objectness ? 5 : 4) + classes);
    const T* head = memory.at<T>(param<Ptr>(params, 1), length * static_cast<std::size_t>(anchors));
    const auto out = CandidateOutput::at(params, 5, anchors, memory);
    for (int anchor = 0; anchor < anchors; ++anchor)
        decode_anchor(block, head + static_cast<std::size_t>(anchor) * length, 1, classes, objectness, anchor, out);
}

// The result buffer, zeroed: kernels write every row.
struct ResultWriter {
    ResultView view;
    int limit;

    static ResultWriter at(Ptr pointer, int rows, const FrameBlock& block, const Memory& memory) {
        void* buffer = memory.host(pointer, result_bytes(rows));
        std::fill_n(static_cast<unsigned char*>(buffer), result_bytes(rows), static_cast<unsigned char>(0));
        return {result_view(buffer, rows), result_limit(block, rows)};
    }
    bool full() const { return view.header->count >= limit; }
    void add(const FrameBlock& block, const Box& box, float score, int class_id) const {
        const int row = view.header->count++;
        view.boxes[row] = source_box(block, box);
        view.scores[row] = score;
        view.class_ids[row] = class_id;
    }
};

template <class T>
void end2end(Dim, Dim, unsigned, void** params, const Memory& memory) {
    const int rows_in = param<int>(params, 2);
    const int classes = param<int>(params, 3);
    const int rows = param<int>(params, 5);
    if (rows == 0) return;
    const FrameBlock& block = block_at(params, memory);
    const T* head = array_at<T>(memory, param<Ptr>(params, 1), rows_in * 6);
    const ResultWriter out = ResultWriter::at(param<Ptr>(params, 4), rows, block, memory);
    const auto box_of = [&](int i) {
        const T* row = head + i * 6;
        return Box{load_float(row), load_float(row + 1), load_float(row + 2), load_float(row + 3)};
    };
    std::vector<std::uint64_t> keys;
    for (int i = 0; i < rows_in; ++i) {
        const float score = load_float(head + i * 6 + 4);
        const float class_value = load_float(head + i * 6 + 5);
        if (!is_candidate(score, block.conf) || !is_class_id(class_value, classes) || !is_box(box_of(i))) continue;
        if (class_allowed(block, static_cast<int>(class_value))) keys.push_back(candidate_key(score, i));
    }
    std::sort(keys.begin(), keys.end(), std::greater<>());
    out.view.header->candidates = static_cast<std::int32_t>(keys.size());
    for (const std::uint64_t key : keys) {
        if (out.full()) break;
        const int i = key_anchor(key);
        out.add(block, box_of(i), key_score(key), static_cast<int>(load_float(head + i * 6 + 5)));
    }
}

void nms(Dim, Dim, unsigned, void** params, const Memory& memory) {
    const int anchors = param<int>(params, 4);
    const int rows = param<int>(params, 7);
    if (rows == 0) return;
    const FrameBlock& block = block_at(params, memory);
    const auto* keys = array_at<std::uint64_t>(memory, param<Ptr>(params, 1), anchors);
    const auto* boxes = array_at<Box>(memory, param<Ptr>(params, 2), anchors);
    const auto* class_ids = array_at<std::int32_t>(memory, param<Ptr>(params, 3), anchors);
    array_at<std::uint64_t>(memory, param<Ptr>(params, 5), anchors);  // the kernel's list must be there
    const ResultWriter out = ResultWriter::at(param<Ptr>(params, 6), rows, block, memory);

    std::vector<std::uint64_t> sorted;
    std::copy_if(keys, keys + anchors, std::back_inserter(sorted), [](std::uint64_t key) { return key != 0; });
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    out.view.header->candidates = static_cast<std::int32_t>(sorted.size());
    std::vector<int> kept;
    for (const std::uint64_t key : sorted) {
        if (out.full()) break;
        const int anchor = key_anchor(key);
        const Box& box = boxes[anchor];
        const bool dropped = std::any_of(kept.begin(), kept.end(), [&](int rival) {
            return (block.agnostic != 0 || class_ids[rival] == class_ids[anchor]) &&
                   drops(boxes[rival], area(boxes[rival]), box, area(box), block.iou);
        });
        if (dropped) continue;
        kept.push_back(anchor);
        out.add(block, box, key_score(key), class_ids[anchor]);
    }
}

constexpr std::size_t p = sizeof(Ptr);
constexpr std::size_t n = sizeof(int);

// The names and parameter sizes of the entry points in cpp/*.cu.
const bool registered = [] {
    register_twin("edgeyolo_letterbox_f32", letterbox<float>, {p, p, n, n});
    register_twin("edgeyolo_letterbox_f16", letterbox<std::uint16_t>, {p, p, n, n});
    register_twin("edgeyolo_decode_columns_f32", decode_columns<float>, {p, p, n, n, p, p, p});
    register_twin("edgeyolo_decode_columns_f16", decode_columns<std::uint16_t>, {p, p, n, n, p, p, p});
    register_twin("edgeyolo_decode_rows_f32", decode_rows<float>, {p, p, n, n, n, p, p, p});
    register_twin("edgeyolo_decode_rows_f16", decode_rows<std::uint16_t>, {p, p, n, n, n, p, p, p});
    register_twin("edgeyolo_end2end_f32", end2end<float>, {p, p, n, n, p, n});
    register_twin("edgeyolo_end2end_f16", end2end<std::uint16_t>, {p, p, n, n, p, n});
    register_twin("edgeyolo_nms", nms, {p, p, p, p, n, p, p, n});
    return true;
}();

}  // namespace
}  // namespace edgeyolo::fake
