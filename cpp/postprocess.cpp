#include "postprocess.hpp"

#include "error.hpp"

namespace edgeyolo {

Postprocessor::Postprocessor(Options options) : options_(std::move(options)) {
    // The negated form refuses NaN too.
    check(options_.conf >= 0.f && options_.conf <= 1.f,
          "conf must be between 0 and 1, found " + std::to_string(options_.conf));
    check(options_.iou >= 0 && options_.iou <= 1, "iou must be between 0 and 1, found " + std::to_string(options_.iou));
    check(options_.max_det >= 1, "max_det must be at least 1, found " + std::to_string(options_.max_det));
}

Postprocessor::Lease Postprocessor::run(const float* data, const Head& head, const Letterbox& geometry, Isa isa) {
    check(options_.allowed.empty() || options_.allowed.size() == static_cast<std::size_t>(head.classes),
          "the class filter was made for another number of classes than the network's output has");
    Lease workspace = pool_.take();
    DecodeParams params{options_.conf, options_.allowed.empty() ? nullptr : options_.allowed.data()};
    decode(data, head, params, workspace->candidates, isa);

    const Candidates& found = workspace->candidates;
    Results& results = workspace->results;
    results.boxes.clear();
    results.scores.clear();
    results.class_ids.clear();
    const auto keep = [&](std::size_t i) {
        const float box[] = {found.x1[i], found.y1[i], found.x2[i], found.y2[i]};
        results.boxes.insert(results.boxes.end(), box, box + 4);
        results.scores.push_back(found.score[i]);
        results.class_ids.push_back(found.class_id[i]);
    };
    // An end2end network has suppressed them already. Most order them too; those that do not would otherwise lose good
    // boxes to max_det. The order is stable: rows that come ordered stay as they are.
    const NmsParams nms{options_.iou, options_.max_det, options_.agnostic};
    const std::vector<std::int32_t>& best = head.kind == HeadKind::end2end
                                                ? workspace->nms.order(found, options_.max_det)
                                                : workspace->nms.run(found, nms, isa);
    for (const std::int32_t i : best) keep(static_cast<std::size_t>(i));
    to_source(geometry, results.boxes.data(), static_cast<int>(results.size()));
    return workspace;
}

}  // namespace edgeyolo
