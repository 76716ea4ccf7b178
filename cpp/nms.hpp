// Non-maximum suppression: exact and greedy, per class, equal to torchvision.ops.nms run class by class.
#pragma once
#include <cstdint>
#include <vector>
#include "decode.hpp"
#include "nms_kernels.hpp"
#include "simd.hpp"

namespace edgeyolo {

struct NmsParams {
    double iou = 0.7;       // in [0, 1]; a box is dropped when its IoU with a kept, better one is strictly above it
    int max_det = 300;      // boxes kept at the most, over all classes
    bool agnostic = false;  // true: boxes of all classes compete
};

// The float32 threshold that gives every float32 IoU the answer that `iou` gives: the largest float not above it.
// torchvision compares in double too. Plain rounding goes wrong where the IoU is a round number: 0.6f is above 0.6,
// so that a float32 IoU of three fifths is above 0.6 and not above 0.6f.
float iou_threshold(double iou);

// One thread at a time; memory is kept from frame to frame.
class Nms {
public:
    // Positions in `candidates` of the boxes that stay, best first; equal scores in the order of their position.
    // Candidates as decode() gives them: positive scores, class ids from 0. Valid until the next call.
    const std::vector<std::int32_t>& run(const Candidates& candidates, const NmsParams& params, Isa isa);

    // The same positions without any suppression, for a network that has suppressed already: the best `max_det`.
    const std::vector<std::int32_t>& order(const Candidates& candidates, int max_det);

private:
    struct Ranked {
        std::uint32_t key;       // ascending key = descending score
        std::int32_t candidate;  // position in the candidates
    };
    // One class. Its kept boxes fill the lanes of blocks_ from block `first` on.
    struct Group {
        std::int32_t members;  // candidates of this class
        std::int32_t first;    // its first block
        std::int32_t kept;
    };

    void rank(const std::vector<float>& scores);
    void make_groups(const Candidates& candidates, const NmsParams& params);

    std::vector<Ranked> ranked_, swap_;
    std::vector<Group> groups_;
    std::vector<BoxBlock> blocks_;
    std::vector<std::int32_t> keep_;
};

}  // namespace edgeyolo
