// The letterbox against the plain model of letterbox_model.hpp, bit for bit, on every instruction set.
#include "letterbox.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <random>
#include <vector>
#include "allocations.hpp"
#include "error.hpp"
#include "letterbox_model.hpp"

namespace edgeyolo {
namespace {

using edgeyolo_test::Floats;
using edgeyolo_test::model;
using Random = std::mt19937;
using Bytes = std::vector<std::uint8_t>;

const std::vector<PixelFormat> kFormats{PixelFormat::bgr, PixelFormat::rgb, PixelFormat::gray, PixelFormat::bgra,
                                        PixelFormat::rgba};

int pick(Random& random, int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
}

// --------------------------------------------------------------------------------------------------------

struct Picture {
    Bytes bytes;
    ImageView view;
};

enum class Layout {
    packed,
    padded_rows,
    reversed_channels,
    upside_down,
    mirrored,
    transposed,
    planar,
    spaced,
    repeated
};
constexpr int kLayouts = 9;

// Random pixels, seen in one of the ways that NumPy can show them.
Picture make_picture(Random& random, Size size, PixelFormat format, Layout layout) {
    const std::ptrdiff_t c = channels(format), w = size.width, h = size.height;
    Picture picture;
    ImageView& view = picture.view;
    view = {nullptr, size, w * c, c, 1, format};
    std::ptrdiff_t start = 0;
    switch (layout) {
        case Layout::packed: break;
        case Layout::padded_rows: view.row_stride += pick(random, 1, 9); break;
        case Layout::reversed_channels: view.channel_stride = -1, start = c - 1; break;
        case Layout::upside_down: view.row_stride = -w * c, start = (h - 1) * w * c; break;
        case Layout::mirrored: view.pixel_stride = -c, start = (w - 1) * c; break;
        case Layout::transposed: view.row_stride = c, view.pixel_stride = h * c; break;
        case Layout::planar: view.row_stride = w, view.pixel_stride = 1, view.channel_stride = w * h; break;
        case Layout::spaced: view.pixel_stride = c + 1, view.row_stride = w * (c + 1); break;
        case Layout::repeated: view.row_stride = 0; break;
    }
    picture.bytes.resize(static_cast<std::size_t>(h * (w * (c + 1) + 9)));
    std::uint64_t state = random();  // a plain congruential generator: the large pictures have millions of bytes
    for (auto& byte : picture.bytes) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        byte = static_cast<std::uint8_t>(state >> 56);
    }
    view.data = picture.bytes.data() + start;
    return picture;
}

// Poisoned before: every float must be written.
Floats run(const ImageView& image, Size target, LetterboxWorkspace& workspace, Isa isa) {
    Floats planes(3 * static_cast<std::size_t>(target.width) * static_cast<std::size_t>(target.height),
                  std::numeric_limits<float>::quiet_NaN());
    letterbox(image, fit(image.size, target), planes.data(), workspace, isa);
    return planes;
}

bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::string describe(const ImageView& view, Size target, int layout) {
    return std::to_string(view.size.width) + "x" + std::to_string(view.size.height) + " -> " +
           std::to_string(target.width) + "x" + std::to_string(target.height) + ", format " +
           std::to_string(int(view.format)) + ", layout " + std::to_string(layout);
}

class LetterboxPixels : public testing::TestWithParam<Isa> {
protected:
    void expect_model(const ImageView& view, Size target, int layout = 0) {
        ASSERT_TRUE(same_bits(run(view, target, workspace_, GetParam()), model(view, fit(view.size, target))))
            << describe(view, target, layout);
    }
    LetterboxWorkspace workspace_;
};
INSTANTIATE_TEST_SUITE_P(EveryIsa, LetterboxPixels, testing::ValuesIn(available_isas()),
                         [](const auto& isa) { return name(isa.param); });

// --------------------------------------------------------------------------------------------------------

struct Known {
    Size source, target, resized;
    int left, top;
};

TEST(LetterboxGeometry, KnownValues) {
    const Known cases[] = {
        {{1920, 1080}, {640, 640}, {640, 360}, 0, 140},
        {{1333, 1000}, {640, 640}, {640, 480}, 0, 80},
        {{810, 1080}, {640, 640}, {480, 640}, 80, 0},
        {{640, 480}, {640, 640}, {640, 480}, 0, 80},
        {{500, 333}, {640, 640}, {640, 426}, 0, 107},
        {{640, 427}, {640, 640}, {640, 427}, 0, 106},
        {{101, 333}, {640, 640}, {194, 640}, 223, 0},
        {{1280, 720}, {640, 384}, {640, 360}, 0, 12},
        {{4, 1}, {10, 10}, {10, 2}, 0, 4},  // 2.5 rows: half to even
        {{4, 3}, {10, 10}, {10, 8}, 0, 1},  // 7.5 rows
        {{1, 1}, {640, 640}, {640, 640}, 0, 0},
        {{32767, 1}, {640, 640}, {640, 1}, 0, 319},  // less than half a row: one all the same
        {{1, 32767}, {640, 640}, {1, 640}, 319, 0},
    };
    for (const Known& known : cases) {
        const Letterbox geometry = fit(known.source, known.target);
        SCOPED_TRACE(std::to_string(known.source.width) + "x" + std::to_string(known.source.height));
        EXPECT_EQ(geometry.source, known.source);
        EXPECT_EQ(geometry.target, known.target);
        EXPECT_EQ(geometry.resized.width, known.resized.width);
        EXPECT_EQ(geometry.resized.height, known.resized.height);
        EXPECT_EQ(geometry.left, known.left);
        EXPECT_EQ(geometry.top, known.top);
    }
}

TEST(LetterboxGeometry, RefusesSizes) {
    for (const Size size : {Size{0, 0}, Size{0, 5}, Size{5, -1}, Size{40000, 5}, Size{5, 32768}}) {
        EXPECT_THROW(fit(size, {640, 640}), InvalidInput);
        EXPECT_THROW(fit({640, 640}, size), InvalidInput);
    }
    try {
        fit({40000, 5}, {640, 640});
        FAIL();
    } catch (const InvalidInput& error) {
        EXPECT_STREQ(error.what(),
                     "the picture must measure 1 to 32767 pixels on each side, found 40000x5 (width x height)");
    }
}

TEST(LetterboxInverse, CornersAreExact) {
    Random random(1);
    for (int i = 0; i < 2000; ++i) {
        const Size source{pick(random, 1, 32767), pick(random, 1, 32767)}, target{pick(random, 1, 2000), 640};
        const Letterbox geometry = fit(source, target);
        float box[] = {float(geometry.left), float(geometry.top), float(geometry.left + geometry.resized.width),
                       float(geometry.top + geometry.resized.height)};
        to_source(geometry, box, 1);
        EXPECT_EQ(box[0], 0.f);
        EXPECT_EQ(box[1], 0.f);
        EXPECT_EQ(box[2], float(source.width));
        EXPECT_EQ(box[3], float(source.height));
    }
}

TEST(LetterboxInverse, PerAxisAndClipped) {
    const Letterbox geometry = fit({500, 333}, {640, 640});  // 640x426: the axes have different scales
    const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    float boxes[] = {320.f, 320.f, 480.f, 213.5f, -5.f, 0.f, 700.f, 640.f, nan, -infinity, infinity, nan};
    to_source(geometry, boxes, 3);
    const float expected[] = {
        250.f, float(213. * 333 / 426), 375.f, float(106.5 * 333 / 426), 0.f, 0.f, 500.f, 333.f, 0.f, 0.f, 500.f, 0.f};
    for (int i = 0; i < 12; ++i) EXPECT_EQ(boxes[i], expected[i]) << i;
    to_source(geometry, nullptr, 0);
}

// ----------------------------------------------------------------------------------------------------------

TEST_P(LetterboxPixels, RandomPictures) {
    Random random(2);
    for (int i = 0; i < 1500; ++i) {
        const int layout = pick(random, 0, kLayouts - 1);
        const Size source{pick(random, 1, 90), pick(random, 1, 90)}, target{pick(random, 1, 70), pick(random, 1, 70)};
        const PixelFormat format = kFormats[static_cast<std::size_t>(pick(random, 0, 4))];
        const Picture picture = make_picture(random, source, format, Layout(layout));
        expect_model(picture.view, target, layout);
    }
}

TEST_P(LetterboxPixels, WholeRatiosAndThinPictures) {
    Random random(3);
    for (const PixelFormat format : kFormats) {
        for (const Size source : {Size{64, 64},
                                  {128, 128},
                                  {128, 72},
                                  {128, 127},
                                  {127, 128},
                                  {192, 108},
                                  {256, 144},
                                  {320, 320},
                                  {32, 32},
                                  {64, 40},
                                  {1, 1},
                                  {1, 50},
                                  {50, 1},
                                  {2, 2},
                                  {3, 1},
                                  {5, 900},
                                  {900, 5},
                                  {20000, 3},
                                  {3, 20000}}) {
            for (int layout = 0; layout < kLayouts; ++layout) {
                expect_model(make_picture(random, source, format, Layout(layout)).view, {64, 64}, layout);
            }
        }
    }
}

// Only the first three of four channels, in either order, as in bgra[..., :3] and rgba[..., 2::-1].
TEST_P(LetterboxPixels, ThreeOfFourChannels) {
    Random random(4);
    for (int width = 1; width < 80; ++width) {
        Picture picture = make_picture(random, {width, 20}, PixelFormat::rgba, Layout::packed);
        picture.view.format = PixelFormat::rgb;
        expect_model(picture.view, {48, 48});
        picture.view.channel_stride = -1;
        picture.view.data += 2;
        expect_model(picture.view, {48, 48});
    }
}

TEST_P(LetterboxPixels, EveryValueIsDividedExactly) {
    Bytes bytes(256);
    for (int i = 0; i < 256; ++i) bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(i);
    const Floats planes = run({bytes.data(), {16, 16}, 16, 1, 1, PixelFormat::gray}, {16, 16}, workspace_, GetParam());
    for (std::size_t i = 0; i < 3 * 256; ++i) EXPECT_EQ(planes[i], float(i % 256) / 255.f);
}

TEST_P(LetterboxPixels, CameraSizesEqualScalar) {
    if (GetParam() == Isa::scalar) GTEST_SKIP() << "the reference itself";
    Random random(5);
    LetterboxWorkspace scalar;
    for (const Size source : {Size{1920, 1080}, {1280, 720}, {1333, 1000}, {641, 479}, {32767, 30}, {30, 32767}}) {
        for (const PixelFormat format : kFormats) {
            const Picture picture = make_picture(random, source, format, Layout::packed);
            EXPECT_TRUE(same_bits(run(picture.view, {640, 640}, workspace_, GetParam()),
                                  run(picture.view, {640, 640}, scalar, Isa::scalar)))
                << describe(picture.view, {640, 640}, 0);
        }
    }
}

// ----------------------------------------------------------------------------------------------------------

// Pages that may be used, between two that may not: whatever touches a byte outside ends the test program.
class GuardedPages {
public:
    explicit GuardedPages(std::size_t bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
        size_ = (bytes + page_ - 1) / page_ * page_;
        void* all = mmap(nullptr, size_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) throw std::bad_alloc();
        all_ = static_cast<std::uint8_t*>(all);
        if (mprotect(begin(), size_, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    }
    GuardedPages(const GuardedPages&) = delete;
    GuardedPages& operator=(const GuardedPages&) = delete;
    ~GuardedPages() { munmap(all_, size_ + 2 * page_); }
    std::uint8_t* begin() const { return all_ + page_; }
    std::uint8_t* end() const { return begin() + size_; }

private:
    std::size_t page_, size_ = 0;
    std::uint8_t* all_ = nullptr;
};

TEST_P(LetterboxPixels, ReadsNothingOutsideThePicture) {
    Random random(6);
    const GuardedPages pages(1 << 16);
    for (const Size source :
         {Size{1, 1}, {2, 1}, {3, 3}, {5, 4}, {17, 9}, {48, 48}, {96, 96}, {96, 50}, {144, 60}, {99, 70}}) {
        for (const PixelFormat format : kFormats) {
            const std::ptrdiff_t c = channels(format);
            const std::ptrdiff_t bytes = c * source.width * source.height;
            for (const bool at_end : {false, true}) {
                for (const bool reversed : {false, true}) {
                    std::uint8_t* start = at_end ? pages.end() - bytes : pages.begin();
                    for (std::ptrdiff_t i = 0; i < bytes; ++i) start[i] = static_cast<std::uint8_t>(random());
                    ImageView view{start, source, c * source.width, c, 1, format};
                    if (reversed) view.channel_stride = -1, view.data += c - 1;
                    expect_model(view, {48, 48});
                }
            }
        }
        // Three of four channels: the fourth byte of the last pixel is not the picture's.
        const std::ptrdiff_t bytes = 4 * source.width * source.height - 1;
        expect_model({pages.end() - bytes, source, 4 * source.width, 4, 1, PixelFormat::bgr}, {48, 48});
    }
}

TEST_P(LetterboxPixels, WritesNothingOutsideThePlanes) {
    Random random(7);
    for (const Size target : {Size{33, 47}, {47, 33}, {1, 1}, {64, 64}}) {
        const std::size_t count = 3 * static_cast<std::size_t>(target.width * target.height);
        const GuardedPages pages(count * sizeof(float));
        for (const Size source : {Size{66, 94}, {33, 33}, {100, 30}, {7, 99}, {128, 128}}) {
            const Picture picture = make_picture(random, source, PixelFormat::bgr, Layout::packed);
            float* planes = reinterpret_cast<float*>(pages.end()) - count;
            letterbox(picture.view, fit(source, target), planes, workspace_, GetParam());
            EXPECT_TRUE(same_bits(Floats(planes, planes + count), model(picture.view, fit(source, target))));
        }
    }
}

TEST_P(LetterboxPixels, AllocatesNothingAfterTheFirstFrame) {
    Random random(8);
    for (const Layout layout : {Layout::packed, Layout::transposed}) {
        const Picture large = make_picture(random, {200, 150}, PixelFormat::bgr, layout);
        const Picture small = make_picture(random, {50, 70}, PixelFormat::gray, layout);
        const Letterbox large_geometry = fit(large.view.size, {64, 64}),
                        small_geometry = fit(small.view.size, {64, 64});
        Floats planes(3 * 64 * 64);
        const auto frames = [&] {
            letterbox(large.view, large_geometry, planes.data(), workspace_, GetParam());
            letterbox(small.view, small_geometry, planes.data(), workspace_, GetParam());
        };
        const long before_first = edgeyolo_test::allocations();
        frames();
        const long before = edgeyolo_test::allocations();
        for (int i = 0; i < 10; ++i) frames();
        EXPECT_EQ(edgeyolo_test::allocations(), before);
        // The second layout is the first to need room for copied rows: each first frame shows that the counter counts.
        EXPECT_GT(before, before_first);
    }
}

TEST(LetterboxErrors, RefusesWhatCannotBeUsed) {
    Bytes bytes(300);
    Floats planes(3 * 64 * 64);
    LetterboxWorkspace workspace;
    ImageView view{bytes.data(), {10, 10}, 30, 3, 1, PixelFormat::bgr};
    const Letterbox geometry = fit(view.size, {64, 64});
    Letterbox moved = geometry;
    moved.left = 1;
    EXPECT_THROW(letterbox(view, moved, planes.data(), workspace, Isa::scalar), InvalidInput);
    EXPECT_THROW(letterbox(view, fit({5, 10}, {64, 64}), planes.data(), workspace, Isa::scalar), InvalidInput);
    EXPECT_THROW(letterbox(view, geometry, nullptr, workspace, Isa::scalar), InvalidInput);
    const Isa absent = best_isa() == Isa::neon ? Isa::avx2 : Isa::neon;
    EXPECT_THROW(letterbox(view, geometry, planes.data(), workspace, absent), InvalidInput);
    view.data = nullptr;
    EXPECT_THROW(letterbox(view, geometry, planes.data(), workspace, Isa::scalar), InvalidInput);
}

TEST(LetterboxErrors, WorkspacesAreCounted) {
    const long before = live().letterbox_workspaces;
    {
        const LetterboxWorkspace workspace;
        EXPECT_EQ(live().letterbox_workspaces, before + 1);
    }
    EXPECT_EQ(live().letterbox_workspaces, before);
}

}  // namespace
}  // namespace edgeyolo
