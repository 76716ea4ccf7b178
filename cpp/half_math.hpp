// float16 <-> float32 for the host and the device, rounding to nearest even. The bits of a float16 travel as uint16.
#pragma once
#include <cstdint>
#include <cstring>
#include "host_device.hpp"
#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

namespace edgeyolo {

EDGEYOLO_HD inline std::uint32_t float_bits(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
#endif
}

EDGEYOLO_HD inline float float_from_bits(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

EDGEYOLO_HD inline float half_to_float(std::uint16_t half) {
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half(half));
#else
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // Moving the exponent from its bias of 15 to 127 by a product is exact and serves the subnormals too.
    return float_from_bits(sign | float_bits(float_from_bits(magnitude << 13) * 0x1p112f));
#endif
}

EDGEYOLO_HD inline std::uint16_t float_to_half(float value) {
#ifdef __CUDA_ARCH__
    return __half_as_ushort(__float2half_rn(value));
#else
    const std::uint32_t bits = float_bits(value);
    const auto sign = static_cast<std::uint16_t>((bits & 0x80000000u) >> 16);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;                                      // NaN as the device has it
    if (magnitude >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65536 and above
    if (magnitude < 0x38800000u) {
        // A subnormal: adding 0.5 puts its bits, rounded, at the end of the sum's fraction.
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return static_cast<std::uint16_t>(sign | (float_bits(shifted) - float_bits(0.5f)));
    }
    const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
#endif
}

EDGEYOLO_HD inline float load_float(const float* value) {
    return *value;
}
EDGEYOLO_HD inline float load_float(const std::uint16_t* value) {
    return half_to_float(*value);
}
EDGEYOLO_HD inline void store_float(float* place, float value) {
    *place = value;
}
EDGEYOLO_HD inline void store_float(std::uint16_t* place, float value) {
    *place = float_to_half(value);
}

}  // namespace edgeyolo
