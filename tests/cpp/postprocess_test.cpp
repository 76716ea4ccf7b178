#include "postprocess.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <thread>
#include "allocations.hpp"
#include "error.hpp"

namespace edgeyolo {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<std::int32_t>;

// Half size, 140 rows of border above and below.
Letterbox hd_to_640() {
    return fit({1280, 720}, {640, 640});
}

// The results, copied out of their workspace.
Results run(Postprocessor& postprocessor, const Floats& data, const Head& head, const Letterbox& geometry = hd_to_640(),
            Isa isa = best_isa()) {
    return postprocessor.run(data.data(), head, geometry, isa)->results;
}

bool same(const Results& a, const Results& b) {
    return a.boxes == b.boxes && a.scores == b.scores && a.class_ids == b.class_ids;
}

TEST(Postprocess, BoxesAreInThePicturesPixels) {
    Postprocessor postprocessor({});
    const Head head{HeadKind::raw_transposed, 3, 2};
    const Results results = run(postprocessor,
                                {320, 320, 100, 50, 0.1f, 0.5f,  //
                                 0, 0, 1, 1, 0.1f, 0.2f,         // below conf
                                 630, 150, 40, 40, 0.9f, 0.1f},  // over the right and the upper edge
                                head);
    EXPECT_EQ(results.boxes, (Floats{1220, 0, 1280, 60, 540, 310, 740, 410}));
    EXPECT_EQ(results.scores, (Floats{0.9f, 0.5f}));
    EXPECT_EQ(results.class_ids, (Ints{0, 1}));
}

TEST(Postprocess, EveryOptionReachesItsStep) {
    const Head head{HeadKind::raw_transposed, 4, 2};
    const Floats data{100, 200, 20, 20, 0.9f, 0.1f,   //
                      100, 205, 20, 20, 0.1f, 0.8f,   // IoU 300 / 500 with the first, another class
                      300, 200, 20, 20, 0.1f, 0.7f,   //
                      300, 204, 20, 20, 0.2f, 0.4f};  // IoU 320 / 480 with the third, same class
    const auto scores = [&](Postprocessor::Options options) {
        Postprocessor postprocessor(std::move(options));
        return run(postprocessor, data, head).scores;
    };
    EXPECT_EQ(scores({}), (Floats{0.9f, 0.8f, 0.7f, 0.4f}));
    EXPECT_EQ(scores({0.5f, 0.7f, 300, false, {}}), (Floats{0.9f, 0.8f, 0.7f}));
    EXPECT_EQ(scores({0.25f, 0.5f, 300, false, {}}), (Floats{0.9f, 0.8f, 0.7f}));
    EXPECT_EQ(scores({0.25f, 0.5f, 300, true, {}}), (Floats{0.9f, 0.7f}));
    EXPECT_EQ(scores({0.25f, 0.7f, 2, false, {}}), (Floats{0.9f, 0.8f}));
    EXPECT_EQ(scores({0.25f, 0.7f, 300, false, {0, 1}}), (Floats{0.8f, 0.7f, 0.4f}));
}

TEST(Postprocess, End2endIsOrderedAndNotSuppressedAgain) {
    const Head head{HeadKind::end2end, 5, 2};
    const Floats data{100, 200, 120, 220, 0.3f, 1,  //
                      100, 200, 120, 220, 0.9f, 1,  // the same box again, and better
                      100, 200, 120, 220, 0.1f, 0,  // below conf
                      0,   140, 640, 500, 0.3f, 0,  // as good as the first: stays behind it
                      0,   140, 320, 320, 0.5f, 1};
    Postprocessor all({});
    const Results results = run(all, data, head);
    EXPECT_EQ(results.scores, (Floats{0.9f, 0.5f, 0.3f, 0.3f}));
    EXPECT_EQ(results.class_ids, (Ints{1, 1, 1, 0}));
    EXPECT_EQ(results.boxes, (Floats{200, 120, 240, 160, 0, 0, 640, 360, 200, 120, 240, 160, 0, 0, 1280, 720}));
    // max_det takes the best, not the first.
    Postprocessor two({0.25f, 0.7f, 2, false, {}});
    EXPECT_EQ(run(two, data, head).scores, (Floats{0.9f, 0.5f}));
    const Floats below(30, 0.1f);
    EXPECT_EQ(run(two, below, head).size(), 0u);
}

TEST(Postprocess, BoxOutsideThePictureHasNoAreaOnItsEdge) {
    Postprocessor postprocessor({});
    const Head head{HeadKind::end2end, 2, 1};
    const Floats data{100, 20,  120, 100, 0.9f, 0,  // in the upper border, which ends at row 140
                      700, 200, 720, 220, 0.8f, 0};
    EXPECT_EQ(run(postprocessor, data, head).boxes, (Floats{200, 0, 240, 0, 1280, 120, 1280, 160}));
}

TEST(Postprocess, BadOptionsAreRefused) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (const float bad : {-0.1f, 1.1f, nan}) {
        EXPECT_THROW(Postprocessor({bad, 0.7f, 300, false, {}}), InvalidInput);
        EXPECT_THROW(Postprocessor({0.25f, bad, 300, false, {}}), InvalidInput);
    }
    EXPECT_THROW(Postprocessor({0.25f, 0.7f, 0, false, {}}), InvalidInput);
    EXPECT_NO_THROW(Postprocessor({0.f, 0.f, 1, false, {}}));
    EXPECT_NO_THROW(Postprocessor({1.f, 1.f, 1, false, {}}));
}

