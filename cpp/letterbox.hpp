// Letterbox: fit a picture into the network's input without changing its aspect ratio, and the way back for boxes.
//
// Geometry as Ultralytics' LetterBox(auto=False, center=True, scaleup=True): scale r = min(H/h, W/w), the resized
// picture round(w*r) x round(h*r) (half to even, at least 1), left = round((W - rw)/2 - 0.1), top alike. Border value
// 114. Resampling as OpenCV's INTER_LINEAR on uint8, byte for byte: 11-bit fixed point, the exact 2:1 case as an area
// mean.
#pragma once
#include <memory>
#include "image.hpp"
#include "live.hpp"
#include "simd.hpp"

namespace edgeyolo {

struct Letterbox {
    Size source;   // the picture, pixels
    Size target;   // the network's input, pixels
    Size resized;  // the picture inside the input, pixels
    int left = 0;  // border at the left and at the top, input pixels
    int top = 0;

    // The exact inverse, per axis, of the mapping that the resampling uses:
    // x_source = (x_input - left) * source.width / resized.width; y alike.
    double scale_x() const { return double(source.width) / resized.width; }
    double scale_y() const { return double(source.height) / resized.height; }
    bool same_border(const Letterbox& other) const {
        return target == other.target && resized == other.resized && left == other.left && top == other.top;
    }
};

// Throws InvalidInput for a size below 1x1 or above 32767 on a side.
Letterbox fit(Size source, Size target);

// Box corners from input pixels to source pixels, clipped to [0, width] x [0, height]. A box outside the picture, in the
// border of the input, becomes one without area on the picture's edge.
// boxes: count x 4 floats, xyxy, changed in place. A NaN coordinate becomes 0.
void to_source(const Letterbox& geometry, float* boxes, int count);

// Scratch memory and the plan of one geometry, kept from frame to frame: no allocation while sizes stay the same.
// It holds a few rows, never a picture. One workspace serves one thread at a time.
class LetterboxWorkspace {
public:
    LetterboxWorkspace();
    ~LetterboxWorkspace();
    LetterboxWorkspace(const LetterboxWorkspace&) = delete;
    LetterboxWorkspace& operator=(const LetterboxWorkspace&) = delete;

    struct State;  // known to letterbox.cpp alone
    State& state() { return *state_; }

private:
    std::unique_ptr<State> state_;
    Live<&LiveCounters::letterbox_workspaces> live_;
};

// Picture -> float32 RGB planes in [0, 1] (value / 255), channels x height x width, the whole target written, border
// included. `planes` holds 3 * target.width * target.height floats. Grey is repeated into the three planes, alpha is
// dropped. Every Isa writes the same bits. Nothing outside the view's colour bytes is read. Throws InvalidInput for a
// null pointer, a geometry that was not made for this image, or an Isa that this build lacks.
// `before`: the geometry that `planes` was last written with, when nobody else has written there since: a border that
// lies where this one does is then left as it is, which for a 16:9 picture in a square saves almost half of the writing.
void letterbox(const ImageView& image, const Letterbox& geometry, float* planes, LetterboxWorkspace& workspace, Isa isa,
               const Letterbox* before = nullptr);

}  // namespace edgeyolo
