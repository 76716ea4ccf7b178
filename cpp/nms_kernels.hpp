// The inner loop of NMS: does any kept box drop this candidate?
#pragma once
#include "box_math.hpp"
#include "simd.hpp"

namespace edgeyolo {

// Eight kept boxes side by side, one lane each. A lane without a box holds zeros: a point, which overlaps nothing, so
// that the kernels need no tail.
struct BoxBlock {
    static constexpr int lanes = 8;
    float x1[lanes], y1[lanes], x2[lanes], y2[lanes], area[lanes];

    void set(int lane, const Box& box, float box_area);
};

// Whether overlaps() holds between `box` and any lane of `count` blocks.
using OverlapsAny = bool (*)(const BoxBlock* blocks, int count, const Box& box, float box_area, float threshold);

// Throws InvalidInput for an instruction set that this build does not have.
OverlapsAny overlaps_any(Isa isa);

}  // namespace edgeyolo
