#include "nms.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include "allocations.hpp"
#include "error.hpp"

namespace edgeyolo {
namespace {

using Ints = std::vector<std::int32_t>;

struct Entry {
    Box box;
    float score;
    std::int32_t class_id = 0;
};

Candidates candidates(const std::vector<Entry>& entries) {
    Candidates out;
    for (const Entry& entry : entries)
        out.push(entry.box, entry.score, entry.class_id, static_cast<std::int32_t>(out.size()));
    return out;
}

// Each test runs on every instruction set of this machine.
class NmsTest : public testing::TestWithParam<Isa> {
protected:
    Ints run(const std::vector<Entry>& entries, NmsParams params = {}) {
        return nms_.run(candidates(entries), params, GetParam());
    }
    Nms nms_;
};

TEST_P(NmsTest, ByHand) {
    // Areas 100 and 100, intersection 80: IoU 2/3. The third box is far away.
    const std::vector<Entry> entries{{{0, 0, 10, 10}, 0.5f}, {{0, 2, 10, 12}, 0.9f}, {{50, 50, 60, 60}, 0.7f}};
    EXPECT_EQ(run(entries, {0.7, 300, false}), (Ints{1, 2, 0}));
    EXPECT_EQ(run(entries, {0.6, 300, false}), (Ints{1, 2}));
}

TEST_P(NmsTest, NothingInNothingOut) {
    EXPECT_TRUE(run({}).empty());
    EXPECT_EQ(run({{{0, 0, 1, 1}, 0.5f}}), Ints{0});
}

TEST_P(NmsTest, ThresholdIsStrict) {
    const std::vector<Entry> half{{{0, 0, 2, 1}, 0.9f}, {{0, 0, 1, 1}, 0.8f}};
    EXPECT_EQ(run(half, {0.5, 300, false}), (Ints{0, 1}));
    EXPECT_EQ(run(half, {std::nextafter(0.5, 0.0), 300, false}), Ints{0});
}

TEST_P(NmsTest, ThresholdIsComparedAsDouble) {
    // The float32 IoU of 3/5 is 0.60000002: above 0.6, as torchvision.ops.nms has it.
    const std::vector<Entry> three_fifths{{{0, 0, 5, 1}, 0.9f}, {{0, 0, 3, 1}, 0.8f}};
    EXPECT_EQ(run(three_fifths, {0.6, 300, false}), Ints{0});
    EXPECT_EQ(run(three_fifths, {static_cast<double>(0.6f), 300, false}), (Ints{0, 1}));
}

TEST_P(NmsTest, ADroppedBoxDropsNothing) {
    // A chain: 0 drops 1 (IoU 2/3); 1 would drop 2, but 0 and 2 have 60 / 140 only.
    const std::vector<Entry> chain{{{0, 0, 10, 10}, 0.9f}, {{0, 2, 10, 12}, 0.8f}, {{0, 4, 10, 14}, 0.7f}};
    EXPECT_EQ(run(chain, {0.5, 300, false}), (Ints{0, 2}));
}

TEST_P(NmsTest, ClassesCompeteOnlyWhenAgnostic) {
    const std::vector<Entry> entries{{{0, 0, 9, 9}, 0.6f, 3}, {{0, 0, 9, 9}, 0.9f, 0}, {{0, 0, 9, 9}, 0.7f, 3}};
    EXPECT_EQ(run(entries, {0.5, 300, false}), (Ints{1, 2}));
    EXPECT_EQ(run(entries, {0.5, 300, true}), Ints{1});
}

TEST_P(NmsTest, MaxDetCountsAllClassesByScore) {
    const std::vector<Entry> entries{{{0, 0, 1, 1}, 0.6f, 0},
                                     {{0, 0, 1, 1}, 0.5f, 0},  // dropped: it does not count
                                     {{4, 0, 5, 1}, 0.9f, 1},
                                     {{8, 0, 9, 1}, 0.4f, 2},
                                     {{6, 0, 7, 1}, 0.8f, 1}};
    EXPECT_EQ(run(entries, {0.5, 4, false}), (Ints{2, 4, 0, 3}));
    EXPECT_EQ(run(entries, {0.5, 3, false}), (Ints{2, 4, 0}));
    EXPECT_EQ(run(entries, {0.5, 1, false}), Ints{2});
    EXPECT_TRUE(run(entries, {0.5, 0, false}).empty());
}

TEST_P(NmsTest, EqualScoresKeepTheirOrder) {
    std::vector<Entry> entries;
    for (int i = 0; i < 40; ++i) {
        const auto x = static_cast<float>(2 * i);
        entries.push_back({{x, 0, x + 1, 1}, i % 2 ? 0.5f : 0.75f, i % 3});
    }
    Ints expected;
    for (int i = 0; i < 40; i += 2) expected.push_back(i);
    for (int i = 1; i < 40; i += 2) expected.push_back(i);
    EXPECT_EQ(run(entries), expected);
    EXPECT_EQ(run({{{0, 0, 9, 9}, 0.5f}, {{0, 0, 9, 9}, 0.5f}}), Ints{0});
}

TEST_P(NmsTest, OrderFollowsTheWholeScore) {
    std::vector<Entry> entries;
    std::mt19937 random(3);
    for (int i = 0; i < 3000; ++i) {
        const auto x = static_cast<float>(2 * i);
        // All magnitudes from the least float to 1, with repeats.
        entries.push_back({{x, 0, x + 1, 1},
                           std::ldexp(1.f, -static_cast<int>(random() % 140)) *
                                   (i % 2 ? 1.f : static_cast<float>(random() % 1000 + 1) / 1000.f) +
                               1e-45f});
    }
    Ints expected(entries.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) {
        return entries[static_cast<std::size_t>(a)].score > entries[static_cast<std::size_t>(b)].score;
    });
    EXPECT_EQ(run(entries, {0.5, 3000, false}), expected);
}

TEST_P(NmsTest, BoxesWithoutAreaDropNothing) {
    const std::vector<Entry> entries{{{3, 3, 3, 3}, 0.9f},  // a point, twice: 0 / 0
                                     {{3, 3, 3, 3}, 0.8f},
                                     {{0, 3, 9, 3}, 0.7f},  // a line, twice
                                     {{0, 3, 9, 3}, 0.6f},
                                     {{0, 0, 9, 9}, 0.5f}};
    for (const double iou : {0.0, 0.5, 1.0}) EXPECT_EQ(run(entries, {iou, 300, false}), (Ints{0, 1, 2, 3, 4}));
}

TEST_P(NmsTest, InvertedBoxesDropNothing) {
    // Both sides inverted: the area is positive, the intersection empty.
    EXPECT_EQ(run({{{9, 9, 0, 0}, 0.9f}, {{9, 9, 0, 0}, 0.8f}, {{0, 0, 9, 9}, 0.7f}}, {0.0, 300, false}),
              (Ints{0, 1, 2}));
}

TEST_P(NmsTest, IouZeroDropsEveryIntersection) {
    const std::vector<Entry> entries{{{0, 0, 10, 10}, 0.9f},
                                     {{10, 0, 20, 10}, 0.8f},  // touches: no intersection
                                     {{9.999f, 9.999f, 30, 30}, 0.7f}};
    EXPECT_EQ(run(entries, {0.0, 300, false}), (Ints{0, 1}));
}

TEST_P(NmsTest, IouOneKeepsIdenticalBoxes) {
    EXPECT_EQ(run({{{0, 0, 9, 9}, 0.9f}, {{0, 0, 9, 9}, 0.8f}}, {1.0, 300, false}), (Ints{0, 1}));
}

TEST_P(NmsTest, OverflowingAreasDropNothing) {
    // Finite corners, infinite area: the IoU is NaN.
    const Box huge{-3e38f, -3e38f, 3e38f, 3e38f};
    EXPECT_EQ(run({{huge, 0.9f}, {huge, 0.8f}, {{0, 0, 1, 1}, 0.7f}}, {0.0, 300, false}), (Ints{0, 1, 2}));
}

// The definition, written out: strike, class after class, all that a standing box overlaps; then merge the classes.
Ints by_definition(const std::vector<Entry>& entries, const NmsParams& params) {
    std::map<std::int32_t, Ints> classes;
    for (std::size_t i = 0; i < entries.size(); ++i)
        classes[params.agnostic ? -1 : entries[i].class_id].push_back(static_cast<std::int32_t>(i));
    const auto at = [&](std::int32_t i) -> const Entry& { return entries[static_cast<std::size_t>(i)]; };
    const auto better = [&](std::int32_t a, std::int32_t b) {
        return at(a).score != at(b).score ? at(a).score > at(b).score : a < b;
    };
    Ints kept;
    for (auto& item : classes) {
        Ints& members = item.second;
        std::sort(members.begin(), members.end(), better);
        std::vector<bool> struck(members.size());
        for (std::size_t i = 0; i < members.size(); ++i) {
            if (struck[i]) continue;
            kept.push_back(members[i]);
            const Box a = at(members[i]).box;
            for (std::size_t j = i + 1; j < members.size(); ++j) {
                const Box b = at(members[j]).box;
                const float w = std::max(0.f, std::min(a.x2, b.x2) - std::max(a.x1, b.x1));
                const float h = std::max(0.f, std::min(a.y2, b.y2) - std::max(a.y1, b.y1));
                const float both = (a.x2 - a.x1) * (a.y2 - a.y1) + (b.x2 - b.x1) * (b.y2 - b.y1);
                const float iou = w * h / (both - w * h);
                if (static_cast<double>(iou) > params.iou) struck[j] = true;
            }
        }
    }
    std::sort(kept.begin(), kept.end(), better);
    if (kept.size() > static_cast<std::size_t>(params.max_det)) kept.resize(static_cast<std::size_t>(params.max_det));
    return kept;
}

TEST_P(NmsTest, EqualsTheDefinitionOnRandomBoxes) {
    std::mt19937 random(4);
    const auto draw = [&](std::uint32_t below) { return static_cast<float>(random() % below); };
    const double ious[] = {0.0, 0.1, 0.25, 1.0 / 3, 0.45, 0.5, 0.6, 0.7, 0.9, 1.0};
    const int limits[] = {1, 2, 7, 8, 9, 300};
    long dropped = 0, kept = 0;
    for (int round = 0; round < 1500; ++round) {
        const std::size_t count = random() % (round % 50 ? 120 : 1500);
        const std::uint32_t span = std::uint32_t{1} << (2 + random() % 8);  // small: identical boxes, round IoUs
        const auto classes = 1 + random() % (round % 2 ? 3 : 90);
        const bool integers = random() % 2;
        std::vector<Entry> entries;
        for (std::size_t i = 0; i < count; ++i) {
            const float shift = integers ? 0.f : draw(1000) / 1000.f;
            const float x = draw(span) + shift, y = draw(span) - shift;
            entries.push_back({{x, y, x + draw(span) - (random() % 16 == 0 ? 2.f : 0.f), y + draw(span) + shift},
                               (draw(32) + 1) / 32.f,
                               static_cast<std::int32_t>(random() % classes)});
        }
        const NmsParams params{ious[random() % std::size(ious)], limits[random() % std::size(limits)],
                               random() % 2 == 0};
        const Ints expected = by_definition(entries, params);
        ASSERT_EQ(run(entries, params), expected) << "round " << round;
        kept += static_cast<long>(expected.size());
        dropped += static_cast<long>(count - expected.size());
    }
    EXPECT_GT(kept, 10000);  // the rounds are neither empty nor idle
    EXPECT_GT(dropped, 20000);
}

TEST_P(NmsTest, KernelEqualsTheFormulaInEveryLane) {
    std::mt19937 random(5);
    const OverlapsAny overlaps_any_of = overlaps_any(GetParam());
    const auto box = [&] {
        const auto draw = [&] { return static_cast<float>(random() % 16); };
        const Box b{draw(), draw(), draw() + 8.f, draw() + 8.f};
        return random() % 64 ? b : Box{-3e38f, b.y1, 3e38f, b.y2};
    };
    for (int round = 0; round < 2000; ++round) {
        const int boxes = static_cast<int>(random() % 33);
        const int count = (boxes + BoxBlock::lanes - 1) / BoxBlock::lanes;
        std::vector<BoxBlock> blocks(static_cast<std::size_t>(count));
        const Box candidate = box();
        const float threshold = static_cast<float>(random() % 101) / 100.f;
        bool expected = false;
        for (int i = 0; i < boxes; ++i) {
            const Box kept = box();
            blocks[static_cast<std::size_t>(i / BoxBlock::lanes)].set(i % BoxBlock::lanes, kept, area(kept));
            expected |= overlaps(kept, area(kept), candidate, area(candidate), threshold);
        }
        ASSERT_EQ(overlaps_any_of(blocks.data(), count, candidate, area(candidate), threshold), expected);
    }
}

TEST_P(NmsTest, EarlierCallsLeaveNoTrace) {
    std::vector<Entry> many;
    for (int i = 0; i < 500; ++i) many.push_back({{0, 0, 9, 9}, 0.9f, i % 80});
    const std::vector<Entry> few{{{0, 0, 9, 9}, 0.5f, 2}, {{1, 0, 9, 9}, 0.6f, 2}, {{20, 0, 29, 9}, 0.4f, 79}};
    const Ints expected = Nms().run(candidates(few), {}, GetParam());
    EXPECT_EQ(expected, (Ints{1, 2}));
    EXPECT_EQ(run(many).size(), 80u);
    EXPECT_EQ(run(few), expected);
    EXPECT_EQ(run(many, {0.5, 10, true}), Ints{0});
    EXPECT_EQ(run(few), expected);
}

TEST_P(NmsTest, SecondCallAllocatesNothing) {
    std::vector<Entry> entries;
    for (int i = 0; i < 1000; ++i) {
        const auto x = static_cast<float>(i);
        entries.push_back({{x, 0, x + 9, 9}, 0.5f, i % 7});
    }
    const Candidates all = candidates(entries);
    entries.resize(100);
    const Candidates fewer = candidates(entries);
    for (const bool agnostic : {false, true}) {
        Nms nms;
        const NmsParams params{0.7, 300, agnostic};
        const long start = edgeyolo_test::allocations();
        nms.run(all, params, GetParam());
        const long after_first = edgeyolo_test::allocations();
        EXPECT_GT(after_first, start);
        nms.run(all, params, GetParam());
        nms.run(fewer, params, GetParam());
        EXPECT_EQ(edgeyolo_test::allocations(), after_first);
    }
}

INSTANTIATE_TEST_SUITE_P(Isa, NmsTest, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return name(isa.param); });

