#include "decode.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include "allocations.hpp"
#include "decode_kernels.hpp"
#include "error.hpp"

namespace edgeyolo {
namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr float largest = std::numeric_limits<float>::max();

float from_bits(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

using Rows = std::vector<std::vector<float>>;

std::vector<float> flat(const Rows& rows) {
    std::vector<float> data;
    for (const auto& row : rows) data.insert(data.end(), row.begin(), row.end());
    return data;
}

std::vector<float> transpose(const std::vector<float>& data, std::size_t rows, std::size_t columns) {
    std::vector<float> out(data.size());
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c) out[c * rows + r] = data[r * columns + c];
    return out;
}

// Each test runs on every instruction set of this machine.
class Decode : public testing::TestWithParam<Isa> {
protected:
    // rows: one per anchor, in the order of the head's columns. Head kind raw transposes them.
    Candidates run(HeadKind kind, const Rows& rows, DecodeParams params = {}) {
        const int extra = kind == HeadKind::yolov5 ? 5 : 4;
        const auto width = rows.empty() ? std::size_t{6} : rows[0].size();
        const int classes = kind == HeadKind::end2end ? 3 : static_cast<int>(width) - extra;
        std::vector<float> data = flat(rows);
        if (kind == HeadKind::raw) data = transpose(data, rows.size(), width);
        Candidates out;
        decode(data.data(), {kind, static_cast<int>(rows.size()), classes}, params, out, GetParam());
        EXPECT_TRUE(out.x1.size() == out.size() && out.y1.size() == out.size() && out.x2.size() == out.size() &&
                    out.y2.size() == out.size() && out.class_id.size() == out.size() && out.index.size() == out.size());
        return out;
    }
};
// The same for the two heads that hold the same numbers in another order.
class DecodeRaw : public Decode {
protected:
    Candidates run_both(const Rows& rows, DecodeParams params = {}) {
        Candidates raw = run(HeadKind::raw, rows, params);
        const Candidates transposed = run(HeadKind::raw_transposed, rows, params);
        EXPECT_TRUE(same_bits(raw.x1, transposed.x1) && same_bits(raw.y1, transposed.y1) &&
                    same_bits(raw.x2, transposed.x2) && same_bits(raw.y2, transposed.y2) &&
                    same_bits(raw.score, transposed.score));
        EXPECT_EQ(raw.class_id, transposed.class_id);
        EXPECT_EQ(raw.index, transposed.index);
        return raw;
    }
};

using Floats = std::vector<float>;
using Ints = std::vector<std::int32_t>;

TEST_P(DecodeRaw, ByHand) {
    const Candidates found = run_both({{10, 20, 4, 6, 0.1f, 0.9f},  //
                                       {50, 60, 8, 2, 0.2f, 0.1f},  //
                                       {30, 40, 1, 3, 0.5f, 0.3f}});
    EXPECT_EQ(found.x1, (Floats{8, 29.5f}));
    EXPECT_EQ(found.y1, (Floats{17, 38.5f}));
    EXPECT_EQ(found.x2, (Floats{12, 30.5f}));
    EXPECT_EQ(found.y2, (Floats{23, 41.5f}));
    EXPECT_EQ(found.score, (Floats{0.9f, 0.5f}));
    EXPECT_EQ(found.class_id, (Ints{1, 0}));
    EXPECT_EQ(found.index, (Ints{0, 2}));
}

TEST_P(DecodeRaw, CornersAreRoundedOnceInFloat32) {
    // 0.1f - 0.3f/2 and 1e8f + 0.3f/2: the exact results rounded to float32, worked out in decimal.
    const Candidates found = run_both({{0.1f, 1e8f, 0.3f, 9.f, 0.9f}});
    EXPECT_EQ(found.x1, Floats{-0x1.99999cp-5f});
    EXPECT_EQ(found.x2, Floats{0.25f});
    EXPECT_EQ(found.y1, Floats{99999992.f});   // 99999995.5, halfway to neither: spacing is 8
    EXPECT_EQ(found.y2, Floats{100000008.f});  // 100000004.5
}

TEST_P(DecodeRaw, ConfIsStrict) {
    const float above = std::nextafter(0.25f, 1.f);
    const Candidates found = run_both({{1, 1, 1, 1, 0.25f, 0.f}, {1, 1, 1, 1, 0.f, above}});
    EXPECT_EQ(found.index, Ints{1});
    EXPECT_EQ(found.score, Floats{above});
    EXPECT_EQ(run_both({{1, 1, 1, 1, 0.f}, {1, 1, 1, 1, -0.f}, {1, 1, 1, 1, 1e-45f}}, {0.f, nullptr}).index, Ints{2});
    EXPECT_EQ(run_both({{1, 1, 1, 1, 1.f}}, {1.f, nullptr}).size(), 0u);
}

TEST_P(DecodeRaw, LowestClassWinsATie) {
    EXPECT_EQ(run_both({{1, 1, 1, 1, 0.3f, 0.7f, 0.7f, 0.7f}}).class_id, Ints{1});
    Rows many{{1, 1, 1, 1}};
    many[0].resize(4 + 80, 0.6f);
    EXPECT_EQ(run_both(many).class_id, Ints{0});
    many[0][4 + 77] = many[0][4 + 79] = 0.7f;
    EXPECT_EQ(run_both(many).class_id, Ints{77});
}

TEST_P(DecodeRaw, NanScoreIsNoScore) {
    const float signalling = from_bits(0x7f800001u);
    for (const float bad : {nan, -nan, signalling}) {
        const Candidates found = run_both({{1, 1, 1, 1, bad, 0.4f, bad}, {1, 1, 1, 1, bad, bad, bad}});
        EXPECT_EQ(found.index, Ints{0});
        EXPECT_EQ(found.class_id, Ints{1});
        EXPECT_EQ(found.score, Floats{0.4f});
    }
}

TEST_P(DecodeRaw, InfiniteScoreDropsTheAnchor) {
    const Candidates found = run_both({{1, 1, 1, 1, inf, 0.4f}, {1, 1, 1, 1, -inf, 0.4f}, {1, 1, 1, 1, nan, inf}});
    EXPECT_EQ(found.index, Ints{1});  // minus infinity is a low score, not the best one
}

TEST_P(DecodeRaw, BoxThatIsNotFiniteIsDropped) {
    Rows rows;
    for (std::size_t column = 0; column < 4; ++column)
        for (const float bad : {nan, inf, -inf}) {
            rows.push_back({1, 1, 1, 1, 0.9f});
            rows.back()[column] = bad;
        }
    rows.push_back({largest, 1, largest, 1, 0.9f});  // finite, but its right side is not
    rows.push_back({1, 1, largest, largest, 0.9f});
    EXPECT_EQ(run_both(rows).index, Ints{13});
}

TEST_P(DecodeRaw, InvertedBoxIsDroppedAndABoxWithoutAreaStays) {
    const float small = -0x1p-30f;  // lost in rounding beside 16: both sides are then equal
    const Candidates found = run_both({{16, 20, -4, 6, 0.9f},
                                       {16, 20, 4, -6, 0.9f},
                                       {16, 20, -4, -6, 0.9f},
                                       {16, 20, 0, 6, 0.9f},
                                       {16, 20, 4, -0.f, 0.9f},
                                       {16, 20, small, small, 0.9f},
                                       {0, 0, small, 1, 0.9f}});
    EXPECT_EQ(found.index, (Ints{3, 4, 5}));
    EXPECT_EQ(found.x1, (Floats{16, 14, 16}));
    EXPECT_EQ(found.x2, (Floats{16, 18, 16}));
}

TEST_P(DecodeRaw, ScoresAboveOneArePassedThrough) {
    EXPECT_EQ(run_both({{1, 1, 1, 1, 7.5f, 0.4f}, {1, 1, 1, 1, 1.f, 0.f}}).score, (Floats{7.5f, 1.f}));
}

TEST_P(DecodeRaw, ClassFilterLooksAtTheBestClass) {
    const std::uint8_t allowed[] = {1, 0, 1};
    const Candidates found =
        run_both({{1, 1, 1, 1, 0.8f, 0.9f, 0.7f}, {1, 1, 1, 1, 0.3f, 0.2f, 0.6f}, {1, 1, 1, 1, 0.5f, 0.4f, 0.1f}},
                 {0.25f, allowed});
    EXPECT_EQ(found.index, (Ints{1, 2}));
    EXPECT_EQ(found.class_id, (Ints{2, 0}));
}

TEST_P(DecodeRaw, EveryPlaceIsRead) {
    // Lengths around the vector width and the block of anchors; the only candidate moves over the edges.
    for (const std::size_t anchors : {1, 3, 4, 5, 7, 8, 9, 511, 512, 513, 1030}) {
        for (const std::size_t classes : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33}) {
            for (const std::size_t at : {std::size_t{0}, anchors / 2, anchors - 1}) {
                for (const std::size_t cls : {std::size_t{0}, classes / 2, classes - 1}) {
                    Rows rows(anchors, std::vector<float>(4 + classes, 0.1f));
                    rows[at][4 + cls] = 0.5f;
                    const Candidates found = run_both(rows);
                    ASSERT_EQ(found.index, Ints{static_cast<std::int32_t>(at)}) << anchors << " anchors";
                    ASSERT_EQ(found.class_id, Ints{static_cast<std::int32_t>(cls)}) << classes << " classes";
                }
            }
        }
    }
}

