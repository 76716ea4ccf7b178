// The AVX2 kernels. The instruction set is asked for function by function: with a per-file -mavx2, inline functions of
// the standard library would be compiled for AVX2 too, and the linker could choose those for the whole program.
#include "letterbox_kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#include <cstring>

#define EDGEYOLO_AVX2 __attribute__((target("avx2")))
#define EDGEYOLO_AVX2_INLINE __attribute__((target("avx2"), always_inline)) inline

namespace edgeyolo::letterbox_kernels {
namespace {

// Eight pairs, one vector per channel: each 32-bit lane holds (first, second) as int16.
template <int Channels>
struct Pairs {
    __m256i channel[Channels];
};

// Byte shuffles that take two pairs in a 128-bit half apart, into int16.
struct Shuffles {
    __m256i red_green;  // red of both pairs, then green of both
    __m256i blue;       // blue of both pairs, twice
};

// Computed in registers: tables that go through memory, row by row, take 5 % of a frame's time.
EDGEYOLO_AVX2_INLINE Shuffles make_shuffles(const PixelLayout& pixel) {
    const __m128i pair = _mm_setr_epi8(0, 0, 0, 0, 8, 0, 8, 0, 0, 0, 0, 0, 8, 0, 8, 0);
    const __m128i second = _mm_setr_epi8(0, 0, -1, 0, 0, 0, -1, 0, 0, 0, -1, 0, 0, 0, -1, 0);
    const __m128i zero_byte = _mm_set1_epi16(static_cast<short>(0xFF00));
    const __m128i red = _mm_set1_epi8(static_cast<char>(pixel.rgb[0]));
    const __m128i green = _mm_set1_epi8(static_cast<char>(pixel.rgb[1]));
    const __m128i blue = _mm_set1_epi8(static_cast<char>(pixel.rgb[2]));
    const __m128i step = _mm_set1_epi8(static_cast<char>(pixel.bytes));
    const __m128i at = _mm_or_si128(_mm_add_epi8(pair, _mm_and_si128(second, step)), zero_byte);
    const __m128i red_green = _mm_add_epi8(at, _mm_and_si128(_mm_unpacklo_epi64(red, green), _mm_set1_epi16(0xFF)));
    return {_mm256_broadcastsi128_si256(red_green),
            _mm256_broadcastsi128_si256(_mm_add_epi8(at, _mm_and_si128(blue, _mm_set1_epi16(0xFF))))};
}

// How a row is read: near its end only the bytes of the pair itself may be touched.
enum class Reach {
    roomy,
    exact
};

template <Reach R>
EDGEYOLO_AVX2_INLINE long long load_pair(const std::uint8_t* at, int pair_bytes) {
    if (R == Reach::roomy) {
        long long bytes;
        std::memcpy(&bytes, at, kPairLoad);
        return bytes;
    }
    // Two loads of four bytes that overlap.
    std::uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + pair_bytes - 4, 4);
    return static_cast<long long>(low | static_cast<std::uint64_t>(high >> (8 * (8 - pair_bytes))) << 32);
}

template <Reach R>
EDGEYOLO_AVX2_INLINE __m128i load_two_pairs(const std::uint8_t* row, const std::int32_t* offset, int pair_bytes) {
    return _mm_set_epi64x(load_pair<R>(row + offset[1], pair_bytes), load_pair<R>(row + offset[0], pair_bytes));
}

// Four pairs at low[0..3] for the lower half, four at high[0..3] for the upper one.
template <Reach R>
EDGEYOLO_AVX2_INLINE Pairs<3> load_colour(const std::uint8_t* row, const std::int32_t* low, const std::int32_t* high,
                                          const Shuffles& shuffles, int pair_bytes) {
    const __m256i even = _mm256_inserti128_si256(_mm256_castsi128_si256(load_two_pairs<R>(row, low, pair_bytes)),
                                                 load_two_pairs<R>(row, high, pair_bytes), 1);
    const __m256i odd = _mm256_inserti128_si256(_mm256_castsi128_si256(load_two_pairs<R>(row, low + 2, pair_bytes)),
                                                load_two_pairs<R>(row, high + 2, pair_bytes), 1);
    const __m256i even_rg = _mm256_shuffle_epi8(even, shuffles.red_green);
    const __m256i odd_rg = _mm256_shuffle_epi8(odd, shuffles.red_green);
    const __m256i even_b = _mm256_shuffle_epi8(even, shuffles.blue);
    const __m256i odd_b = _mm256_shuffle_epi8(odd, shuffles.blue);
    return {{_mm256_unpacklo_epi64(even_rg, odd_rg), _mm256_unpackhi_epi64(even_rg, odd_rg),
             _mm256_blend_epi32(even_b, odd_b, 0xCC)}};
}

EDGEYOLO_AVX2_INLINE short load_grey_pair(const std::uint8_t* at) {
    short bytes;
    std::memcpy(&bytes, at, 2);
    return bytes;
}

EDGEYOLO_AVX2_INLINE Pairs<1> load_grey(const std::uint8_t* row, const std::int32_t* low, const std::int32_t* high) {
    const __m128i pairs =
        _mm_setr_epi16(load_grey_pair(row + low[0]), load_grey_pair(row + low[1]), load_grey_pair(row + low[2]),
                       load_grey_pair(row + low[3]), load_grey_pair(row + high[0]), load_grey_pair(row + high[1]),
                       load_grey_pair(row + high[2]), load_grey_pair(row + high[3]));
    return {{_mm256_cvtepu8_epi16(pairs)}};
}

template <int Channels, Reach R>
EDGEYOLO_AVX2_INLINE Pairs<Channels> load_pairs(const std::uint8_t* row, const std::int32_t* low,
                                                const std::int32_t* high, const Shuffles& shuffles, int pair_bytes) {
    if constexpr (Channels == 1) {
        return load_grey(row, low, high);
    } else {
        return load_colour<R>(row, low, high, shuffles, pair_bytes);
    }
}

EDGEYOLO_AVX2_INLINE __m128i load_half(const void* at) {
    return _mm_loadu_si128(static_cast<const __m128i*>(at));
}

// Weights of the columns low[0..3] and high[0..3].
EDGEYOLO_AVX2_INLINE __m256i load_weights(const std::int16_t* low, const std::int16_t* high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_half(low)), load_half(high), 1);
}

