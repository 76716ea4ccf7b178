// The formulas of decode and NMS, shared by the CPU and the GPU kernels so that both give the same bits.
// All arithmetic is float32 and in this order; compile without contraction to FMA (-ffp-contract=off, --fmad=false)
// and without fast-math.
#pragma once
#include "host_device.hpp"

namespace edgeyolo {

struct Box {
    float x1, y1, x2, y2;
};

EDGEYOLO_HD inline Box corners(float cx, float cy, float w, float h) {
    return {cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2};
}

// Infinity minus itself is NaN.
EDGEYOLO_HD inline bool is_finite(float value) {
    return value - value == 0.f;
}

// Whether a network's box is one: finite, and no side inverted (a negative width or height). A box without area is one.
EDGEYOLO_HD inline bool is_box(const Box& box) {
    return is_finite(box.x1) && is_finite(box.y1) && is_finite(box.x2) && is_finite(box.y2) &&  //
           box.x1 <= box.x2 && box.y1 <= box.y2;
}

// Whether a best class score makes an anchor a candidate. False for NaN and for infinity.
EDGEYOLO_HD inline bool is_candidate(float score, float conf) {
    return score > conf && is_finite(score);
}

// Whether the class column of an end2end row holds an integer in [0, classes). False for NaN.
EDGEYOLO_HD inline bool is_class_id(float value, int classes) {
    return value >= 0.f && value < static_cast<float>(classes) && static_cast<float>(static_cast<int>(value)) == value;
}

// Of a box as is_box() has it never negative. As in torchvision it is signed, so inverted ones would be.
EDGEYOLO_HD inline float area(const Box& box) {
    return (box.x2 - box.x1) * (box.y2 - box.y1);
}

// Whether the IoU of two boxes is strictly above the threshold. Symmetric in its boxes. Two boxes without area give
// 0 / 0 = NaN, which is not above anything, so such boxes never drop each other.
EDGEYOLO_HD inline bool overlaps(const Box& a, float area_a, const Box& b, float area_b, float threshold) {
    const float left = a.x1 > b.x1 ? a.x1 : b.x1;
    const float top = a.y1 > b.y1 ? a.y1 : b.y1;
    const float right = a.x2 < b.x2 ? a.x2 : b.x2;
    const float bottom = a.y2 < b.y2 ? a.y2 : b.y2;
    const float w = right - left > 0.f ? right - left : 0.f;
    const float h = bottom - top > 0.f ? bottom - top : 0.f;
    const float inter = w * h;
    return inter / (area_a + area_b - inter) > threshold;
}

}  // namespace edgeyolo
