// The CPU's half of a frame after the network: decode > nms > back to the picture's pixels.
#pragma once
#include <vector>
#include "decode.hpp"
#include "letterbox.hpp"
#include "live.hpp"
#include "nms.hpp"
#include "pool.hpp"

namespace edgeyolo {

// Boxes of one picture in its own pixels, best first.
struct Results {
    std::vector<float> boxes;  // 4 per box, xyxy
    std::vector<float> scores;
    std::vector<std::int32_t> class_ids;
    std::size_t size() const { return scores.size(); }
};

// Any number of threads may call run() at once: each works in a workspace of its own.
class Postprocessor {
public:
    struct Options {
        float conf = 0.25f;
        double iou = 0.7;
        int max_det = 300;
        bool agnostic = false;
        std::vector<std::uint8_t> allowed;  // per class; empty = all
    };
    // Scratch and results of one call.
    struct Workspace {
        Candidates candidates;
        Nms nms;
        Results results;
        Live<&LiveCounters::workspaces> live;
    };
    using Lease = Pool<Workspace>::Lease;

    // Throws InvalidInput for a threshold outside [0, 1] or max_det below 1.
    explicit Postprocessor(Options options);

    // The results are in the lease's workspace and valid while it lives. Throws InvalidInput when `allowed` does not
    // fit the head's classes.
    Lease run(const float* data, const Head& head, const Letterbox& geometry, Isa isa);
    const Options& options() const { return options_; }

private:
    Options options_;
    Pool<Workspace> pool_;
    Live<&LiveCounters::postprocessors> live_;
};

}  // namespace edgeyolo
