#include "frame.hpp"

#include <cstdlib>
#include <string>
#include "error.hpp"

namespace edgeyolo {
namespace {

constexpr int largest_side = 32767;

void check_size(Size size) {
    if (size.width < 1 || size.height < 1 || size.width > largest_side || size.height > largest_side)
        throw InvalidInput("a frame is 1 to 32767 pixels wide and high, found " + std::to_string(size.width) + " x " +
                           std::to_string(size.height));
}

// Bytes from the lowest address that is read to behind the highest one, relative to a plane's first pixel.
struct Reach {
    std::ptrdiff_t low = 0, high = 0;
    void axis(int count, std::ptrdiff_t stride) {
        constexpr std::ptrdiff_t most = std::ptrdiff_t{1} << 40;
        if (std::abs(stride) > most) throw InvalidInput("a stride of a frame is beyond 1 TiB");
        (stride < 0 ? low : high) += (count - 1) * stride;
    }
};

void check_memory(const cuda::Device& device, cuda::DevicePtr pointer, Reach reach, const char* plane) {
    using Kind = cuda::PointerInfo::Kind;
    if (pointer == 0) throw InvalidInput(std::string("the ") + plane + " of a GPU frame is a null pointer");
    const cuda::PointerInfo info = cuda::pointer_info(device, pointer);
    const bool known = info.kind == Kind::device || info.kind == Kind::managed;
    if (!known)
        throw InvalidInput(std::string("the ") + plane +
                           " of a GPU frame is in host memory: hand it in as an ordinary array or by a frame buffer");
    if (info.device != device.ordinal)
        throw InvalidInput("the frame is on GPU " + std::to_string(info.device) + ", the detector on GPU " +
                           std::to_string(device.ordinal) + ": copy the frame there, or load the detector on GPU " +
                           std::to_string(info.device));
    if (info.bytes == 0) return;  // the driver does not tell
    const auto first = static_cast<std::int64_t>(pointer - info.begin) + reach.low;
    const auto behind = static_cast<std::int64_t>(pointer - info.begin) + reach.high + 1;
    if (first < 0 || behind > static_cast<std::int64_t>(info.bytes))
        throw InvalidInput(std::string("the ") + plane + " of a GPU frame reaches beyond its memory of " +
                           std::to_string(info.bytes) + " bytes: check its size and strides");
}

void check_device_image(const DeviceImage& image, const cuda::Device& device) {
    check_size(image.size);
    Reach reach;
    reach.axis(image.size.height, image.row_stride);
    if (image.chroma == 0) {
        reach.axis(image.size.width, image.pixel_stride);
        reach.axis(channels(image.format), image.channel_stride);
        check_memory(device, image.pixels, reach, "pixels");
        return;
    }
    reach.axis(image.size.width, 1);
    check_memory(device, image.pixels, reach, "Y plane");
    Reach chroma;
    chroma.axis((image.size.height + 1) / 2, image.chroma_stride);
    chroma.axis((image.size.width + 1) / 2 * 2, 1);
    check_memory(device, image.chroma, chroma, "UV plane");
}

}  // namespace

FrameBuffer::FrameBuffer(const cuda::DeviceRef& device, Size size, PixelFormat format)
    : size_(size), format_(format), device_(device->ordinal) {
    check_size(size);
    memory_ = cuda::PinnedBuffer(
        device, static_cast<std::size_t>(size.width) * static_cast<std::size_t>(size.height) * channels(format));
}

ImageView FrameBuffer::view() const {
    const std::ptrdiff_t pixel = channels(format_);
    return {data(), size_, pixel * size_.width, pixel, 1, format_};
}

Size size_of(const Frame& frame) {
    if (const auto* image = std::get_if<ImageView>(&frame)) return image->size;
    if (const auto* buffer = std::get_if<std::shared_ptr<FrameBuffer>>(&frame))
        return *buffer ? (*buffer)->size() : Size{};
    return std::get<DeviceImage>(frame).size;
}

void check_frame(const Frame& frame, const cuda::Device& device) {
    check_size(size_of(frame));
    if (const auto* image = std::get_if<ImageView>(&frame)) {
        check(image->data != nullptr, "a frame's pixels are a null pointer");
    } else if (const auto* buffer = std::get_if<std::shared_ptr<FrameBuffer>>(&frame)) {
        if ((*buffer)->device() != device.ordinal)
            throw InvalidInput("the frame buffer belongs to GPU " + std::to_string((*buffer)->device()) +
                               ", the detector is on GPU " + std::to_string(device.ordinal) +
                               ": use a buffer of this detector");
    } else {
        check_device_image(std::get<DeviceImage>(frame), device);
    }
}

}  // namespace edgeyolo
