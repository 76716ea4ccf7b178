#include "letterbox.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>
#include <vector>
#include "error.hpp"
#include "letterbox_kernels.hpp"
#include "letterbox_math.hpp"
#include "letterbox_plan.hpp"

namespace edgeyolo {
namespace {

using letterbox_kernels::Columns;
using letterbox_kernels::Kernels;
using letterbox_kernels::OutputRows;
using letterbox_kernels::PixelLayout;
using letterbox_kernels::SourceRow;

constexpr int kLargestSide = 32767;

std::string text(Size size) {
    return std::to_string(size.width) + "x" + std::to_string(size.height);
}

void check_size(Size size, const char* what) {
    const bool ok = size.width >= 1 && size.height >= 1 && size.width <= kLargestSide && size.height <= kLargestSide;
    if (ok) return;  // the message is built for an error alone
    throw InvalidInput(std::string(what) + " must measure 1 to " + std::to_string(kLargestSide) +
                       " pixels on each side, found " + text(size) + " (width x height)");
}

// Half to even, as Python's round().
int round_to_int(double value) {
    return static_cast<int>(std::nearbyint(value));
}

// One coordinate: input pixels to source pixels. The product comes first, so that corners come out exact.
float inverse(float input, int border, int source, int resized) {
    const double position = (static_cast<double>(input) - border) * source / resized;
    if (!(position > 0.)) return 0.f;  // NaN too
    return static_cast<float>(std::min(position, static_cast<double>(source)));
}

const Kernels& kernels_for(Isa isa) {
    switch (isa) {
        case Isa::scalar: return letterbox_kernels::scalar;
#if defined(__x86_64__)
        case Isa::avx2: return letterbox_kernels::avx2;
#elif defined(__aarch64__)
        case Isa::neon: return letterbox_kernels::neon;
#endif
        default: break;
    }
    throw InvalidInput(std::string("this build has no ") + name(isa) + " kernels; use best_isa()");
}

// Gives the rows of a view as interleaved pixels that the kernels can read. A view whose pixels already lie that way is
// read in place; of any other one row at a time is copied.
class RowReader {
public:
    explicit RowReader(const ImageView& image) : image_(image) {
        const bool grey = image.format == PixelFormat::gray;
        const bool reversed = !grey && image.channel_stride == -1;
        const bool touching = grey || image.channel_stride == 1 || reversed;
        const bool packed = grey ? image.pixel_stride == 1 : image.pixel_stride == 3 || image.pixel_stride == 4;
        in_place_ = touching && packed && image.size.width > 1;  // a pair needs two pixels

        layout_.bytes = in_place_ ? static_cast<int>(image.pixel_stride) : grey ? 1 : 3;
        const bool rgb = image.format == PixelFormat::rgb || image.format == PixelFormat::rgba;
        const bool red_first = rgb != (in_place_ && reversed);
        for (int c = 0; c < 3; ++c) layout_.rgb[c] = grey ? 0 : red_first ? c : 2 - c;
        // Backwards, the third channel of a pixel has the lowest address.
        base_ = in_place_ && reversed ? image.data - 2 : image.data;
    }

    const PixelLayout& layout() const { return layout_; }
    std::size_t scratch_bytes() const {
        return in_place_ ? 0 : static_cast<std::size_t>(std::max(image_.size.width, 2) * layout_.bytes);
    }
    // Row `y`; row `next` will be read after it. Valid until `scratch`, of scratch_bytes(), is written again.
    SourceRow row(int y, int next, std::uint8_t* scratch) const {
        const std::uint8_t* start = base_ + y * image_.row_stride;
        if (in_place_) return {start, base_ + next * image_.row_stride};
        gather(start, scratch);
        return {scratch, scratch};
    }

private:
    void gather(const std::uint8_t* from, std::uint8_t* to) const {
        const int count = layout_.channels();
        for (int x = 0; x < std::max(image_.size.width, 2); ++x) {
            const std::uint8_t* pixel = from + std::min(x, image_.size.width - 1) * image_.pixel_stride;
            for (int c = 0; c < count; ++c) *to++ = pixel[c * image_.channel_stride];
        }
    }