EDGEYOLO_AVX2_INLINE __m256 to_unit(__m256i values) {
    const __m256 value = _mm256_cvtepi32_ps(values);
    return _mm256_add_ps(_mm256_mul_ps(value, _mm256_set1_ps(kUnitHigh)),
                         _mm256_mul_ps(value, _mm256_set1_ps(kUnitLow)));
}

// The first `count` of eight floats.
EDGEYOLO_AVX2_INLINE void store(float* out, __m256 values, int count) {
    if (count >= 8) {
        _mm256_storeu_ps(out, values);
    } else if (count > 0) {
        float whole[8];
        _mm256_storeu_ps(whole, values);
        std::memcpy(out, whole, static_cast<std::size_t>(count) * sizeof(float));
    }
}

// The loops take small structs by value: a vector store may alias anything, so that members behind a reference would be
// loaded again after each one (15 % of a frame's time).

template <int Channels, Reach R>
EDGEYOLO_AVX2_INLINE void pick_range(SourceRow row, const PixelLayout& pixel, Columns columns, int begin, int end,
                                     OutputRows out) {
    const Shuffles shuffles = make_shuffles(pixel);
    for (int x = begin; x < end; x += 8) {
        const std::int32_t* offset = columns.offset + x;
        prefetch(row, offset, offset + 7);
        const auto pairs = load_pairs<Channels, R>(row.bytes, offset, offset + 4, shuffles, pixel.pair_bytes());
        const __m256i weights = load_weights(columns.weights + 2 * x, columns.weights + 2 * x + 8);
        for (int c = 0; c < Channels; ++c) {
            const __m256i value = _mm256_srli_epi32(_mm256_madd_epi16(pairs.channel[c], weights), 11);
            store(out.plane[c] + x, to_unit(value), columns.count - x);
        }
    }
}

template <int Channels, Reach R>
EDGEYOLO_AVX2_INLINE void mean_range(SourceRow upper, SourceRow lower, const PixelLayout& pixel, Columns columns,
                                     int begin, int end, OutputRows out) {
    const Shuffles shuffles = make_shuffles(pixel);
    const __m256i one = _mm256_set1_epi16(1), half = _mm256_set1_epi32(2);
    for (int x = begin; x < end; x += 8) {
        const std::int32_t* offset = columns.offset + x;
        prefetch(upper, offset, offset + 7);
        prefetch(lower, offset, offset + 7);
        const auto above = load_pairs<Channels, R>(upper.bytes, offset, offset + 4, shuffles, pixel.pair_bytes());
        const auto below = load_pairs<Channels, R>(lower.bytes, offset, offset + 4, shuffles, pixel.pair_bytes());
        for (int c = 0; c < Channels; ++c) {
            const __m256i sums = _mm256_madd_epi16(_mm256_add_epi16(above.channel[c], below.channel[c]), one);
            const __m256i value = _mm256_srli_epi32(_mm256_add_epi32(sums, half), 2);
            store(out.plane[c] + x, to_unit(value), columns.count - x);
        }
    }
}

