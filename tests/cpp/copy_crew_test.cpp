// The threads that help to copy frames: every piece once, told in order, nothing in use after the call.
#include "copy_crew.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

namespace edgeyolo {
namespace {

struct Told {
    std::vector<int> copies;  // per piece
    int end = 0;              // pieces 0 .. end-1 have been told

    explicit Told(int pieces) : copies(static_cast<std::size_t>(pieces), 0) {}
};

// Runs one frame whose pieces are plain memory, so that a sanitizer sees a piece that is told before it is copied.
Told run(CopyCrew& crew, int pieces) {
    Told told(pieces);
    const auto caller = std::this_thread::get_id();
    crew.share(
        pieces, [&](int piece) { ++told.copies[static_cast<std::size_t>(piece)]; },
        [&](int first, int end) {
            EXPECT_EQ(std::this_thread::get_id(), caller);
            EXPECT_EQ(first, told.end);
            EXPECT_LT(first, end);
            for (int piece = first; piece < end; ++piece) EXPECT_EQ(told.copies[static_cast<std::size_t>(piece)], 1);
            told.end = end;
        });
    EXPECT_EQ(told.end, pieces);
    for (const int copies : told.copies) EXPECT_EQ(copies, 1);
    return told;
}

TEST(CopyCrew, EveryPieceOnceAndToldInOrder) {
    for (const int helpers : {0, 1, 3}) {
        CopyCrew crew(helpers);
        for (const int pieces : {0, 1, 2, 7, CopyCrew::max_pieces})
            for (int turn = 0; turn < 50; ++turn) run(crew, pieces);
    }
}

TEST(CopyCrew, HelpersDoHelp) {
    CopyCrew crew(1);
    std::atomic<bool> other{false};
    const auto caller = std::this_thread::get_id();
    // The caller's first piece lasts until a helper has taken another one.
    crew.share(
        8,
        [&](int) {
            if (std::this_thread::get_id() != caller) other = true;
            while (!other) std::this_thread::yield();
        },
        [](int, int) {});
    EXPECT_TRUE(other);
}

TEST(CopyCrew, SeveralCallersAtOnce) {
    CopyCrew crew(2);
    std::vector<std::thread> callers;
    for (int i = 0; i < 4; ++i)
        callers.emplace_back([&] {
            for (int turn = 0; turn < 100; ++turn) run(crew, 16);
        });
    for (std::thread& caller : callers) caller.join();
}

TEST(CopyCrew, AFailureLeavesNothingInUse) {
    CopyCrew crew(3);
    for (int turn = 0; turn < 100; ++turn) {
        std::vector<int> pieces(32, 0);  // dies with the exception
        const auto fail = [&] {
            crew.share(
                32, [&](int piece) { ++pieces[static_cast<std::size_t>(piece)]; },
                [](int, int) { throw std::runtime_error("the driver refused"); });
        };
        EXPECT_THROW(fail(), std::runtime_error);
    }
    run(crew, 32);
}

TEST(CopyCrew, OneCrewForTheProcess) {
    setenv("EDGEYOLO_COPY_THREADS", "2", 1);
    auto crew = CopyCrew::hire();
    ASSERT_NE(crew, nullptr);
    EXPECT_EQ(CopyCrew::hire(), crew);
    run(*crew, 20);
    setenv("EDGEYOLO_COPY_THREADS", "0", 1);
    EXPECT_EQ(CopyCrew::hire(), crew) << "as long as somebody holds it";
    const std::weak_ptr<CopyCrew> gone = crew;
    crew.reset();
    EXPECT_TRUE(gone.expired());
    EXPECT_EQ(CopyCrew::hire(), nullptr);
    unsetenv("EDGEYOLO_COPY_THREADS");
}

}  // namespace
}  // namespace edgeyolo
