// Greedy NMS asks of each box, best first: does a kept box of its class drop it? Asking it of the kept boxes alone,
// instead of striking out all the later ones, gives the same answer and may end as soon as max_det boxes are kept.
#include "nms.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace edgeyolo {

float iou_threshold(double iou) {
    const auto nearest = static_cast<float>(iou);
    return static_cast<double>(nearest) > iou ? std::nextafter(nearest, -std::numeric_limits<float>::infinity())
                                              : nearest;
}

// A radix sort, a byte at a time from the lowest: stable, and the same time whatever the scores are.
void Nms::rank(const std::vector<float>& scores) {
    using Histogram = std::array<std::uint32_t, 256>;
    std::array<Histogram, 4> histograms{};
    ranked_.resize(scores.size());
    swap_.resize(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
        std::uint32_t bits;  // of a positive float: they rise with its value
        std::memcpy(&bits, &scores[i], sizeof bits);
        const std::uint32_t key = ~bits;
        ranked_[i] = {key, static_cast<std::int32_t>(i)};
        for (std::size_t byte = 0; byte < 4; ++byte) ++histograms[byte][(key >> 8 * byte) & 255];
    }
    for (std::size_t byte = 0; byte < 4; ++byte) {
        Histogram& place = histograms[byte];
        std::exclusive_scan(place.begin(), place.end(), place.begin(), 0u);
        for (const Ranked& entry : ranked_) swap_[place[(entry.key >> 8 * byte) & 255]++] = entry;
        ranked_.swap(swap_);
    }
}

// Gives each class as many blocks as it can come to need.
void Nms::make_groups(const Candidates& candidates, const NmsParams& params) {
    groups_.clear();
    if (params.agnostic) {
        groups_.push_back({static_cast<std::int32_t>(candidates.size()), 0, 0});
    } else {
        const auto highest = std::max_element(candidates.class_id.begin(), candidates.class_id.end());
        groups_.resize(static_cast<std::size_t>(*highest) + 1);
        for (const std::int32_t id : candidates.class_id) ++groups_[static_cast<std::size_t>(id)].members;
    }
    std::int32_t blocks = 0;
    for (Group& group : groups_) {
        group.first = blocks;
        blocks += (std::min(group.members, params.max_det) + BoxBlock::lanes - 1) / BoxBlock::lanes;
    }
    blocks_.resize(static_cast<std::size_t>(blocks));
}

const std::vector<std::int32_t>& Nms::order(const Candidates& candidates, int max_det) {
    rank(candidates.score);
    keep_.clear();
    for (const Ranked& entry : ranked_) {
        if (keep_.size() == static_cast<std::size_t>(max_det)) break;
        keep_.push_back(entry.candidate);
    }
    return keep_;
}

const std::vector<std::int32_t>& Nms::run(const Candidates& candidates, const NmsParams& params, Isa isa) {
    const OverlapsAny dropped_by = overlaps_any(isa);
    keep_.clear();
    if (candidates.size() == 0 || params.max_det < 1) return keep_;
    rank(candidates.score);
    make_groups(candidates, params);
    const float threshold = iou_threshold(params.iou);
    const auto limit = static_cast<std::size_t>(params.max_det);
    for (const Ranked& entry : ranked_) {
        const auto i = static_cast<std::size_t>(entry.candidate);
        Group& group = groups_[params.agnostic ? 0 : static_cast<std::size_t>(candidates.class_id[i])];
        const Box box = candidates.box(i);
        const float box_area = area(box);
        BoxBlock* blocks = blocks_.data() + group.first;
        const int used = (group.kept + BoxBlock::lanes - 1) / BoxBlock::lanes;
        if (dropped_by(blocks, used, box, box_area, threshold)) continue;
        BoxBlock& block = blocks[group.kept / BoxBlock::lanes];
        const int lane = group.kept++ % BoxBlock::lanes;
        if (lane == 0) block = {};
        block.set(lane, box, box_area);
        keep_.push_back(entry.candidate);
        if (keep_.size() == limit) break;
    }
    return keep_;
}

}  // namespace edgeyolo
