#include "decode_kernels.hpp"

#include <algorithm>
#include <limits>
#include <string>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "error.hpp"

namespace edgeyolo {
namespace {

constexpr float nothing = -std::numeric_limits<float>::infinity();

// The second operand stays when the first is NaN: `best` never becomes NaN. _mm256_max_ps(score, best) does the same.
inline float higher(float score, float best) {
    return score > best ? score : best;
}

void column_max_scalar(const float* scores, std::size_t stride, int classes, int count, float* best) {
    std::fill(best, best + count, nothing);
    for (int c = 0; c < classes; ++c) {
        const float* row = scores + static_cast<std::size_t>(c) * stride;
        for (int i = 0; i < count; ++i) best[i] = higher(row[i], best[i]);
    }
}

float row_max_scalar(const float* scores, int count) {
    float best = nothing;
    for (int i = 0; i < count; ++i) best = higher(scores[i], best);
    return best;
}

// The vector versions finish an odd length with one more vector that overlaps the last but one: a maximum may be taken
// twice. column_max reads four class rows per pass, so that `best` goes through the cache once for four rows.

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256 higher_avx2(const float* score, __m256 best) {
    return _mm256_max_ps(_mm256_loadu_ps(score), best);
}

__attribute__((target("avx2"))) void column_max_avx2(const float* scores, std::size_t stride, int classes, int count,
                                                     float* best) {
    constexpr int lanes = 8;
    if (count < lanes) return column_max_scalar(scores, stride, classes, count, best);
    std::fill(best, best + count, nothing);
    int c = 0;
    for (; c + 4 <= classes; c += 4) {
        const float* row = scores + static_cast<std::size_t>(c) * stride;
        for (int at = 0; at < count; at += lanes) {
            const int i = std::min(at, count - lanes);
            __m256 high = _mm256_loadu_ps(best + i);
            high = higher_avx2(row + i, high);
            high = higher_avx2(row + stride + i, high);
            high = higher_avx2(row + 2 * stride + i, high);
            high = higher_avx2(row + 3 * stride + i, high);
            _mm256_storeu_ps(best + i, high);
        }
    }
    for (; c < classes; ++c) {
        const float* row = scores + static_cast<std::size_t>(c) * stride;
        for (int at = 0; at < count; at += lanes) {
            const int i = std::min(at, count - lanes);
            _mm256_storeu_ps(best + i, higher_avx2(row + i, _mm256_loadu_ps(best + i)));
        }
    }
}

__attribute__((target("avx2"))) float row_max_avx2(const float* scores, int count) {
    constexpr int lanes = 8;
    if (count < lanes) return row_max_scalar(scores, count);
    __m256 even = _mm256_set1_ps(nothing);
    __m256 odd = even;
    for (int at = 0; at < count; at += 2 * lanes) {
        even = higher_avx2(scores + std::min(at, count - lanes), even);
        odd = higher_avx2(scores + std::min(at + lanes, count - lanes), odd);
    }
    even = _mm256_max_ps(even, odd);
    __m128 high = _mm_max_ps(_mm256_castps256_ps128(even), _mm256_extractf128_ps(even, 1));
    high = _mm_max_ps(high, _mm_movehl_ps(high, high));
    high = _mm_max_ss(high, _mm_movehdup_ps(high));
    return _mm_cvtss_f32(high);
}

#elif defined(__aarch64__)

// Compare and select: FMAX and FMAXNM would both let some kind of NaN through.
inline float32x4_t higher_neon(const float* score, float32x4_t best) {
    const float32x4_t value = vld1q_f32(score);
    return vbslq_f32(vcgtq_f32(value, best), value, best);
}

void column_max_neon(const float* scores, std::size_t stride, int classes, int count, float* best) {
    constexpr int lanes = 4;
    if (count < lanes) return column_max_scalar(scores, stride, classes, count, best);
    std::fill(best, best + count, nothing);
    int c = 0;
    for (; c + 4 <= classes; c += 4) {
        const float* row = scores + static_cast<std::size_t>(c) * stride;
        for (int at = 0; at < count; at += lanes) {
            const int i = std::min(at, count - lanes);
            float32x4_t high = vld1q_f32(best + i);
            high = higher_neon(row + i, high);
            high = higher_neon(row + stride + i, high);
            high = higher_neon(row + 2 * stride + i, high);
            high = higher_neon(row + 3 * stride + i, high);
            vst1q_f32(best + i, high);
        }
    }
    for (; c < classes; ++c) {
        const float* row = scores + static_cast<std::size_t>(c) * stride;
        for (int at = 0; at < count; at += lanes) {
            const int i = std::min(at, count - lanes);
            vst1q_f32(best + i, higher_neon(row + i, vld1q_f32(best + i)));
        }
    }
}

float row_max_neon(const float* scores, int count) {
    constexpr int lanes = 4;
    if (count < lanes) return row_max_scalar(scores, count);
    float32x4_t even = vdupq_n_f32(nothing);
    float32x4_t odd = even;
    for (int at = 0; at < count; at += 2 * lanes) {
        even = higher_neon(scores + std::min(at, count - lanes), even);
        odd = higher_neon(scores + std::min(at + lanes, count - lanes), odd);
    }
    return vmaxvq_f32(vmaxq_f32(even, odd));  // no NaN is left here
}

#endif

}  // namespace

const DecodeKernels& decode_kernels(Isa isa) {
    static constexpr DecodeKernels scalar{column_max_scalar, row_max_scalar};
    if (isa == Isa::scalar) return scalar;
#if defined(__x86_64__)
    static constexpr DecodeKernels avx2{column_max_avx2, row_max_avx2};
    if (isa == Isa::avx2) return avx2;
#elif defined(__aarch64__)
    static constexpr DecodeKernels neon{column_max_neon, row_max_neon};
    if (isa == Isa::neon) return neon;
#endif
    throw InvalidInput(std::string("this build has no ") + name(isa) + " kernels: use best_isa()");
}

}  // namespace edgeyolo
