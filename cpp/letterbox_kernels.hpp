// The inner loops of the CPU letterbox: one row at a time, once per instruction set, the same bits from each.
//
// Every kernel works on pairs of neighbouring pixels, (offset, offset + pixel bytes). A pair always lies inside the
// row: at the right edge the plan moves it one pixel to the left and swaps its weights.
#pragma once
#include <cstdint>
#include "letterbox_math.hpp"

namespace edgeyolo::letterbox_kernels {

// Vector kernels take this many columns at a time, and load this many bytes for a pair.
constexpr int kBlock = 16;
constexpr int kPairLoad = 8;

// Where the output columns come from. Arrays hold `padded` columns, the last column repeated up to a multiple of
// kBlock.
struct Columns {
    const std::int32_t* offset;   // byte offset of the pair's first pixel in the row
    const std::int16_t* weights;  // two per column
    int count;
    int padded;
    int roomy;  // in the first `roomy` columns (a multiple of kBlock) kPairLoad bytes at `offset` lie inside the row
};

// The bytes of one pixel, seen from the row pointer, which points at the lowest colour byte.
struct PixelLayout {
    int bytes;   // to the next pixel: 1 (grey), 3 or 4
    int rgb[3];  // byte of red, green, blue: 0..2; grey: all 0
    int channels() const { return bytes == 1 ? 1 : 3; }
    // Bytes of a pair that may be read: a fourth channel of its second pixel may not.
    int pair_bytes() const { return bytes + 3; }
};

// A row to read, and the row that will be read after it: rows are far apart, and a large picture is not in the cache,
// so the kernels fetch the next one meanwhile. Where there is nothing to fetch, `next` is `bytes`.
struct SourceRow {
    const std::uint8_t* bytes;
    const std::uint8_t* next;
};

constexpr int kCacheLine = 64;

// Fetches the part of the next row that the columns first..last take. It is a hint: it reads nothing and cannot fault.
inline __attribute__((always_inline)) void prefetch(const SourceRow& row, const std::int32_t* first,
                                                    const std::int32_t* last) {
    for (std::int32_t at = *first; at <= *last; at += kCacheLine) __builtin_prefetch(row.next + at);
}

// The float rows that a kernel writes: red, green, blue. Grey writes the first alone.
struct OutputRows {
    float* plane[3];
};

struct Kernels {
    // The pixel of each pair that has all the weight: no resampling, or an odd whole ratio such as 3:1.
    void (*pick)(const SourceRow& row, const PixelLayout& pixel, const Columns& columns, const OutputRows& out);
    // The mean of a pair in this row and the pair in the next: exactly 2:1.
    void (*mean)(const SourceRow& upper, const SourceRow& lower, const PixelLayout& pixel, const Columns& columns,
                 const OutputRows& out);
    // The pairs of one row, blended: one plane of columns.padded values per channel (red, green, blue; or grey).
    void (*blend_columns)(const SourceRow& row, const PixelLayout& pixel, const Columns& columns,
                          std::int16_t* blended);
    // Two such rows, blended. All channels advance together: written one after the other, the rows of the three output
    // planes, which are far apart, take twice as long.
    void (*blend_rows)(const std::int16_t* upper, const std::int16_t* lower, const Taps& taps, const PixelLayout& pixel,
                       const Columns& columns, const OutputRows& out);
};

extern const Kernels scalar;
#if defined(__x86_64__)
extern const Kernels avx2;
#elif defined(__aarch64__)
extern const Kernels neon;
#endif

// value / 255, rounded once, without a division: 1/255 = 0x1.0101 0101...p-8, and value * kUnitHigh (the byte three
// times) has 24 bits, so it is exact; the sum with value * kUnitLow is the only rounding. A test compares all 256
// values.
constexpr float kUnitHigh = 0x1.0101p-8f;
constexpr float kUnitLow = 0x1.010102p-32f;

}  // namespace edgeyolo::letterbox_kernels