TEST(IouThreshold, IsTheLargestFloatNotAbove) {
    EXPECT_EQ(iou_threshold(0.0), 0.f);
    EXPECT_EQ(iou_threshold(0.5), 0.5f);
    EXPECT_EQ(iou_threshold(1.0), 1.f);
    EXPECT_EQ(iou_threshold(0.7), 0.7f);                       // 0.7f is below 0.7
    EXPECT_EQ(iou_threshold(0.6), std::nextafter(0.6f, 0.f));  // 0.6f is above 0.6
    EXPECT_EQ(iou_threshold(static_cast<double>(0.6f)), 0.6f);
    EXPECT_EQ(iou_threshold(1e-300), 0.f);
    for (int i = 0; i <= 1000; ++i) {
        const double iou = i / 1000.0;
        const float threshold = iou_threshold(iou);
        EXPECT_LE(static_cast<double>(threshold), iou);
        EXPECT_GT(static_cast<double>(std::nextafter(threshold, 2.f)), iou);
    }
}

TEST(NmsKernels, MissingInstructionSetIsRefused) {
#if defined(__aarch64__)
    EXPECT_THROW(overlaps_any(Isa::avx2), InvalidInput);
#else
    EXPECT_THROW(overlaps_any(Isa::neon), InvalidInput);
#endif
}

}  // namespace
}  // namespace edgeyolo
