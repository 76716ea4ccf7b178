// The three kinds of frames that the GPU pipeline takes, by where the pixels are.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <variant>
#include "cuda.hpp"
#include "frame_block.hpp"
#include "image.hpp"

namespace edgeyolo {

// Page-locked memory for one frame, handed out to be written by the caller: the GPU copies from it directly (on an
// integrated GPU it reads it in place). Rows are contiguous, channels interleaved.
// Between submit() and the end of the frame it must not be written: the GPU may still be reading. Submitting it again
// in that time is an InvalidInput. It may outlive its pipeline, and holds its memory until it dies.
class FrameBuffer {
public:
    // Throws InvalidInput for a size that is not 1 to 32767, DeviceError when there is no memory.
    FrameBuffer(const cuda::DeviceRef& device, Size size, PixelFormat format);
    FrameBuffer(const FrameBuffer&) = delete;
    FrameBuffer& operator=(const FrameBuffer&) = delete;

    std::uint8_t* data() const noexcept { return memory_.data(); }
    Size size() const noexcept { return size_; }
    PixelFormat format() const noexcept { return format_; }
    std::size_t bytes() const noexcept { return memory_.bytes(); }
    ImageView view() const;
    const cuda::PinnedBuffer& memory() const noexcept { return memory_; }
    int device() const noexcept { return device_; }

    // The pipeline's record of who reads it now.
    std::mutex mutex;
    std::weak_ptr<void> reader;

private:
    Size size_;
    PixelFormat format_;
    int device_;
    cuda::PinnedBuffer memory_;
};

// A picture in device memory, read where it is. Channel c of pixel (x, y) is the byte
// pixels + y * row_stride + x * pixel_stride + c * channel_stride; strides in bytes, they may be negative.
// With `chroma` it is NV12: `pixels` is the Y plane (row_stride), `chroma` the plane of U and V (chroma_stride), and
// format, pixel_stride and channel_stride do not count.
struct DeviceImage {
    cuda::DevicePtr pixels = 0;
    Size size;
    std::ptrdiff_t row_stride = 0;
    std::ptrdiff_t pixel_stride = 0;
    std::ptrdiff_t channel_stride = 1;
    PixelFormat format = PixelFormat::bgr;

    cuda::DevicePtr chroma = 0;
    std::ptrdiff_t chroma_stride = 0;
    YuvMatrix matrix = YuvMatrix::bt709;

    // The stream that wrote the picture, when it may still be at it: ours waits for what is on it at submit().
    // CUDA's numbers count too: 1 is the legacy default stream, 2 the per-thread one. Empty: the picture is ready.
    std::optional<cuda::StreamHandle> producer;
    // Held until the frame is done, then dropped, on any thread and with no lock of ours held.
    std::shared_ptr<const void> keep;
};

// ImageView: host memory, read before submit() returns, any strides.
using Frame = std::variant<ImageView, std::shared_ptr<FrameBuffer>, DeviceImage>;

Size size_of(const Frame& frame);

// Throws InvalidInput for an empty frame, a null pointer, or memory that this device cannot read where it is (host
// memory, another device's, a picture that reaches beyond its allocation). Wants a ContextGuard of `device`.
void check_frame(const Frame& frame, const cuda::Device& device);

}  // namespace edgeyolo
