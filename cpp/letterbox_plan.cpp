#include "letterbox_plan.hpp"

#include <algorithm>

namespace edgeyolo {
namespace {

// A pair of neighbours must lie inside the row: at the right edge it starts one pixel earlier, and the weights swap.
// A picture of one column is read as if it had two equal ones.
Taps pair_inside(Taps taps, int source) {
    if (taps.first == 0 || taps.first + 1 < source) return taps;
    return {taps.first - 1, taps.first, taps.second_weight, taps.first_weight};
}

void plan_columns(Plan& plan) {
    const int block = letterbox_kernels::kBlock;
    const int count = plan.resized.width, source = plan.source.width;
    const int padded = (count + block - 1) / block * block;
    const double step = axis_step(source, count);
    plan.offsets.resize(static_cast<std::size_t>(padded));
    plan.weights.resize(2 * static_cast<std::size_t>(padded));
    int roomy = 0;
    for (int x = 0; x < padded; ++x) {
        const int column = std::min(x, count - 1);
        Taps taps = pair_inside(column_taps(column, source, step), source);
        if (plan.method == Method::mean) taps.first = 2 * column;
        const auto i = static_cast<std::size_t>(x);
        plan.offsets[i] = taps.first * plan.pixel_bytes;
        plan.weights[2 * i] = static_cast<std::int16_t>(taps.first_weight);
        plan.weights[2 * i + 1] = static_cast<std::int16_t>(taps.second_weight);
        // With one more pixel after the pair, kPairLoad bytes lie inside the row: a pixel has 3 or 4.
        if (taps.first + 2 < source && roomy == x) ++roomy;
    }
    plan.roomy = roomy / block * block;
}

void plan_rows(Plan& plan) {
    const int count = plan.resized.height, source = plan.source.height;
    const double step = axis_step(source, count);
    plan.rows.resize(static_cast<std::size_t>(count));
    for (int y = 0; y < count; ++y) plan.rows[static_cast<std::size_t>(y)] = row_taps(y, source, step);
}

bool all_or_nothing(const Plan& plan) {
    const auto whole = [](int weight) { return weight == 0 || weight == kWeightOne; };
    return std::all_of(plan.weights.begin(), plan.weights.end(), whole) &&
           std::all_of(plan.rows.begin(), plan.rows.end(),
                       [&](const Taps& taps) { return whole(taps.first_weight) && whole(taps.second_weight); });
}

}  // namespace

Plan make_plan(Plan memory, Size source, Size resized, int pixel_bytes) {
    Plan plan = std::move(memory);
    plan.source = source;
    plan.resized = resized;
    plan.pixel_bytes = pixel_bytes;
    plan.method = is_half(source, resized) ? Method::mean : Method::blend;
    plan_columns(plan);
    plan_rows(plan);
    if (plan.method == Method::blend && all_or_nothing(plan)) plan.method = Method::pick;
    return plan;
}

}  // namespace edgeyolo