    ImageView image_;
    PixelLayout layout_{};
    const std::uint8_t* base_ = nullptr;
    bool in_place_ = false;
};

// A source row whose columns are blended, and its number.
struct BlendedRow {
    std::vector<std::int16_t> values;
    int row = -1;
};

// The part of the planes that the picture covers; the border is written by the side.
class Output {
public:
    Output(const Letterbox& geometry, float* planes)
        : geometry_(geometry),
          planes_(planes),
          plane_size_(static_cast<std::size_t>(geometry.target.width) *
                      static_cast<std::size_t>(geometry.target.height)) {}

    // The start of picture row `y` in each plane.
    OutputRows row(int y) const {
        float* first = planes_ + static_cast<std::size_t>(geometry_.top + y) * width() + geometry_.left;
        return {{first, first + plane_size_, first + 2 * plane_size_}};
    }
    // The kernels write grey once.
    void repeat_grey(int y) const {
        const OutputRows out = row(y);
        std::copy_n(out.plane[0], geometry_.resized.width, out.plane[1]);
        std::copy_n(out.plane[0], geometry_.resized.width, out.plane[2]);
    }
    void fill_border() const {
        const float border = to_unit(kBorder);
        const auto left = static_cast<std::size_t>(geometry_.left);
        const std::size_t picture = static_cast<std::size_t>(geometry_.resized.width);
        const std::size_t right = width() - left - picture;
        for (int c = 0; c < 3; ++c) {
            float* plane = planes_ + static_cast<std::size_t>(c) * plane_size_;
            float* begin = plane + static_cast<std::size_t>(geometry_.top) * width();
            float* end = begin + static_cast<std::size_t>(geometry_.resized.height) * width();
            std::fill(plane, begin, border);
            std::fill(end, plane + plane_size_, border);
            if (left + right == 0) continue;
            for (float* line = begin; line != end; line += width()) {
                std::fill_n(line, left, border);
                std::fill_n(line + left + picture, right, border);
            }
        }
    }

private:
    std::size_t width() const { return static_cast<std::size_t>(geometry_.target.width); }

    const Letterbox& geometry_;
    float* planes_;
    std::size_t plane_size_;
};

}  // namespace

struct LetterboxWorkspace::State {
    Plan plan;
    std::array<std::vector<std::uint8_t>, 2> gathered;
    std::array<BlendedRow, 2> blended;
};

LetterboxWorkspace::LetterboxWorkspace() : state_(std::make_unique<State>()) {}
LetterboxWorkspace::~LetterboxWorkspace() = default;

Letterbox fit(Size source, Size target) {
    check_size(source, "the picture");
    check_size(target, "the network's input");
    const double scale =
        std::min(static_cast<double>(target.height) / source.height, static_cast<double>(target.width) / source.width);
    Letterbox geometry;
    geometry.source = source;
    geometry.target = target;
    geometry.resized.width = std::max(1, round_to_int(source.width * scale));
    geometry.resized.height = std::max(1, round_to_int(source.height * scale));
    geometry.left = round_to_int((target.width - geometry.resized.width) / 2. - 0.1);
    geometry.top = round_to_int((target.height - geometry.resized.height) / 2. - 0.1);
    return geometry;
}

void to_source(const Letterbox& geometry, float* boxes, int count) {
    for (float* corner = boxes; corner != boxes + 4 * static_cast<std::ptrdiff_t>(count); corner += 2) {
        corner[0] = inverse(corner[0], geometry.left, geometry.source.width, geometry.resized.width);
        corner[1] = inverse(corner[1], geometry.top, geometry.source.height, geometry.resized.height);
    }
}

namespace {

// One picture on its way: where rows come from, who works on them, where they go.
class Resampling {
public:
    Resampling(const RowReader& reader, const Kernels& kernels, const Output& output, LetterboxWorkspace::State& state)
        : reader_(reader), kernels_(kernels), output_(output), state_(state), columns_(state.plan.columns()) {
        for (auto& scratch : state.gathered) scratch.resize(reader.scratch_bytes());
        for (auto& blended : state.blended) {
            blended.row = -1;
            blended.values.resize(static_cast<std::size_t>(reader.layout().channels() * columns_.padded));
        }
    }

