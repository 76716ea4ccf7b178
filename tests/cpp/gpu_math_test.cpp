// The formulas that the GPU kernels have beyond those of the CPU code: YUV, float16, the unit value.
#include <gtest/gtest.h>
#include <array>
#include <cmath>
#include <limits>
#include "half_math.hpp"
#include "letterbox_sample.hpp"
#include "yuv_math.hpp"

namespace edgeyolo {
namespace {

TEST(YuvMath, KnownColours) {
    const auto of = [](int y, int u, int v, YuvMatrix matrix) {
        const Rgb rgb = yuv_to_rgb(y, u, v, yuv_coefficients(matrix));
        return std::array<int, 3>{rgb.red, rgb.green, rgb.blue};
    };
    using Colour = std::array<int, 3>;
    for (const YuvMatrix matrix : {YuvMatrix::bt601, YuvMatrix::bt709}) {
        EXPECT_EQ(of(16, 128, 128, matrix), (Colour{0, 0, 0}));
        EXPECT_EQ(of(0, 128, 128, matrix), (Colour{0, 0, 0}));
        EXPECT_EQ(of(235, 128, 128, matrix), (Colour{255, 255, 255}));
        EXPECT_EQ(of(255, 128, 128, matrix), (Colour{255, 255, 255}));
        EXPECT_EQ(of(126, 128, 128, matrix), (Colour{128, 128, 128}));
    }
    // Pure red, in each standard's own coding.
    EXPECT_EQ(of(81, 90, 240, YuvMatrix::bt601), (Colour{254, 0, 0}));
    EXPECT_EQ(of(63, 102, 240, YuvMatrix::bt709), (Colour{255, 1, 0}));
}

TEST(HalfMath, AllHalvesAndTheRoundingBetweenThem) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<std::uint16_t>(bits);
        const int exponent = half >> 10 & 31, fraction = half & 1023;
        const double sign = half & 0x8000 ? -1. : 1.;
        const float value = half_to_float(half);
        if (exponent == 31 && fraction != 0) {
            EXPECT_TRUE(std::isnan(value));
            EXPECT_TRUE(std::isnan(half_to_float(float_to_half(value))));
            continue;
        }
        const double exact = exponent == 31  ? std::numeric_limits<double>::infinity()
                             : exponent == 0 ? std::ldexp(fraction, -24)
                                             : std::ldexp(1024 + fraction, exponent - 25);
        ASSERT_EQ(value, sign * exact) << bits;
        ASSERT_EQ(float_to_half(value), half);
        if ((half & 0x7fff) >= 0x7bff) continue;
        // Halfway to the next one goes to the even one, a little to either side goes there.
        const auto next = static_cast<std::uint16_t>(half + 1);
        const float middle = (value + half_to_float(next)) / 2;
        ASSERT_EQ(float_to_half(middle), half % 2 == 0 ? half : next) << bits;
        ASSERT_EQ(float_to_half(std::nextafter(middle, value)), half) << bits;
        ASSERT_EQ(float_to_half(std::nextafter(middle, half_to_float(next))), next) << bits;
    }
    EXPECT_EQ(float_to_half(65519.996f), 0x7bff);
    EXPECT_EQ(float_to_half(65520.f), 0x7c00);
    EXPECT_EQ(float_to_half(-1e30f), 0xfc00);
    EXPECT_EQ(float_to_half(1e-30f), 0);
}

TEST(LetterboxSample, UnitValuesAreTheDivision) {
    for (int value = 0; value < 256; ++value) EXPECT_EQ(unit_value(value), static_cast<float>(value) / 255.f);
}

}  // namespace
}  // namespace edgeyolo
