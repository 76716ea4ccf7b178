// Views of pictures. A view owns nothing: the caller keeps the pixels alive while it is used.
#pragma once
#include <cstddef>
#include <cstdint>

namespace edgeyolo {

struct Size {
    int width = 0;
    int height = 0;
    friend bool operator==(Size a, Size b) { return a.width == b.width && a.height == b.height; }
    friend bool operator!=(Size a, Size b) { return !(a == b); }
};

// The order of the channels in memory.
enum class PixelFormat {
    bgr,
    rgb,
    gray,
    bgra,
    rgba
};

constexpr int channels(PixelFormat format) {
    return format == PixelFormat::gray ? 1 : format == PixelFormat::bgra || format == PixelFormat::rgba ? 4 : 3;
}

// uint8 pixels in host memory, any strides: channel c of pixel (x, y) is the byte
// data[y * row_stride + x * pixel_stride + c * channel_stride]. Strides are in bytes and may be negative
// (a flipped NumPy view). Channels are counted in the order that `format` names.
struct ImageView {
    const std::uint8_t* data = nullptr;
    Size size;
    std::ptrdiff_t row_stride = 0;
    std::ptrdiff_t pixel_stride = 0;
    std::ptrdiff_t channel_stride = 1;
    PixelFormat format = PixelFormat::bgr;
};

}  // namespace edgeyolo
