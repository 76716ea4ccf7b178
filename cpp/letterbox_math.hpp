// The arithmetic of the letterbox, for the host and the device: one home, so that every kernel gives the same picture.
//
// It is what OpenCV 4 and 5 compute for INTER_LINEAR on uint8. Each axis takes two source pixels with weights of 11
// bits. Columns are blended first and lose 4 bits, so that a blended value (at most 255 * 2048 / 16 = 32640) fits an
// int16; rows are blended after. The bits that are dropped on the way are part of the result: no step may be merged or
// reordered. Compile without FMA contraction (-ffp-contract=off, nvcc --fmad=false): a fused `position` rounds to other
// weights.
#pragma once
#include <cmath>
#include "host_device.hpp"
#include "image.hpp"

namespace edgeyolo {

constexpr int kWeightOne = 2048;  // weights of a pair add up to this, give or take the rounding of each
constexpr int kBorder = 114;

// The two source pixels that one output pixel is made from, along one axis, and their weights, 0..kWeightOne.
struct Taps {
    int first;
    int second;
    int first_weight;
    int second_weight;
};

// Source pixels per output pixel. Two divisions, not source / resized: OpenCV inverts its inverse scale.
EDGEYOLO_HD inline double axis_step(int source, int resized) {
    return 1.0 / (static_cast<double>(resized) / source);
}

EDGEYOLO_HD inline int clamp_index(int index, int size) {
    return index < 0 ? 0 : index < size ? index : size - 1;
}

// Rounds to the nearest, half to even.
EDGEYOLO_HD inline int weight_of(float share) {
    return static_cast<int>(::lrintf(share * static_cast<float>(kWeightOne)));
}

// Output row `index`. Outside the picture both taps are the edge row, and each keeps its weight.
EDGEYOLO_HD inline Taps row_taps(int index, int source, double step) {
    const float position = static_cast<float>((index + 0.5) * step - 0.5);
    const float below = ::floorf(position);
    const int first = static_cast<int>(below);
    const float share = position - below;
    return {clamp_index(first, source), clamp_index(first + 1, source), weight_of(1.f - share), weight_of(share)};
}

// Output column `index`. Outside the picture the edge column has all the weight; this rounds differently from rows.
EDGEYOLO_HD inline Taps column_taps(int index, int source, double step) {
    const float position = static_cast<float>((index + 0.5) * step - 0.5);
    const float below = ::floorf(position);
    const int first = static_cast<int>(below);
    if (first < 0) return {0, clamp_index(1, source), kWeightOne, 0};
    if (first >= source - 1) return {source - 1, source - 1, kWeightOne, 0};
    const float share = position - below;
    return {first, first + 1, weight_of(1.f - share), weight_of(share)};
}

// Two neighbours in a row, each 0..255 -> 0..32640.
EDGEYOLO_HD inline int blend_columns(int first, int second, int first_weight, int second_weight) {
    return (first * first_weight + second * second_weight) >> 4;
}

// Two blended values above each other, each 0..32640 -> 0..255.
EDGEYOLO_HD inline int blend_rows(int first, int second, int first_weight, int second_weight) {
    return (((first * first_weight) >> 16) + ((second * second_weight) >> 16) + 2) >> 2;
}

// Exactly half the size on both axes: OpenCV takes the mean of the four pixels instead (which rounds differently).
EDGEYOLO_HD inline bool is_half(Size source, Size resized) {
    return source.width == 2 * resized.width && source.height == 2 * resized.height;
}
EDGEYOLO_HD inline int mean_of_four(int a, int b, int c, int d) {
    return (a + b + c + d + 2) >> 2;
}

// 0..255 -> 0..1. A true division: the product with 1/255 differs in the last bit.
EDGEYOLO_HD inline float to_unit(int value) {
    return static_cast<float>(value) / 255.f;
}

}  // namespace edgeyolo
