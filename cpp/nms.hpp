// Non-maximum suppression: exact and greedy, per class, equal to torchvision.ops.nms run class by class.
#pragma once
#include <cstdint>
#include <vector>
#include "decode.hpp"
#include "simd.hpp"

namespace edgeyolo {

struct NmsParams {
    float iou = 0.7f;        // a box is dropped when its IoU with a kept, better one is strictly above it
    int max_det = 300;       // boxes kept at the most, over all classes
    bool agnostic = false;   // true: boxes of all classes compete
};

// One thread at a time; memory is kept from frame to frame.
class Nms {
public:
    // Positions in `candidates` of the boxes that stay, best first; equal scores in the order of their position.
    // Valid until the next call.
    const std::vector<std::int32_t>& run(const Candidates& candidates, const NmsParams& params, Isa isa);

private:
    std::vector<std::int32_t> order_, begin_, dead_, keep_;
    std::vector<float> columns_;
};

}  // namespace edgeyolo