TEST_P(Decode, Yolov5ScoreIsAProduct) {
    const Candidates found = run(HeadKind::yolov5, {{10, 20, 4, 6, 0.5f, 0.25f, 0.75f},  //
                                                    {10, 20, 4, 6, 0.5f, 0.5f, 0.25f},   // 0.25 is not above 0.25
                                                    {10, 20, 4, 6, 0.75f, 1.f, 1.f}});
    EXPECT_EQ(found.score, (Floats{0.375f, 0.75f}));
    EXPECT_EQ(found.class_id, (Ints{1, 0}));
    EXPECT_EQ(found.index, (Ints{0, 2}));
    EXPECT_EQ(found.x1, (Floats{8, 8}));
    EXPECT_EQ(found.y2, (Floats{23, 23}));
}

TEST_P(Decode, Yolov5ObjectnessAlsoHasToBeAboveConf) {
    // A class value of 2 is no probability: the product alone would pass.
    const Candidates found = run(HeadKind::yolov5, {{1, 1, 1, 1, 0.25f, 2.f}, {1, 1, 1, 1, 0.3f, 2.f}});
    EXPECT_EQ(found.index, Ints{1});
    EXPECT_EQ(found.score, Floats{0.6f});
}

TEST_P(Decode, Yolov5TieIsThatOfTheRoundedProducts) {
    // 0.75 times neighbouring floats just below 1: the first pair of products differs, the second does not.
    const float low = from_bits(0x3f7ffffc), middle = from_bits(0x3f7ffffd), high = from_bits(0x3f7ffffe);
    ASSERT_LT(0.75f * low, 0.75f * middle);
    ASSERT_EQ(0.75f * middle, 0.75f * high);
    EXPECT_EQ(run(HeadKind::yolov5, {{1, 1, 1, 1, 0.75f, low, middle}}).class_id, Ints{1});
    EXPECT_EQ(run(HeadKind::yolov5, {{1, 1, 1, 1, 0.75f, middle, high}}).class_id, Ints{0});
}

