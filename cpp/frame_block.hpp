// The parameter block of one frame: everything that differs from frame to frame, in one fixed-size record.
//
// The pipeline fills it in pinned memory and copies it to a fixed device address before each launch. Kernels take that
// address and fixed buffers, nothing else, so a frame of another size, format or place needs no new graph.
// Plain data with the same layout on host and device. The host may write the next block once the frame's event is done.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace edgeyolo {

enum class FrameLayout : std::int32_t {
    packed = 0,  // interleaved uint8 pixels
    nv12 = 1     // a plane of Y, then a plane of U and V at half size; 8 bits, limited range (16..235)
};

// How NV12 becomes RGB. Cameras and codecs say which one they use; 709 is usual from 720 lines up.
enum class YuvMatrix : std::int32_t {
    bt601 = 0,
    bt709 = 1
};

struct FrameBlock {
    static constexpr int max_classes = 2048;  // classes that the filter can name

    // The picture. Addresses are device addresses. Channel c of pixel (x, y) is the byte
    // pixels[y * row_stride + x * pixel_stride + c], c one of red, green, blue (all three equal for grey).
    // NV12: Y at pixels[y * row_stride + x]; U, V at chroma[(y / 2) * chroma_stride + (x / 2) * 2 + {0, 1}].
    std::uint64_t pixels;
    std::uint64_t chroma;
    std::int64_t row_stride;  // bytes; may be negative
    std::int64_t chroma_stride;
    std::int32_t pixel_stride;  // bytes
    std::int32_t red, green, blue;
    FrameLayout layout;
    YuvMatrix matrix;

    // Letterbox geometry (letterbox.hpp), pixels. The network's input size is a constant of the launch.
    std::int32_t source_width, source_height;
    std::int32_t resized_width, resized_height;
    std::int32_t left, top;
    // axis_step() of letterbox_math.hpp. Computed on the host: double division is slow on most GPUs.
    double step_x, step_y;

    // Postprocessing. max_det is at most the rows of the result buffer.
    float conf;
    float iou;  // iou_threshold() of nms.hpp
    std::int32_t max_det;
    std::int32_t agnostic;                    // 1: boxes of all classes compete
    std::int32_t filtered;                    // 1: only classes whose bit is set in `allowed` are kept
    std::uint32_t allowed[max_classes / 32];  // bit c % 32 of word c / 32
    std::uint32_t reserved;
};

static_assert(std::is_trivially_copyable_v<FrameBlock> && std::is_standard_layout_v<FrameBlock>);
static_assert(sizeof(FrameBlock) == 376 && sizeof(FrameBlock) % 8 == 0, "one layout on host and device");

}  // namespace edgeyolo
