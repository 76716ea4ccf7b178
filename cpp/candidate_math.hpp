// What decode hands to NMS, and what comes out in the end: the records of the GPU's second half, for host and device.
#pragma once
#include <cstddef>
#include <cstdint>
#include "box_math.hpp"
#include "frame_block.hpp"
#include "half_math.hpp"
#include "host_device.hpp"

namespace edgeyolo {

// A candidate's place in the order "score descending, anchor ascending" as one number: higher keys come first. Scores
// are positive and finite, so their bits rise with their value, and a key is never 0, which stands for "no candidate".
// No two anchors share a key: whatever order candidates are found in, sorting them gives one answer.
EDGEYOLO_HD inline std::uint64_t candidate_key(float score, int anchor) {
    return static_cast<std::uint64_t>(float_bits(score)) << 32 | ~static_cast<std::uint32_t>(anchor);
}
EDGEYOLO_HD inline float key_score(std::uint64_t key) {
    return float_from_bits(static_cast<std::uint32_t>(key >> 32));
}
EDGEYOLO_HD inline int key_anchor(std::uint64_t key) {
    return static_cast<int>(~static_cast<std::uint32_t>(key));
}

EDGEYOLO_HD inline bool class_allowed(const FrameBlock& block, int class_id) {
    return !block.filtered ||
           (class_id < FrameBlock::max_classes && (block.allowed[class_id / 32] >> class_id % 32 & 1u) != 0);
}

// A box that does not overlap at all is told apart without the division of overlaps(), with the same answer: the
// intersection is then 0, and 0 divided by anything is never above a threshold of 0 or more.
EDGEYOLO_HD inline bool drops(const Box& kept, float kept_area, const Box& box, float box_area, float threshold) {
    const bool apart = !(kept.x1 < box.x2 && box.x1 < kept.x2 && kept.y1 < box.y2 && box.y1 < kept.y2);
    return !apart && overlaps(kept, kept_area, box, box_area, threshold);
}

// One coordinate from input pixels to source pixels, clipped to the picture, as to_source() of letterbox.hpp.
EDGEYOLO_HD inline float source_coordinate(float input, int border, int source, int resized) {
    const double position = (static_cast<double>(input) - border) * source / resized;
    if (!(position > 0.)) return 0.f;  // NaN too
    return static_cast<float>(position < source ? position : static_cast<double>(source));
}
EDGEYOLO_HD inline Box source_box(const FrameBlock& block, const Box& box) {
    return {source_coordinate(box.x1, block.left, block.source_width, block.resized_width),
            source_coordinate(box.y1, block.top, block.source_height, block.resized_height),
            source_coordinate(box.x2, block.left, block.source_width, block.resized_width),
            source_coordinate(box.y2, block.top, block.source_height, block.resized_height)};
}

// The result buffer of one frame, `rows` rows of it, in one piece so that one copy brings it to the host:
// ResultHeader, then boxes (rows, 4) float32 xyxy in source pixels, scores (rows) float32, class ids (rows) int32.
// Every launch writes all of it; rows from `count` on are zero.
struct ResultHeader {
    std::int32_t count;       // valid rows, best first
    std::int32_t candidates;  // anchors above conf, before suppression
    std::int32_t reserved[2];
};
constexpr int max_result_rows = 1024;  // what the NMS kernel has shared memory for

struct ResultView {
    ResultHeader* header;
    Box* boxes;
    float* scores;
    std::int32_t* class_ids;
};
EDGEYOLO_HD constexpr std::size_t result_bytes(int rows) {
    return sizeof(ResultHeader) + static_cast<std::size_t>(rows) * (sizeof(Box) + sizeof(float) + sizeof(std::int32_t));
}
EDGEYOLO_HD inline ResultView result_view(void* buffer, int rows) {
    auto* header = static_cast<ResultHeader*>(buffer);
    auto* boxes = reinterpret_cast<Box*>(header + 1);
    auto* scores = reinterpret_cast<float*>(boxes + rows);
    return {header, boxes, scores, reinterpret_cast<std::int32_t*>(scores + rows)};
}
EDGEYOLO_HD inline int result_limit(const FrameBlock& block, int rows) {
    return block.max_det < 0 ? 0 : block.max_det < rows ? block.max_det : rows;
}

}  // namespace edgeyolo