TEST_P(Decode, Yolov5NotFinite) {
    const Candidates found = run(HeadKind::yolov5, {{1, 1, 1, 1, nan, 0.9f, 0.9f},  //
                                                    {1, 1, 1, 1, inf, 0.9f, 0.f},   //
                                                    {1, 1, 1, 1, inf, 0.f, 0.f},    // infinity * 0 is NaN
                                                    {1, 1, 1, 1, 0.9f, inf, 0.f},   //
                                                    {1, 1, nan, 1, 0.9f, 0.9f, 0.f},
                                                    {1, 1, 1, 1, 0.9f, nan, 0.5f}});
    EXPECT_EQ(found.index, Ints{5});
    EXPECT_EQ(found.class_id, Ints{1});
    EXPECT_EQ(found.score, Floats{0.9f * 0.5f});
}

TEST_P(Decode, End2endRows) {
    const Candidates found = run(HeadKind::end2end, {{1, 2, 3, 4, 0.3f, 2},     // kept
                                                     {1, 2, 3, 4, 0.25f, 0},    // not above conf
                                                     {1, 2, 3, 4, 0.9f, 3},     // no such class
                                                     {1, 2, 3, 4, 0.9f, -1},    //
                                                     {1, 2, 3, 4, 0.9f, 0.5f},  // not an integer
                                                     {1, 2, 3, 4, 0.9f, nan},
                                                     {1, 2, 3, 4, 0.9f, inf},
                                                     {1, 2, 3, 4, 0.9f, 1e20f},
                                                     {1, 2, 3, 4, nan, 0},
                                                     {1, 2, 3, 4, inf, 0},
                                                     {1, nan, 3, 4, 0.9f, 0},
                                                     {1, 2, inf, 4, 0.9f, 0},
                                                     {3, 2, 1, 4, 0.9f, 0},     // inverted
                                                     {1, 4, 3, 2, 0.9f, 0},     //
                                                     {5, 6, 7, 8, 0.9f, -0.f},  // kept: minus zero is class 0
                                                     {5, 6, 5, 6, 0.8f, 1}});   // kept: without area
    EXPECT_EQ(found.index, (Ints{0, 14, 15}));
    EXPECT_EQ(found.class_id, (Ints{2, 0, 1}));
    EXPECT_EQ(found.x1, (Floats{1, 5, 5}));
    EXPECT_EQ(found.y1, (Floats{2, 6, 6}));
    EXPECT_EQ(found.x2, (Floats{3, 7, 5}));
    EXPECT_EQ(found.y2, (Floats{4, 8, 6}));
    EXPECT_EQ(found.score, (Floats{0.3f, 0.9f, 0.8f}));

    const std::uint8_t allowed[] = {1, 1, 0};
    EXPECT_EQ(run(HeadKind::end2end, {{1, 2, 3, 4, 0.9f, 2}, {1, 2, 3, 4, 0.8f, 1}}, {0.25f, allowed}).index, Ints{1});
}

