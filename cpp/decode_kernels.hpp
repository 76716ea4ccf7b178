// The inner loops of decode: the highest class score of each anchor. Which class it was is asked for survivors only.
#pragma once
#include <cstddef>
#include "simd.hpp"

namespace edgeyolo {

struct DecodeKernels {
    // best[i] = the highest of scores[c * stride + i] over c in [0, classes), for i in [0, count).
    void (*column_max)(const float* scores, std::size_t stride, int classes, int count, float* best);
    // The highest of `count` scores side by side.
    float (*row_max)(const float* scores, int count);
    // Both skip NaN, and give -infinity where nothing else is left.
};

// Throws InvalidInput for an instruction set that this build does not have.
const DecodeKernels& decode_kernels(Isa isa);

}  // namespace edgeyolo