template <int Channels, Reach R>
EDGEYOLO_AVX2_INLINE void blend_range(SourceRow row, const PixelLayout& pixel, Columns columns, int begin, int end,
                                      std::int16_t* blended) {
    const Shuffles shuffles = make_shuffles(pixel);
    for (int x = begin; x < end; x += kBlock) {
        // The pack below works within each half: taking columns 0-3 | 8-11 and 4-7 | 12-15 leaves them in order.
        const std::int32_t* offset = columns.offset + x;
        const std::int16_t* weights = columns.weights + 2 * x;
        prefetch(row, offset, offset + kBlock - 1);
        const auto left = load_pairs<Channels, R>(row.bytes, offset, offset + 8, shuffles, pixel.pair_bytes());
        const auto right = load_pairs<Channels, R>(row.bytes, offset + 4, offset + 12, shuffles, pixel.pair_bytes());
        const __m256i left_weights = load_weights(weights, weights + 16);
        const __m256i right_weights = load_weights(weights + 8, weights + 24);
        for (int c = 0; c < Channels; ++c) {
            const __m256i a = _mm256_srai_epi32(_mm256_madd_epi16(left.channel[c], left_weights), 4);
            const __m256i b = _mm256_srai_epi32(_mm256_madd_epi16(right.channel[c], right_weights), 4);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(blended + c * columns.padded + x), _mm256_packs_epi32(a, b));
        }
    }
}

EDGEYOLO_AVX2 void pick(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, const OutputRows& out) {
    if (pixel.channels() == 1) return pick_range<1, Reach::exact>(row, pixel, columns, 0, columns.padded, out);
    pick_range<3, Reach::roomy>(row, pixel, columns, 0, columns.roomy, out);
    pick_range<3, Reach::exact>(row, pixel, columns, columns.roomy, columns.padded, out);
}

EDGEYOLO_AVX2 void mean(const SourceRow& upper, const SourceRow& lower, const PixelLayout& pixel,
                        const Columns& columns, const OutputRows& out) {
    if (pixel.channels() == 1) return mean_range<1, Reach::exact>(upper, lower, pixel, columns, 0, columns.padded, out);
    mean_range<3, Reach::roomy>(upper, lower, pixel, columns, 0, columns.roomy, out);
    mean_range<3, Reach::exact>(upper, lower, pixel, columns, columns.roomy, columns.padded, out);
}

EDGEYOLO_AVX2 void blend_one_row(const SourceRow& row, const PixelLayout& pixel, const Columns& columns,
                                 std::int16_t* blended) {
    if (pixel.channels() == 1) return blend_range<1, Reach::exact>(row, pixel, columns, 0, columns.padded, blended);
    blend_range<3, Reach::roomy>(row, pixel, columns, 0, columns.roomy, blended);
    blend_range<3, Reach::exact>(row, pixel, columns, columns.roomy, columns.padded, blended);
}

template <int Channels>
EDGEYOLO_AVX2_INLINE void blend_planes(const std::int16_t* upper, const std::int16_t* lower, const Taps& taps,
                                       Columns columns, OutputRows out) {
    const __m256i upper_weight = _mm256_set1_epi16(static_cast<short>(taps.first_weight));
    const __m256i lower_weight = _mm256_set1_epi16(static_cast<short>(taps.second_weight));
    const __m256i half = _mm256_set1_epi16(2);
    for (int x = 0; x < columns.count; x += kBlock) {
        for (int c = 0; c < Channels; ++c) {
            const int at = c * columns.padded + x;
            const __m256i above = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(upper + at));
            const __m256i below = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lower + at));
            const __m256i sum =
                _mm256_add_epi16(_mm256_mulhi_epi16(above, upper_weight), _mm256_mulhi_epi16(below, lower_weight));
            const __m256i value = _mm256_srli_epi16(_mm256_add_epi16(sum, half), 2);
            const __m256i left = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(value));
            const __m256i right = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(value, 1));
            store(out.plane[c] + x, to_unit(left), columns.count - x);
            store(out.plane[c] + x + 8, to_unit(right), columns.count - x - 8);
        }
    }
}

EDGEYOLO_AVX2 void blend_two_rows(const std::int16_t* upper, const std::int16_t* lower, const Taps& taps,
                                  const PixelLayout& pixel, const Columns& columns, const OutputRows& out) {
    if (pixel.channels() == 1) return blend_planes<1>(upper, lower, taps, columns, out);
    blend_planes<3>(upper, lower, taps, columns, out);
}

}  // namespace

const Kernels avx2{pick, mean, blend_one_row, blend_two_rows};

}  // namespace edgeyolo::letterbox_kernels
#endif