TEST_P(Decode, EmptyHeadClearsTheCandidates) {
    for (const HeadKind kind : {HeadKind::raw, HeadKind::raw_transposed, HeadKind::yolov5, HeadKind::end2end}) {
        Candidates out;
        out.push({1, 2, 3, 4}, 0.5f, 0, 0);
        const float none = 0.f;
        decode(&none, {kind, 0, 3}, {}, out, GetParam());
        EXPECT_EQ(out.size(), 0u);
        EXPECT_TRUE(out.x1.empty() && out.index.empty() && out.class_id.empty());
    }
}

// Numbers that a broken network may give, mixed with plain ones.
float adversarial(std::mt19937& random) {
    static const float bad[] = {nan,    -nan,    inf,      -inf,  0.f, -0.f,
                                1e-45f, largest, -largest, 0.25f, 2.f, from_bits(0x7f800001u)};
    const std::uint32_t draw = static_cast<std::uint32_t>(random());
    if (draw % 8 == 0) return bad[(draw >> 8) % std::size(bad)];
    if (draw % 8 == 1) return static_cast<float>((draw >> 8) % 5) / 4.f;
    return static_cast<float>((draw >> 8) % 65536) / 65536.f;
}

TEST_P(Decode, EveryIsaGivesTheBitsOfTheScalarReference) {
    std::mt19937 random(1);
    for (int round = 0; round < 300; ++round) {
        const Head head{static_cast<HeadKind>(round % 4), static_cast<int>(random() % 1100),
                        1 + static_cast<int>(random() % 90)};
        std::vector<float> data(element_count(head));
        for (float& value : data) value = adversarial(random);
        Candidates expected, found;
        decode(data.data(), head, {}, expected, Isa::scalar);
        decode(data.data(), head, {}, found, GetParam());
        ASSERT_TRUE(same_bits(found.x1, expected.x1) && same_bits(found.y1, expected.y1) &&
                    same_bits(found.x2, expected.x2) && same_bits(found.y2, expected.y2) &&
                    same_bits(found.score, expected.score));
        ASSERT_EQ(found.class_id, expected.class_id);
        ASSERT_EQ(found.index, expected.index);
    }
}

