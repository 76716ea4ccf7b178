#include "nms_kernels.hpp"

#include <string>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include "error.hpp"

namespace edgeyolo {

void BoxBlock::set(int lane, const Box& box, float box_area) {
    x1[lane] = box.x1;
    y1[lane] = box.y1;
    x2[lane] = box.x2;
    y2[lane] = box.y2;
    area[lane] = box_area;
}

namespace {

bool overlaps_any_scalar(const BoxBlock* blocks, int count, const Box& box, float box_area, float threshold) {
    for (const BoxBlock* b = blocks; b != blocks + count; ++b)
        for (int i = 0; i < BoxBlock::lanes; ++i)
            if (overlaps({b->x1[i], b->y1[i], b->x2[i], b->y2[i]}, b->area[i], box, box_area, threshold)) return true;
    return false;
}

// The vector versions are overlaps() operation by operation. Where nothing intersects (most blocks) the division is
// left out: the IoU is then 0 or NaN, which is above no threshold.

#if defined(__x86_64__)

__attribute__((target("avx2"))) bool overlaps_any_avx2(const BoxBlock* blocks, int count, const Box& box,
                                                       float box_area, float threshold) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 x1 = _mm256_set1_ps(box.x1);
    const __m256 y1 = _mm256_set1_ps(box.y1);
    const __m256 x2 = _mm256_set1_ps(box.x2);
    const __m256 y2 = _mm256_set1_ps(box.y2);
    for (const BoxBlock* b = blocks; b != blocks + count; ++b) {
        const __m256 left = _mm256_max_ps(_mm256_loadu_ps(b->x1), x1);
        const __m256 top = _mm256_max_ps(_mm256_loadu_ps(b->y1), y1);
        const __m256 right = _mm256_min_ps(_mm256_loadu_ps(b->x2), x2);
        const __m256 bottom = _mm256_min_ps(_mm256_loadu_ps(b->y2), y2);
        const __m256 w = _mm256_max_ps(_mm256_sub_ps(right, left), zero);
        const __m256 h = _mm256_max_ps(_mm256_sub_ps(bottom, top), zero);
        const __m256 inter = _mm256_mul_ps(w, h);
        if (_mm256_movemask_ps(_mm256_cmp_ps(inter, zero, _CMP_GT_OQ)) == 0) continue;
        const __m256 areas = _mm256_add_ps(_mm256_loadu_ps(b->area), _mm256_set1_ps(box_area));
        const __m256 iou = _mm256_div_ps(inter, _mm256_sub_ps(areas, inter));
        if (_mm256_movemask_ps(_mm256_cmp_ps(iou, _mm256_set1_ps(threshold), _CMP_GT_OQ)) != 0) return true;
    }
    return false;
}

#elif defined(__aarch64__)

// Lanes [from, from + 4) of one block: all ones where the IoU is above the threshold.
inline uint32x4_t overlap_neon(const BoxBlock& b, int from, const Box& box, float box_area, float threshold) {
    const float32x4_t zero = vdupq_n_f32(0.f);
    const float32x4_t left = vmaxq_f32(vld1q_f32(b.x1 + from), vdupq_n_f32(box.x1));
    const float32x4_t top = vmaxq_f32(vld1q_f32(b.y1 + from), vdupq_n_f32(box.y1));
    const float32x4_t right = vminq_f32(vld1q_f32(b.x2 + from), vdupq_n_f32(box.x2));
    const float32x4_t bottom = vminq_f32(vld1q_f32(b.y2 + from), vdupq_n_f32(box.y2));
    const float32x4_t w = vmaxq_f32(vsubq_f32(right, left), zero);
    const float32x4_t h = vmaxq_f32(vsubq_f32(bottom, top), zero);
    const float32x4_t inter = vmulq_f32(w, h);
    const uint32x4_t intersects = vcgtq_f32(inter, zero);
    if (vmaxvq_u32(intersects) == 0) return intersects;
    const float32x4_t areas = vaddq_f32(vld1q_f32(b.area + from), vdupq_n_f32(box_area));
    const float32x4_t iou = vdivq_f32(inter, vsubq_f32(areas, inter));
    return vcgtq_f32(iou, vdupq_n_f32(threshold));
}

bool overlaps_any_neon(const BoxBlock* blocks, int count, const Box& box, float box_area, float threshold) {
    for (const BoxBlock* b = blocks; b != blocks + count; ++b) {
        const uint32x4_t low = overlap_neon(*b, 0, box, box_area, threshold);
        const uint32x4_t high = overlap_neon(*b, 4, box, box_area, threshold);
        if (vmaxvq_u32(vorrq_u32(low, high)) != 0) return true;
    }
    return false;
}

#endif

}  // namespace

OverlapsAny overlaps_any(Isa isa) {
    if (isa == Isa::scalar) return overlaps_any_scalar;
#if defined(__x86_64__)
    if (isa == Isa::avx2) return overlaps_any_avx2;
#elif defined(__aarch64__)
    if (isa == Isa::neon) return overlaps_any_neon;
#endif
    throw InvalidInput(std::string("this build has no ") + name(isa) + " kernels: use best_isa()");
}

}  // namespace edgeyolo
