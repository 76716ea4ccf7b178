#include "frame_upload.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include "error.hpp"
#include "letterbox_math.hpp"

namespace edgeyolo {
namespace {

// Copying to pinned memory and uploading overlap in steps of this size; helpers take such pieces.
constexpr std::size_t piece_bytes = 256 * 1024;
// Waking a helper takes as long as copying about two pieces.
constexpr int worth_sharing = 4;
constexpr std::size_t pixel_bytes = 4;

std::size_t aligned(std::size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

std::size_t row_bytes(const ImageView& image) {
    return static_cast<std::size_t>(image.size.width) * static_cast<std::size_t>(channels(image.format));
}

std::size_t packed_bytes(const ImageView& image) {
    return aligned(row_bytes(image) * static_cast<std::size_t>(image.size.height));
}

// How a picture stands in memory once its rows lie end to end.
struct Packed {
    ImageView view;
    std::ptrdiff_t first = 0;  // where pixel (0, 0) starts in its row
    bool dense = false;        // the source's rows have no gaps, so that whole rows are copied, mirrored ones too
};

Packed pack(const ImageView& image) {
    const int count = channels(image.format);
    Packed packed;
    packed.view = image;
    packed.view.row_stride = static_cast<std::ptrdiff_t>(row_bytes(image));
    const std::ptrdiff_t across = (image.size.width - 1) * image.pixel_stride;
    const std::ptrdiff_t deep = (count - 1) * image.channel_stride;
    const std::ptrdiff_t span = std::abs(across) + std::abs(deep) + 1;
    packed.dense = span == packed.view.row_stride && std::abs(deep) == count - 1;
    if (packed.dense) {
        packed.first = -(std::min<std::ptrdiff_t>(across, 0) + std::min<std::ptrdiff_t>(deep, 0));
    } else {
        packed.view.pixel_stride = count;
        packed.view.channel_stride = 1;
    }
    return packed;
}

void copy_row(const ImageView& image, const Packed& packed, int y, std::uint8_t* to) {
    const std::uint8_t* row = image.data + y * image.row_stride;
    if (packed.dense) {
        std::memcpy(to, row - packed.first, static_cast<std::size_t>(packed.view.row_stride));
        return;
    }
    const int count = channels(image.format);
    for (int x = 0; x < image.size.width; ++x)
        for (int c = 0; c < count; ++c) *to++ = row[x * image.pixel_stride + c * image.channel_stride];
}

void copy_rows(const ImageView& image, const Packed& packed, int first, int rows, std::uint8_t* to) {
    const std::ptrdiff_t row = packed.view.row_stride;
    if (packed.dense && image.row_stride == row)
        std::memcpy(to, image.data + first * row - packed.first, static_cast<std::size_t>(rows * row));
    else
        for (int y = 0; y < rows; ++y) copy_row(image, packed, first + y, to + y * row);
}

// The rows of a picture in equal pieces.
struct Pieces {
    Pieces(int height, std::size_t row) : height_(height) {
        const std::size_t wanted = static_cast<std::size_t>(height) * row / piece_bytes;
        count = static_cast<int>(std::clamp<std::size_t>(wanted, 1, CopyCrew::max_pieces));
        count = std::min(count, height);
    }
    int first(int piece) const { return static_cast<int>(static_cast<std::int64_t>(height_) * piece / count); }

    int count = 1;

private:
    int height_;
};

}  // namespace

FrameUpload::FrameUpload(const cuda::DeviceRef& device, int places, const FrameBlock& settings)
    : device_(device), places_(places), settings_(settings), crew_(CopyCrew::hire()) {
    const std::size_t bytes = static_cast<std::size_t>(places) * sizeof(FrameBlock) + pixel_bytes;
    host_blocks_ = cuda::PinnedBuffer(device, bytes);
    blocks_ = cuda::DeviceBuffer(device, bytes);
    producer_ = cuda::Event(device);
    std::memset(host_blocks_.data() + bytes - pixel_bytes, kBorder, pixel_bytes);
}

void FrameUpload::make_room(const std::vector<Frame>& frames) {
    std::size_t staging = 0;
    std::size_t pixels = 0;
    for (const Frame& frame : frames) {
        if (const auto* image = std::get_if<ImageView>(&frame)) {
            staging += packed_bytes(*image);
            pixels += packed_bytes(*image);
        } else if (const auto* buffer = std::get_if<std::shared_ptr<FrameBuffer>>(&frame)) {
            pixels += packed_bytes((*buffer)->view());
        }
    }
    // The old memory goes first: both need not fit at once.
    if (staging > staging_.bytes()) {
        staging_ = {};
        staging_ = cuda::PinnedBuffer(device_, staging);
    }
    if (!device_->integrated && pixels > pixels_.bytes()) {
        pixels_ = {};
        pixels_ = cuda::DeviceBuffer(device_, pixels);
    }
}

void FrameUpload::put(const cuda::Stream& stream, const std::vector<Frame>& frames, Size target, float conf) {
    check(frames.size() <= static_cast<std::size_t>(places_), "more frames than places");
    make_room(frames);
    auto* blocks = host_blocks_.as<FrameBlock>();
    std::size_t offset = 0;
    for (int i = 0; i < places_; ++i) {
        FrameBlock& block = blocks[i];
        block = settings_;
        if (conf >= 0.f) block.conf = conf;
        const auto index = static_cast<std::size_t>(i);
        if (index < frames.size())
            place(stream, frames[index], block, fit(size_of(frames[index]), target), offset);
        else
            clear_place(block, target);
    }
    stream.copy_to_device(blocks_.pointer(), host_blocks_.data(), host_blocks_.bytes());
}

// `offset` is where the next picture goes, in staging and on the device alike.
void FrameUpload::place(const cuda::Stream& stream, const Frame& frame, FrameBlock& block, const Letterbox& geometry,
                        std::size_t& offset) {
    if (const auto* image = std::get_if<DeviceImage>(&frame)) {
        if (image->producer) {
            producer_.record(*image->producer);
            stream.wait(producer_);
        }
        if (image->chroma)
            set_frame_nv12(block, image->pixels, image->row_stride, image->chroma, image->chroma_stride, image->matrix,
                           geometry);
        else
            set_frame(
                block,
                {nullptr, image->size, image->row_stride, image->pixel_stride, image->channel_stride, image->format},
                image->pixels, geometry);
        return;
    }
    if (const auto* shared = std::get_if<std::shared_ptr<FrameBuffer>>(&frame)) {
        const FrameBuffer& buffer = **shared;
        if (device_->integrated) {
            set_frame(block, buffer.view(), buffer.memory().device_pointer(), geometry);
            return;
        }
        stream.copy_to_device(pixels_.pointer() + offset, buffer.data(), buffer.bytes());
        set_frame(block, buffer.view(), pixels_.pointer() + offset, geometry);
        offset += packed_bytes(buffer.view());
        return;
    }

    const ImageView& image = std::get<ImageView>(frame);
    const Packed packed = pack(image);
    const std::size_t row = row_bytes(image);
    const Pieces pieces(image.size.height, row);
    const auto copy = [&](int piece) {
        const int first = pieces.first(piece);
        copy_rows(image, packed, first, pieces.first(piece + 1) - first,
                  staging_.data() + offset + static_cast<std::size_t>(first) * row);
    };
    const auto upload = [&](int begin, int end) {
        if (device_->integrated) return;
        const std::size_t start = offset + static_cast<std::size_t>(pieces.first(begin)) * row;
        const auto rows = static_cast<std::size_t>(pieces.first(end) - pieces.first(begin));
        stream.copy_to_device(pixels_.pointer() + start, staging_.data() + start, rows * row);
    };
    if (crew_ && pieces.count >= worth_sharing) {
        crew_->share(pieces.count, copy, upload);
    } else {
        for (int piece = 0; piece < pieces.count; ++piece) {
            copy(piece);
            upload(piece, piece + 1);
        }
    }
    // An integrated GPU reads the staging memory in place.
    const cuda::DevicePtr base = device_->integrated ? staging_.device_pointer() : pixels_.pointer();
    set_frame(block, packed.view, base + offset + static_cast<cuda::DevicePtr>(packed.first), geometry);
    offset += packed_bytes(image);
}

void FrameUpload::clear_place(FrameBlock& block, Size target) const {
    const cuda::DevicePtr grey = blocks_.pointer() + host_blocks_.bytes() - pixel_bytes;
    set_frame(block, {nullptr, {1, 1}, 1, 1, 1, PixelFormat::gray}, grey, fit({1, 1}, target));
    block.max_det = 0;
}

}  // namespace edgeyolo