TEST_P(Decode, KernelsGiveTheHighestNumber) {
    std::mt19937 random(2);
    const DecodeKernels& kernels = decode_kernels(GetParam());
    for (int round = 0; round < 500; ++round) {
        const int classes = 1 + static_cast<int>(random() % 20);
        const int count = 1 + static_cast<int>(random() % 40);
        const std::size_t stride = static_cast<std::size_t>(count) + random() % 3;
        std::vector<float> scores(stride * static_cast<std::size_t>(classes));
        for (float& value : scores) value = adversarial(random);
        std::vector<float> best(static_cast<std::size_t>(count));
        kernels.column_max(scores.data(), stride, classes, count, best.data());
        for (std::size_t i = 0; i < best.size(); ++i) {
            std::vector<float> column;
            float expected = -inf;
            for (std::size_t c = 0; c < static_cast<std::size_t>(classes); ++c) {
                column.push_back(scores[c * stride + i]);
                if (!std::isnan(column.back())) expected = std::fmax(expected, column.back());
            }
            ASSERT_EQ(best[i], expected);
            ASSERT_EQ(kernels.row_max(column.data(), classes), expected);
        }
    }
}

TEST_P(Decode, SecondCallAllocatesNothing) {
    for (const HeadKind kind : {HeadKind::raw, HeadKind::raw_transposed, HeadKind::yolov5, HeadKind::end2end}) {
        const Head head{kind, 1000, 3};
        const std::vector<float> data(element_count(head), 1.f);  // every row is a candidate
        Candidates out;
        const long start = edgeyolo_test::allocations();
        decode(data.data(), head, {}, out, GetParam());
        const long after_first = edgeyolo_test::allocations();
        ASSERT_EQ(out.size(), 1000u);
        EXPECT_GT(after_first, start);
        decode(data.data(), head, {}, out, GetParam());
        EXPECT_EQ(edgeyolo_test::allocations(), after_first);
    }
}

INSTANTIATE_TEST_SUITE_P(Isa, Decode, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return name(isa.param); });
INSTANTIATE_TEST_SUITE_P(Isa, DecodeRaw, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return name(isa.param); });

TEST(Head, ElementCount) {
    EXPECT_EQ(element_count({HeadKind::raw, 8400, 80}), 8400u * 84);
    EXPECT_EQ(element_count({HeadKind::raw_transposed, 8400, 80}), 8400u * 84);
    EXPECT_EQ(element_count({HeadKind::yolov5, 25200, 80}), 25200u * 85);
    EXPECT_EQ(element_count({HeadKind::end2end, 300, 80}), 1800u);
    EXPECT_EQ(element_count({HeadKind::raw, 1 << 30, 1 << 20}), (std::size_t{1} << 30) * ((std::size_t{1} << 20) + 4));
}

TEST(Head, BadSizesAreRefused) {
    Candidates out;
    const float none = 0.f;
    EXPECT_THROW(element_count({HeadKind::raw, -1, 80}), InvalidInput);
    EXPECT_THROW(element_count({HeadKind::raw, 1, 0}), InvalidInput);
    EXPECT_THROW(decode(&none, {HeadKind::raw, 1, 0}, {}, out, Isa::scalar), InvalidInput);
}

TEST(Head, MissingInstructionSetIsRefused) {
#if defined(__aarch64__)
    EXPECT_THROW(decode_kernels(Isa::avx2), InvalidInput);
#else
    EXPECT_THROW(decode_kernels(Isa::neon), InvalidInput);
#endif
}

}  // namespace
}  // namespace edgeyolo
