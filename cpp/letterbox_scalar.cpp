// The reference: what every vector kernel must equal, bit for bit.
#include "letterbox_kernels.hpp"

namespace edgeyolo::letterbox_kernels {
namespace {

void pick(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, const OutputRows& out) {
    for (int channel = 0; channel < pixel.channels(); ++channel) {
        const std::uint8_t* bytes = row.bytes + pixel.rgb[channel];
        for (int x = 0; x < columns.count; ++x) {
            const int chosen = columns.weights[2 * x] ? 0 : pixel.bytes;
            out.plane[channel][x] = to_unit(bytes[columns.offset[x] + chosen]);
        }
    }
}

void mean(const SourceRow& upper, const SourceRow& lower, const PixelLayout& pixel, const Columns& columns,
          const OutputRows& out) {
    for (int channel = 0; channel < pixel.channels(); ++channel) {
        for (int x = 0; x < columns.count; ++x) {
            const std::uint8_t* a = upper.bytes + columns.offset[x] + pixel.rgb[channel];
            const std::uint8_t* b = lower.bytes + columns.offset[x] + pixel.rgb[channel];
            out.plane[channel][x] = to_unit(mean_of_four(a[0], a[pixel.bytes], b[0], b[pixel.bytes]));
        }
    }
}

void blend_one_row(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, std::int16_t* blended) {
    for (int channel = 0; channel < pixel.channels(); ++channel) {
        const std::uint8_t* bytes = row.bytes + pixel.rgb[channel];
        for (int x = 0; x < columns.padded; ++x) {
            const std::uint8_t* pair = bytes + columns.offset[x];
            const int value =
                blend_columns(pair[0], pair[pixel.bytes], columns.weights[2 * x], columns.weights[2 * x + 1]);
            *blended++ = static_cast<std::int16_t>(value);
        }
    }
}

void blend_two_rows(const std::int16_t* upper, const std::int16_t* lower, const Taps& taps, const PixelLayout& pixel,
                    const Columns& columns, const OutputRows& out) {
    for (int channel = 0; channel < pixel.channels(); ++channel) {
        for (int x = 0; x < columns.count; ++x) {
            out.plane[channel][x] = to_unit(blend_rows(upper[x], lower[x], taps.first_weight, taps.second_weight));
        }
        upper += columns.padded;
        lower += columns.padded;
    }
}

}  // namespace

const Kernels scalar{pick, mean, blend_one_row, blend_two_rows};

}  // namespace edgeyolo::letterbox_kernels
