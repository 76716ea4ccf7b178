// One pixel of the letterboxed frame, from a frame that is interleaved RGB or NV12: the part that the GPU kernel and
// its host twin share. The resampling itself is letterbox_math.hpp, the same as on the CPU.
#pragma once
#include <cstdint>
#include "frame_block.hpp"
#include "host_device.hpp"
#include "letterbox_math.hpp"
#include "yuv_math.hpp"

namespace edgeyolo {

// The pixels that a FrameBlock names, by pointers that are good where the code runs.
struct Picture {
    const std::uint8_t* pixels;
    const std::uint8_t* chroma;
    std::int64_t row_stride, chroma_stride;
    int pixel_stride, red, green, blue;
    YuvCoefficients yuv;
};

EDGEYOLO_HD inline Picture make_picture(const FrameBlock& block, const void* pixels, const void* chroma) {
    return {static_cast<const std::uint8_t*>(pixels),
            static_cast<const std::uint8_t*>(chroma),
            block.row_stride,
            block.chroma_stride,
            block.pixel_stride,
            block.red,
            block.green,
            block.blue,
            yuv_coefficients(block.matrix)};
}

// One row of the frame.
struct SourceRow {
    const std::uint8_t* pixels;
    const std::uint8_t* chroma;  // NV12 only
};

EDGEYOLO_HD inline SourceRow source_row(const Picture& picture, int y) {
    return {picture.pixels + y * picture.row_stride, picture.chroma + (y >> 1) * picture.chroma_stride};
}

template <FrameLayout layout>
EDGEYOLO_HD inline Rgb fetch(const Picture& picture, const SourceRow& row, int x) {
    if (layout == FrameLayout::nv12) {
        const std::uint8_t* uv = row.chroma + (x & ~1);
        return yuv_to_rgb(row.pixels[x], uv[0], uv[1], picture.yuv);
    }
    const std::uint8_t* pixel = row.pixels + x * picture.pixel_stride;
    return {pixel[picture.red], pixel[picture.green], pixel[picture.blue]};
}

EDGEYOLO_HD inline Rgb blend_columns(const Rgb& a, const Rgb& b, const Taps& column) {
    return {blend_columns(a.red, b.red, column.first_weight, column.second_weight),
            blend_columns(a.green, b.green, column.first_weight, column.second_weight),
            blend_columns(a.blue, b.blue, column.first_weight, column.second_weight)};
}

EDGEYOLO_HD inline Rgb blend_rows(const Rgb& a, const Rgb& b, const Taps& row) {
    return {blend_rows(a.red, b.red, row.first_weight, row.second_weight),
            blend_rows(a.green, b.green, row.first_weight, row.second_weight),
            blend_rows(a.blue, b.blue, row.first_weight, row.second_weight)};
}

EDGEYOLO_HD inline Rgb mean_of_four(const Rgb& a, const Rgb& b, const Rgb& c, const Rgb& d) {
    return {mean_of_four(a.red, b.red, c.red, d.red), mean_of_four(a.green, b.green, c.green, d.green),
            mean_of_four(a.blue, b.blue, c.blue, d.blue)};
}

// `half`: is_half() of the two sizes. A tap without weight is not fetched; it would add nothing.
template <FrameLayout layout>
EDGEYOLO_HD inline Rgb sample(const Picture& picture, const SourceRow& upper_row, const SourceRow& lower_row,
                              const Taps& column, const Taps& row, bool half) {
    const Rgb a = fetch<layout>(picture, upper_row, column.first);
    const Rgb b = column.second_weight ? fetch<layout>(picture, upper_row, column.second) : a;
    const bool below = half || row.second_weight;
    const Rgb c = below ? fetch<layout>(picture, lower_row, column.first) : a;
    const Rgb d = below && column.second_weight ? fetch<layout>(picture, lower_row, column.second) : c;
    if (half) return mean_of_four(a, b, c, d);
    return blend_rows(blend_columns(a, b, column), blend_columns(c, d, column), row);
}

// value / 255 for 0..255 with one rounding, as to_unit() of letterbox_math.hpp, and cheaper than a division: the
// product with the first three bytes of 1/255 = 0x1.010101...p-8 is exact, so that only the sum rounds. (No FMA.)
EDGEYOLO_HD inline float unit_value(int value) {
    const auto number = static_cast<float>(value);
    return number * 0x1.0101p-8f + number * 0x1.010102p-32f;
}

}  // namespace edgeyolo
