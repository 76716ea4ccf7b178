// From the network's output to candidate boxes in input pixels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>
#include "box_math.hpp"
#include "simd.hpp"

namespace edgeyolo {

// The layout of one picture's output; nc classes, A anchors.
enum class HeadKind {
    raw,             // (4 + nc, A): rows cx, cy, w, h, then one row of probabilities per class
    raw_transposed,  // (A, 4 + nc)
    yolov5,          // (A, 5 + nc): cx, cy, w, h, objectness, class probabilities; score = objectness * class
    end2end          // (N, 6): x1, y1, x2, y2, score, class; already suppressed by the network; in any order
};

struct Head {
    HeadKind kind = HeadKind::raw;
    int rows = 0;     // A, or N for end2end
    int classes = 0;  // nc
};
// Number of floats that one picture's output holds. Throws InvalidInput for negative rows or less than one class.
std::size_t element_count(const Head& head);

struct DecodeParams {
    float conf = 0.25f;  // in [0, 1]; a candidate's score is strictly above it, as Ultralytics has it
    const std::uint8_t* allowed = nullptr;  // per class, 0 = dropped; nullptr = all. Applied to the best class.
};

// Candidates as columns, in the order of their anchors. Memory is kept from frame to frame.
struct Candidates {
    std::vector<float> x1, y1, x2, y2, score;  // input pixels, x1 <= x2, y1 <= y2; finite, score > conf
    std::vector<std::int32_t> class_id;
    std::vector<std::int32_t> index;  // row of the head
    std::size_t size() const { return score.size(); }
    Box box(std::size_t i) const { return {x1[i], y1[i], x2[i], y2[i]}; }
    void clear();
    void push(const Box& box, float confidence, std::int32_t cls, std::int32_t row);
};

// Fills `out` with every anchor whose best class score is above conf: one class per anchor, the lowest class id on a
// tie. A NaN class score counts as no score. Broken anchors are dropped: those whose best score is infinite, whose box is
// not finite or has a negative width or height (x2 < x1, y2 < y1), and end2end rows whose class is not an integer in
// [0, nc). A box without area stays. Scores are passed through as the network gave them, also above 1: such a network
// was exported without its sigmoid, and hiding that would hide the fault. yolov5: an objectness that is not above
// conf drops the anchor, as in YOLOv5 itself. For probabilities this changes nothing, since the product cannot be above
// its objectness. The tie is that of the rounded products. data: element_count(head) floats. Throws InvalidInput as
// element_count() does. Every Isa gives the same bits.
void decode(const float* data, const Head& head, const DecodeParams& params, Candidates& out, Isa isa);

}  // namespace edgeyolo
