// The NEON kernels, for AArch64, where NEON is always there.
#include "letterbox_kernels.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <cstring>

namespace edgeyolo::letterbox_kernels {
namespace {

// Four pairs, one vector per channel: (first, second) as int16, pair after pair.
template <int Channels>
struct Pairs {
    int16x8_t channel[Channels];
};

// Table lookups that take one channel of four pairs, each in 8 bytes, apart into int16. 255 gives a zero byte.
struct Lookups {
    uint8x16_t channel[3];
};

inline Lookups make_lookups(const PixelLayout& pixel) {
    Lookups lookups;
    for (int c = 0; c < 3; ++c) {
        std::uint8_t index[16];
        for (int lane = 0; lane < 8; ++lane) {
            const int pair = lane / 2, tap = lane % 2;
            index[2 * lane] = static_cast<std::uint8_t>(8 * pair + tap * pixel.bytes + pixel.rgb[c]);
            index[2 * lane + 1] = 255;
        }
        lookups.channel[c] = vld1q_u8(index);
    }
    return lookups;
}

// How a row is read: near its end only the bytes of the pair itself may be touched.
enum class Reach {
    roomy,
    exact
};

template <Reach R>
inline uint8x8_t load_pair(const std::uint8_t* at, int pair_bytes) {
    if (R == Reach::roomy) return vld1_u8(at);
    // Two loads of four bytes that overlap.
    std::uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + pair_bytes - 4, 4);
    return vcreate_u8(low | static_cast<std::uint64_t>(high >> (8 * (8 - pair_bytes))) << 32);
}

template <Reach R>
inline Pairs<3> load_colour(const std::uint8_t* row, const std::int32_t* offset, const Lookups& lookups,
                            int pair_bytes) {
    const uint8x16x2_t bytes{
        {vcombine_u8(load_pair<R>(row + offset[0], pair_bytes), load_pair<R>(row + offset[1], pair_bytes)),
         vcombine_u8(load_pair<R>(row + offset[2], pair_bytes), load_pair<R>(row + offset[3], pair_bytes))}};
    Pairs<3> pairs;
    for (int c = 0; c < 3; ++c) pairs.channel[c] = vreinterpretq_s16_u8(vqtbl2q_u8(bytes, lookups.channel[c]));
    return pairs;
}

inline Pairs<1> load_grey(const std::uint8_t* row, const std::int32_t* offset) {
    std::uint8_t bytes[8];
    for (int i = 0; i < 4; ++i) std::memcpy(bytes + 2 * i, row + offset[i], 2);
    return {{vreinterpretq_s16_u16(vmovl_u8(vld1_u8(bytes)))}};
}

template <int Channels, Reach R>
inline Pairs<Channels> load_pairs(const std::uint8_t* row, const std::int32_t* offset, const Lookups& lookups,
                                  int pair_bytes) {
    if constexpr (Channels == 1) {
        return load_grey(row, offset);
    } else {
        return load_colour<R>(row, offset, lookups, pair_bytes);
    }
}

// first * weight + second * weight for four pairs.
inline int32x4_t weigh(int16x8_t pairs, int16x8_t weights) {
    return vpaddq_s32(vmull_s16(vget_low_s16(pairs), vget_low_s16(weights)), vmull_high_s16(pairs, weights));
}

// The first `count` of four values, as floats in [0, 1].
inline void store_unit(float* out, uint32x4_t values, int count) {
    const float32x4_t value = vcvtq_f32_u32(values);
    const float32x4_t unit = vaddq_f32(vmulq_n_f32(value, kUnitHigh), vmulq_n_f32(value, kUnitLow));
    if (count >= 4) {
        vst1q_f32(out, unit);
    } else if (count > 0) {
        float whole[4];
        vst1q_f32(whole, unit);
        std::memcpy(out, whole, static_cast<std::size_t>(count) * sizeof(float));
    }
}

template <int Channels, Reach R>
inline void pick_range(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, int begin, int end,
                       const OutputRows& out) {
    const Lookups lookups = make_lookups(pixel);
    for (int x = begin; x < end; x += 4) {
        const auto pairs = load_pairs<Channels, R>(row.bytes, columns.offset + x, lookups, pixel.pair_bytes());
        const int16x8_t weights = vld1q_s16(columns.weights + 2 * x);
        for (int c = 0; c < Channels; ++c) {
            const uint32x4_t value = vreinterpretq_u32_s32(vshrq_n_s32(weigh(pairs.channel[c], weights), 11));
            store_unit(out.plane[c] + x, value, columns.count - x);
        }
    }
}

template <int Channels, Reach R>
inline void mean_range(const SourceRow& upper, const SourceRow& lower, const PixelLayout& pixel, const Columns& columns,
                       int begin, int end, const OutputRows& out) {
    const Lookups lookups = make_lookups(pixel);
    for (int x = begin; x < end; x += 4) {
        const auto above = load_pairs<Channels, R>(upper.bytes, columns.offset + x, lookups, pixel.pair_bytes());
        const auto below = load_pairs<Channels, R>(lower.bytes, columns.offset + x, lookups, pixel.pair_bytes());
        for (int c = 0; c < Channels; ++c) {
            const uint16x8_t sums = vreinterpretq_u16_s16(vaddq_s16(above.channel[c], below.channel[c]));
            store_unit(out.plane[c] + x, vrshrq_n_u32(vpaddlq_u16(sums), 2), columns.count - x);
        }
    }
}

template <int Channels, Reach R>
inline void blend_range(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, int begin, int end,
                        std::int16_t* blended) {
    const Lookups lookups = make_lookups(pixel);
    for (int x = begin; x < end; x += 8) {
        const auto left = load_pairs<Channels, R>(row.bytes, columns.offset + x, lookups, pixel.pair_bytes());
        const auto right = load_pairs<Channels, R>(row.bytes, columns.offset + x + 4, lookups, pixel.pair_bytes());
        const int16x8_t left_weights = vld1q_s16(columns.weights + 2 * x);
        const int16x8_t right_weights = vld1q_s16(columns.weights + 2 * x + 8);
        for (int c = 0; c < Channels; ++c) {
            vst1q_s16(blended + c * columns.padded + x,
                      vcombine_s16(vshrn_n_s32(weigh(left.channel[c], left_weights), 4),
                                   vshrn_n_s32(weigh(right.channel[c], right_weights), 4)));
        }
    }
}

void pick(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, const OutputRows& out) {
    if (pixel.channels() == 1) return pick_range<1, Reach::exact>(row, pixel, columns, 0, columns.padded, out);
    pick_range<3, Reach::roomy>(row, pixel, columns, 0, columns.roomy, out);
    pick_range<3, Reach::exact>(row, pixel, columns, columns.roomy, columns.padded, out);
}

void mean(const SourceRow& upper, const SourceRow& lower, const PixelLayout& pixel, const Columns& columns,
          const OutputRows& out) {
    if (pixel.channels() == 1) return mean_range<1, Reach::exact>(upper, lower, pixel, columns, 0, columns.padded, out);
    mean_range<3, Reach::roomy>(upper, lower, pixel, columns, 0, columns.roomy, out);
    mean_range<3, Reach::exact>(upper, lower, pixel, columns, columns.roomy, columns.padded, out);
}

void blend_one_row(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, std::int16_t* blended) {
    if (pixel.channels() == 1) return blend_range<1, Reach::exact>(row, pixel, columns, 0, columns.padded, blended);
    blend_range<3, Reach::roomy>(row, pixel, columns, 0, columns.roomy, blended);
    blend_range<3, Reach::exact>(row, pixel, columns, columns.roomy, columns.padded, blended);
}

// (value * weight) >> 16 for eight blended values.
inline uint16x8_t weigh_blended(int16x8_t values, std::int16_t weight) {
    return vreinterpretq_u16_s16(vcombine_s16(vshrn_n_s32(vmull_n_s16(vget_low_s16(values), weight), 16),
                                              vshrn_n_s32(vmull_high_n_s16(values, weight), 16)));
}

void blend_two_rows(const std::int16_t* upper, const std::int16_t* lower, const Taps& taps, const PixelLayout& pixel,
                    const Columns& columns, const OutputRows& out) {
    const auto upper_weight = static_cast<std::int16_t>(taps.first_weight);
    const auto lower_weight = static_cast<std::int16_t>(taps.second_weight);
    for (int x = 0; x < columns.count; x += 8) {
        for (int c = 0; c < pixel.channels(); ++c) {
            const int at = c * columns.padded + x;
            const uint16x8_t sum = vaddq_u16(weigh_blended(vld1q_s16(upper + at), upper_weight),
                                             weigh_blended(vld1q_s16(lower + at), lower_weight));
            const uint16x8_t value = vrshrq_n_u16(sum, 2);
            store_unit(out.plane[c] + x, vmovl_u16(vget_low_u16(value)), columns.count - x);
            store_unit(out.plane[c] + x + 4, vmovl_high_u16(value), columns.count - x - 4);
        }
    }
}

}  // namespace

const Kernels neon{pick, mean, blend_one_row, blend_two_rows};

}  // namespace edgeyolo::letterbox_kernels
#endif