    void run() {
        for (int y = 0; y < state_.plan.resized.height; ++y) {
            switch (state_.plan.method) {
                case Method::pick: pick(y); break;
                case Method::mean: mean(y); break;
                case Method::blend: blend(y); break;
            }
            if (reader_.layout().channels() == 1) output_.repeat_grey(y);
        }
    }

private:
    const Taps& taps(int y) const { return state_.plan.rows[static_cast<std::size_t>(y)]; }
    int last() const { return state_.plan.resized.height - 1; }

    void pick(int y) const {
        const SourceRow row = reader_.row(chosen(y), chosen(std::min(y + 1, last())), state_.gathered[0].data());
        kernels_.pick(row, reader_.layout(), columns_, output_.row(y));
    }
    int chosen(int y) const { return taps(y).first_weight ? taps(y).first : taps(y).second; }

    void mean(int y) const {
        const int row = 2 * y, next = 2 * std::min(y + 1, last());
        const SourceRow upper = reader_.row(row, next, state_.gathered[0].data());
        const SourceRow lower = reader_.row(row + 1, next + 1, state_.gathered[1].data());
        kernels_.mean(upper, lower, reader_.layout(), columns_, output_.row(y));
    }

    // Source rows only move down, so the last two blended rows are all that can be needed again.
    void blend(int y) {
        auto& [upper, lower] = state_.blended;
        if (upper.row != taps(y).first) std::swap(upper, lower);
        fill(upper, taps(y).first, y);
        const bool needs_lower = taps(y).second != taps(y).first && taps(y).second_weight != 0;
        if (needs_lower) fill(lower, taps(y).second, y);
        const std::int16_t* above = upper.values.data();
        const std::int16_t* below = needs_lower ? lower.values.data() : above;
        kernels_.blend_rows(above, below, taps(y), reader_.layout(), columns_, output_.row(y));
    }

    void fill(BlendedRow& blended, int row, int y) const {
        if (blended.row == row) return;
        const SourceRow source = reader_.row(row, row_after(row, y), state_.gathered[0].data());
        kernels_.blend_columns(source, reader_.layout(), columns_, blended.values.data());
        blended.row = row;
    }
    // The source row that is needed after `row`, which output row `y` needs.
    int row_after(int row, int y) const {
        const Taps& below = taps(std::min(y + 1, last()));
        for (const int candidate : {taps(y).second, below.first, below.second}) {
            if (candidate > row) return candidate;
        }
        return row;
    }

    const RowReader& reader_;
    const Kernels& kernels_;
    const Output& output_;
    LetterboxWorkspace::State& state_;
    const Columns columns_;
};

// A geometry written by hand could make the kernels write outside the planes.
void check_geometry(const ImageView& image, const Letterbox& geometry) {
    const Letterbox expected = fit(image.size, geometry.target);
    const bool same = geometry.source == expected.source && geometry.resized == expected.resized &&
                      geometry.left == expected.left && geometry.top == expected.top;
    if (same) return;
    throw InvalidInput("the geometry was made for a picture of " + text(geometry.source) + ", found one of " +
                       text(image.size) + "; use fit(image.size, target)");
}

}  // namespace

void letterbox(const ImageView& image, const Letterbox& geometry, float* planes, LetterboxWorkspace& workspace, Isa isa,
               const Letterbox* before) {
    const Kernels& kernels = kernels_for(isa);
    check_geometry(image, geometry);
    check(image.data != nullptr, "the picture has no pixels (null pointer)");
    check(planes != nullptr, "the output has no memory (null pointer)");

    LetterboxWorkspace::State& state = workspace.state();
    const RowReader reader(image);
    if (!state.plan.serves(image.size, geometry.resized, reader.layout().bytes)) {
        // Emptied first: should an allocation fail, the old plan must not seem to serve.
        state.plan = make_plan(std::exchange(state.plan, {}), image.size, geometry.resized, reader.layout().bytes);
    }
    const Output output(geometry, planes);
    if (!before || !geometry.same_border(*before)) output.fill_border();
    Resampling(reader, kernels, output, state).run();
}

}  // namespace edgeyolo
