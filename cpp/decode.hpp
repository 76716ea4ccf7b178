// From the network's output to candidate boxes in input pixels.
#pragma once
#include <cstdint>
#include <vector>
#include "simd.hpp"

namespace edgeyolo {

// The layout of one picture's output; nc classes, A anchors.
enum class HeadKind {
    raw,             // (4 + nc, A): rows cx, cy, w, h, then one row of probabilities per class
    raw_transposed,  // (A, 4 + nc)
    yolov5,          // (A, 5 + nc): cx, cy, w, h, objectness, class probabilities; score = objectness * class
    end2end          // (N, 6): x1, y1, x2, y2, score, class; already suppressed and ordered by the network
};

struct Head {
    HeadKind kind = HeadKind::raw;
    int rows = 0;     // A, or N for end2end
    int classes = 0;  // nc
};
// Number of floats that one picture's output holds.
std::size_t element_count(const Head& head);

struct DecodeParams {
    float conf = 0.25f;                           // a candidate's score is strictly above it, as Ultralytics has it
    const std::uint8_t* allowed = nullptr;        // per class, 0 = dropped; nullptr = all. Applied to the best class.
};

// Candidates as columns, in the order of their anchors. Memory is kept from frame to frame.
struct Candidates {
    std::vector<float> x1, y1, x2, y2, score;     // input pixels; score in (conf, 1]
    std::vector<std::int32_t> class_id;
    std::vector<std::int32_t> index;              // row of the head
    std::size_t size() const { return score.size(); }
    void clear();
    void push(float left, float top, float right, float bottom, float confidence, std::int32_t cls, std::int32_t row);
};

// Fills `out` with every anchor whose best class score is above conf: one class per anchor, the lowest class id on a tie.
// A NaN class score counts as no score; an anchor with an infinite score or a box that is not finite is dropped;
// an end2end row whose class is not an integer in [0, nc) is dropped.
void decode(const float* data, const Head& head, const DecodeParams& params, Candidates& out, Isa isa);

}  // namespace edgeyolo
