// Inputs for tests of the GPU kernels: pictures and network outputs, random and adversarial, all seeded.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>
#include "decode.hpp"
#include "image.hpp"

namespace edgeyolo::cases {

inline std::vector<std::uint8_t> random_bytes(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(count);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() >> 24);
    return bytes;
}

// What makes a head hard.
enum class Trouble {
    none,
    crowd,      // every anchor is a candidate, and boxes overlap a lot
    ties,       // few distinct scores, so that the order hangs on the index
    not_finite  // NaN and infinity in scores and boxes
};

struct HeadCase {
    Head head;
    Trouble trouble = Trouble::none;
    double objects = 0.03;  // share of anchors with a high score
    unsigned seed = 0;
};

// A head as it lies in memory. Coordinates fit a 640 x 640 input.
inline std::vector<float> make_head(const HeadCase& c) {
    std::mt19937 random(c.seed);
    std::uniform_real_distribution<float> unit(0.f, 1.f);
    const Head& head = c.head;
    std::vector<float> data(element_count(head));
    const bool end2end = head.kind == HeadKind::end2end;
    const int before = head.kind == HeadKind::yolov5 ? 5 : 4;
    const int columns = end2end ? 6 : before + head.classes;
    const auto at = [&](int row, int column) -> float& {
        const bool by_column = head.kind == HeadKind::raw;
        return data[by_column ? static_cast<std::size_t>(column) * static_cast<std::size_t>(head.rows) +
                                    static_cast<std::size_t>(row)
                              : static_cast<std::size_t>(row) * static_cast<std::size_t>(columns) +
                                    static_cast<std::size_t>(column)];
    };
    const float spread = c.trouble == Trouble::crowd ? 120.f : 600.f;
    const auto class_score = [&](float high) {
        const float score = high * unit(random);
        return c.trouble == Trouble::ties ? std::round(score * 8.f) / 8.f : score;
    };
    for (int row = 0; row < head.rows; ++row) {
        const float x = 20.f + spread * unit(random), y = 20.f + spread * unit(random);
        const float w = 100.f * unit(random), h = 100.f * unit(random);
        const bool object = c.trouble == Trouble::crowd || unit(random) < static_cast<float>(c.objects);
        if (end2end) {
            const float values[] = {x - w / 2,
                                    y - h / 2,
                                    x + w / 2,
                                    y + h / 2,
                                    class_score(object ? 1.f : 0.2f),
                                    std::floor(unit(random) * static_cast<float>(head.classes))};
            for (int i = 0; i < 6; ++i) at(row, i) = values[i];
            continue;
        }
        const float values[] = {x, y, w, h};
        for (int i = 0; i < 4; ++i) at(row, i) = values[i];
        if (before == 5) at(row, 4) = object ? 0.5f + 0.5f * unit(random) : 0.1f * unit(random);
        for (int k = 0; k < head.classes; ++k) at(row, before + k) = class_score(object || before == 5 ? 1.f : 0.2f);
    }
    if (c.trouble != Trouble::not_finite) return data;
    constexpr float inf = std::numeric_limits<float>::infinity();
    constexpr float nan = std::numeric_limits<float>::quiet_NaN();
    constexpr float big = 60000.f;  // finite in float16, and its area is not
    const float bad[] = {nan, inf, -inf, big, -big, 0.f, -0.f};
    for (int row = 0; row < head.rows; ++row) {
        if (unit(random) > 0.3f) continue;
        const int count = 1 + static_cast<int>(unit(random) * 3.f);
        for (int i = 0; i < count; ++i)
            at(row, static_cast<int>(random() % static_cast<unsigned>(columns))) = bad[random() % 7];
        if (random() % 8 == 0)
            for (int k = before; k < columns; ++k) at(row, k) = nan;
    }
    return data;
}

}  // namespace edgeyolo::cases
