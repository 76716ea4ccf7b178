// The letterbox's arithmetic written anew, pixel by pixel from the definitions, sharing nothing with the code under
// test. (That the arithmetic is OpenCV's is tested from Python, against cv2.)
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "letterbox.hpp"

namespace edgeyolo_test {

using Floats = std::vector<float>;
using edgeyolo::ImageView;
using edgeyolo::Letterbox;
using edgeyolo::PixelFormat;
using edgeyolo::Size;

// ---- the model
// -------------------------------------------------------------------------------------------------------

// Red, green or blue (0, 1, 2) of one source pixel, straight from the definition of ImageView.
inline int source_value(const ImageView& image, int x, int y, int colour) {
    int channel = colour;
    if (image.format == PixelFormat::gray) channel = 0;
    if (image.format == PixelFormat::bgr || image.format == PixelFormat::bgra) channel = 2 - colour;
    return image.data[y * image.row_stride + x * image.pixel_stride + channel * image.channel_stride];
}

// Where an output pixel centre falls in the source, in the precision that OpenCV uses.
inline float source_position(int index, int source, int resized) {
    const double inverse_scale = double(resized) / source;
    return float((index + 0.5) * (1.0 / inverse_scale) - 0.5);
}

inline int fixed(float share) {
    return int(std::nearbyint(share * 2048.f));
}

// The two columns of row `y` blended, before the rows are: 15 bits.
inline int model_columns(const ImageView& image, int output_x, int resized_width, int y, int colour) {
    const float position = source_position(output_x, image.size.width, resized_width);
    const int last = image.size.width - 1;
    if (position < 0) return source_value(image, 0, y, colour) * 128;
    if (int(position) >= last) return source_value(image, last, y, colour) * 128;
    const int x = int(position);
    const float share = position - float(x);
    return (source_value(image, x, y, colour) * fixed(1 - share) +
            source_value(image, x + 1, y, colour) * fixed(share)) /
           16;
}

inline int model_pixel(const ImageView& image, Size resized, int x, int y, int colour) {
    if (image.size.width == 2 * resized.width && image.size.height == 2 * resized.height) {
        int sum = 2;
        for (const int i : {0, 1, 2, 3}) sum += source_value(image, 2 * x + i % 2, 2 * y + i / 2, colour);
        return sum / 4;
    }
    const float position = source_position(y, image.size.height, resized.height);
    const float floor = std::floor(position);
    const int last = image.size.height - 1;
    const int upper = std::min(std::max(int(floor), 0), last), lower = std::min(std::max(int(floor) + 1, 0), last);
    const int above = model_columns(image, x, resized.width, upper, colour);
    const int below = model_columns(image, x, resized.width, lower, colour);
    return (above * fixed(1 - (position - floor)) / 65536 + below * fixed(position - floor) / 65536 + 2) / 4;
}

inline Floats model(const ImageView& image, const Letterbox& geometry) {
    Floats planes;
    for (int colour = 0; colour < 3; ++colour) {
        for (int y = -geometry.top; y < geometry.target.height - geometry.top; ++y) {
            for (int x = -geometry.left; x < geometry.target.width - geometry.left; ++x) {
                const bool inside = x >= 0 && y >= 0 && x < geometry.resized.width && y < geometry.resized.height;
                planes.push_back(float(inside ? model_pixel(image, geometry.resized, x, y, colour) : 114) / 255.f);
            }
        }
    }
    return planes;
}

}  // namespace edgeyolo_test