TEST(Postprocess, ClassFilterOfAnotherSizeIsRefused) {
    const Floats data(6, 0.5f);
    Postprocessor postprocessor({0.25f, 0.7f, 300, false, {1, 1, 1}});
    EXPECT_THROW(run(postprocessor, data, {HeadKind::raw, 1, 2}), InvalidInput);
    EXPECT_EQ(run(postprocessor, Floats(7, 0.5f), {HeadKind::raw, 1, 3}).size(), 1u);
}

Floats random_head(const Head& head, unsigned seed) {
    std::mt19937 random(seed);
    Floats data(element_count(head));
    const auto rows = static_cast<std::size_t>(head.rows);
    for (std::size_t i = 0; i < data.size(); ++i) {
        const auto draw = static_cast<float>(random() % 65536) / 65536.f;
        data[i] = i < 2 * rows ? 640.f * draw : i < 4 * rows ? 10.f + 100.f * draw : draw * draw * draw;
    }
    return data;
}

// The sanitizer build for threads runs this one.
TEST(Postprocess, ThreadsSharingOneGetTheSerialResults) {
    constexpr int threads = 8, frames = 4, rounds = 25;
    const Head head{HeadKind::raw, 400, 5};
    std::vector<Floats> data;
    std::vector<Results> serial;
    Postprocessor postprocessor({0.25f, 0.1f, 300, false, {}});
    for (unsigned frame = 0; frame < frames; ++frame) {
        data.push_back(random_head(head, frame));
        serial.push_back(run(postprocessor, data.back(), head));
        EXPECT_GT(serial.back().size(), 20u);
        EXPECT_LT(serial.back().size(), 300u);  // neither cut nor left alone by the suppression
    }
    std::vector<int> equal(threads, 0);
    std::vector<std::thread> pool;
    for (std::size_t t = 0; t < threads; ++t)
        pool.emplace_back([&, t] {
            for (std::size_t round = 0; round < rounds; ++round) {
                const std::size_t frame = (t + round) % frames;
                equal[t] += same(run(postprocessor, data[frame], head), serial[frame]);
            }
        });
    for (std::thread& thread : pool) thread.join();
    for (const int count : equal) EXPECT_EQ(count, rounds);
}

TEST(Postprocess, LiveCountersReturnToZero) {
    ASSERT_EQ(live().postprocessors, 0);
    ASSERT_EQ(live().workspaces, 0);
    const Floats data(6, 0.5f);
    const Head head{HeadKind::raw, 1, 2};
    {
        Postprocessor postprocessor({});
        EXPECT_EQ(live().postprocessors, 1);
        for (int i = 0; i < 3; ++i) run(postprocessor, data, head);
        EXPECT_EQ(live().workspaces, 1);  // given back and taken again
        const Postprocessor::Lease first = postprocessor.run(data.data(), head, hd_to_640(), best_isa());
        const Postprocessor::Lease second = postprocessor.run(data.data(), head, hd_to_640(), best_isa());
        EXPECT_EQ(live().workspaces, 2);
    }
    EXPECT_EQ(live().postprocessors, 0);
    EXPECT_EQ(live().workspaces, 0);
}

TEST(Postprocess, SecondFrameAllocatesNothing) {
    for (const Head& head : {Head{HeadKind::raw, 400, 5}, Head{HeadKind::end2end, 400, 5}}) {
        Floats data = random_head(head, 9);
        if (head.kind == HeadKind::end2end)  // rows without order
            for (std::size_t i = 0; i < 400; ++i) {
                const Floats row{0, 0, 9, 9, 0.3f + static_cast<float>(i * 7 % 400) / 1000.f, 1};
                std::copy(row.begin(), row.end(), data.begin() + static_cast<std::ptrdiff_t>(6 * i));
            }
        const Letterbox geometry = hd_to_640();
        Postprocessor postprocessor({});
        const auto frame = [&] { postprocessor.run(data.data(), head, geometry, best_isa()); };
        const long start = edgeyolo_test::allocations();
        frame();
        const long after_first = edgeyolo_test::allocations();
        EXPECT_GT(after_first, start);
        frame();
        EXPECT_EQ(edgeyolo_test::allocations(), after_first);
    }
}

}  // namespace
}  // namespace edgeyolo
