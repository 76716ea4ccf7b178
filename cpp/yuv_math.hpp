// YUV of 8 bits and limited range (Y 16..235, U and V 16..240) to RGB, in integers, for the host and the device.
//
//   R = 255/219 (Y - 16)                             + 255/112 (1 - kr) (V - 128)
//   B = 255/219 (Y - 16) + 255/112 (1 - kb) (U - 128)
//   G = what is left of Y: kr R + kg G + kb B = 255/219 (Y - 16), kg = 1 - kr - kb
//
// with kr, kb of ITU-R BT.601 (0.299, 0.114) or BT.709 (0.2126, 0.0722), as fixed point of 20 bits, rounded once at the
// end and clamped. For BT.601 the coefficients are those of OpenCV (1.164, 1.596, ...), a little rounder, so that the
// picture equals cv::cvtColor(COLOR_YUV2RGB_NV12) byte for byte. One U, V pair serves its 2x2 pixels.
#pragma once
#include <cstdint>
#include "frame_block.hpp"
#include "host_device.hpp"

namespace edgeyolo {

struct Rgb {
    int red, green, blue;  // 0..255
};

struct YuvCoefficients {
    int luma, red_v, green_u, green_v, blue_u;  // times 2^20
};

EDGEYOLO_HD inline YuvCoefficients yuv_coefficients(YuvMatrix matrix) {
    if (matrix == YuvMatrix::bt709) return {1220945, 1879825, -223607, -558796, 2215014};
    return {1220542, 1673527, -409993, -852492, 2116026};
}

EDGEYOLO_HD inline int clamp_byte(int value) {
    return value < 0 ? 0 : value > 255 ? 255 : value;
}

EDGEYOLO_HD inline Rgb yuv_to_rgb(int luma, int u, int v, const YuvCoefficients& k) {
    constexpr int shift = 20;
    // At most 239 * 1.17 + 127 * 2.12, times 2^20: fits an int. A Y below black counts as black.
    const int base = (luma > 16 ? luma - 16 : 0) * k.luma + (1 << (shift - 1));
    u -= 128;
    v -= 128;
    return {clamp_byte((base + k.red_v * v) >> shift), clamp_byte((base + k.green_u * u + k.green_v * v) >> shift),
            clamp_byte((base + k.blue_u * u) >> shift)};
}

}  // namespace edgeyolo
