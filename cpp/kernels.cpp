#include "kernels.hpp"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include "error.hpp"
#include "letterbox_math.hpp"
#include "nms.hpp"

// Embedded by cmake/kernels.cmake: fatbins, or without nvcc the names that the simulated driver knows.
extern "C" {
extern const unsigned char edgeyolo_letterbox_image[];
extern const unsigned char edgeyolo_decode_image[];
extern const unsigned char edgeyolo_nms_image[];
}

namespace edgeyolo {
namespace {

unsigned blocks(int items, int per_block) {
    return static_cast<unsigned>(items > 0 ? (items + per_block - 1) / per_block : 1);
}

// Without nvcc the image is a text that only the simulated driver takes.
bool compiled(const unsigned char* image) {
    constexpr char simulated[] = "EDGEYOLO-SIMULATED-KERNELS";
    return std::memcmp(image, simulated, sizeof simulated - 1) != 0;
}

cuda::Module load(const cuda::DeviceRef& device, const unsigned char* image) {
    try {
        return {device, image};
    } catch (const DeviceError&) {
        if (compiled(image)) throw;
        throw DeviceError(
            "this build has no GPU kernels, because no nvcc was found when it was made: install the CUDA toolkit and "
            "build again with EDGEYOLO_CUDA=ON, or use device=\"cpu\"");
    }
}

std::size_t aligned(std::size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

// What sorting in place needs.
std::size_t list_length(int anchors) {
    std::size_t length = 2;
    while (length < static_cast<std::size_t>(anchors)) length *= 2;
    return length;
}

void set_geometry(FrameBlock& block, const Letterbox& geometry) {
    block.source_width = geometry.source.width;
    block.source_height = geometry.source.height;
    block.resized_width = geometry.resized.width;
    block.resized_height = geometry.resized.height;
    block.left = geometry.left;
    block.top = geometry.top;
    block.step_x = axis_step(geometry.source.width, geometry.resized.width);
    block.step_y = axis_step(geometry.source.height, geometry.resized.height);
}

// Offsets inside a row are 32 bits wide in the kernel.
void check_row(const ImageView& image) {
    constexpr std::ptrdiff_t limit = std::numeric_limits<std::int32_t>::max();
    const std::ptrdiff_t reach = std::abs(image.pixel_stride) * image.size.width + 2 * std::abs(image.channel_stride);
    if (reach > limit)
        throw InvalidInput("a row of a GPU frame must span less than 2 GiB, found " + std::to_string(reach) +
                           " bytes: hand in a contiguous frame");
}

}  // namespace

bool has_gpu_kernels() {
    return compiled(edgeyolo_nms_image);
}

std::size_t CandidateBuffers::bytes(int anchors) {
    const auto count = static_cast<std::size_t>(anchors);
    return aligned(count * sizeof(std::uint64_t)) + aligned(list_length(anchors) * sizeof(std::uint64_t)) +
           aligned(count * sizeof(Box)) + aligned(count * sizeof(std::int32_t));
}

CandidateBuffers CandidateBuffers::in(cuda::DevicePtr memory, int anchors) {
    const auto count = static_cast<std::size_t>(anchors);
    CandidateBuffers parts;
    parts.keys = memory;
    parts.list = parts.keys + aligned(count * sizeof(std::uint64_t));
    parts.boxes = parts.list + aligned(list_length(anchors) * sizeof(std::uint64_t));
    parts.class_ids = parts.boxes + aligned(count * sizeof(Box));
    return parts;
}

void set_frame(FrameBlock& block, const ImageView& image, cuda::DevicePtr pixels, const Letterbox& geometry) {
    check_row(image);
    const auto channel = static_cast<std::int32_t>(image.channel_stride);
    const bool grey = image.format == PixelFormat::gray;
    const bool red_first = image.format == PixelFormat::rgb || image.format == PixelFormat::rgba;
    block.layout = FrameLayout::packed;
    block.matrix = YuvMatrix::bt601;
    block.pixels = pixels;
    block.chroma = 0;
    block.row_stride = image.row_stride;
    block.chroma_stride = 0;
    block.pixel_stride = static_cast<std::int32_t>(image.pixel_stride);
    block.red = grey || red_first ? 0 : 2 * channel;
    block.green = grey ? 0 : channel;
    block.blue = grey ? 0 : red_first ? 2 * channel : 0;
    set_geometry(block, geometry);
}

void set_frame_nv12(FrameBlock& block, cuda::DevicePtr luma, std::ptrdiff_t luma_stride, cuda::DevicePtr chroma,
                    std::ptrdiff_t chroma_stride, YuvMatrix matrix, const Letterbox& geometry) {
    block.layout = FrameLayout::nv12;
    block.matrix = matrix;
    block.pixels = luma;
    block.chroma = chroma;
    block.row_stride = luma_stride;
    block.chroma_stride = chroma_stride;
    block.pixel_stride = 1;
    block.red = block.green = block.blue = 0;
    set_geometry(block, geometry);
}

void set_thresholds(FrameBlock& block, float conf, double iou, int max_det, bool agnostic, const std::uint8_t* allowed,
                    int classes) {
    if (max_det < 1 || max_det > max_result_rows)
        throw InvalidInput("max_det must be 1 to " + std::to_string(max_result_rows) + " on the GPU, found " +
                           std::to_string(max_det));
    if (allowed && classes > FrameBlock::max_classes)
        throw InvalidInput("a class filter on the GPU serves models of up to " +
                           std::to_string(FrameBlock::max_classes) + " classes, found " + std::to_string(classes) +
                           ": filter the result instead");
    block.conf = conf;
    block.iou = iou_threshold(iou);
    block.max_det = max_det;
    block.agnostic = agnostic ? 1 : 0;
    block.filtered = allowed ? 1 : 0;
    std::memset(block.allowed, 0, sizeof block.allowed);
    block.reserved = 0;
    for (int c = 0; allowed && c < classes; ++c)
        if (allowed[c]) block.allowed[c / 32] |= 1u << c % 32;
}

template <class... Params>
const cuda::Kernel<Params...>& Kernels::ByType<Params...>::of(DType dtype) const {
    if (dtype == DType::float32) return float32;
    if (dtype == DType::float16) return float16;
    throw EngineError(std::string("the network's input and output must be float32 or float16, found ") +
                      dtype_name(dtype) + ": export the engine with such tensors");
}

Kernels::Kernels(const cuda::DeviceRef& device) {
    const cuda::ContextGuard guard(*device);
    letterbox_module_ = load(device, edgeyolo_letterbox_image);
    decode_module_ = load(device, edgeyolo_decode_image);
    nms_module_ = load(device, edgeyolo_nms_image);
    letterbox_ = {{letterbox_module_, "edgeyolo_letterbox_f32"}, {letterbox_module_, "edgeyolo_letterbox_f16"}};
    decode_columns_ = {{decode_module_, "edgeyolo_decode_columns_f32"},
                       {decode_module_, "edgeyolo_decode_columns_f16"}};
    decode_rows_ = {{decode_module_, "edgeyolo_decode_rows_f32"}, {decode_module_, "edgeyolo_decode_rows_f16"}};
    end2end_ = {{decode_module_, "edgeyolo_end2end_f32"}, {decode_module_, "edgeyolo_end2end_f16"}};
    nms_ = {nms_module_, "edgeyolo_nms"};
    run_each_once(device);
}

// A size of 0 makes each kernel return before it touches an address.
void Kernels::run_each_once(const cuda::DeviceRef& device) const {
    const cuda::Stream stream(device);
    const cuda::Drain drain(stream);  // should a launch fail: the earlier ones end before their module goes
    for (const DType dtype : {DType::float32, DType::float16}) {
        letterbox(stream, 0, 0, dtype, Size{0, 0});
        decode(stream, 0, 0, dtype, Head{HeadKind::raw, 0, 1}, CandidateBuffers{});
        decode(stream, 0, 0, dtype, Head{HeadKind::raw_transposed, 0, 1}, CandidateBuffers{});
        end2end(stream, 0, 0, dtype, Head{HeadKind::end2end, 0, 1}, 0, 0);
    }
    nms(stream, 0, CandidateBuffers{}, 0, 0, 0);
    stream.synchronize();
}

void Kernels::letterbox(const cuda::Stream& stream, Ptr block, Ptr planes, DType dtype, Size target) const {
    letterbox_.of(dtype).launch(stream, {blocks(target.width, 128), blocks(target.height, 8)}, {32, 8}, 0, block,
                                planes, target.width, target.height);
}

void Kernels::decode(const cuda::Stream& stream, Ptr block, Ptr output, DType dtype, const Head& head,
                     const CandidateBuffers& to) const {
    if (head.kind == HeadKind::raw) {
        decode_columns_.of(dtype).launch(stream, {blocks(head.rows, 32)}, {32, 8}, 0, block, output, head.rows,
                                         head.classes, to.keys, to.boxes, to.class_ids);
    } else {
        const int objectness = head.kind == HeadKind::yolov5 ? 1 : 0;
        decode_rows_.of(dtype).launch(stream, {blocks(head.rows, 8)}, {32, 8}, 0, block, output, head.rows,
                                      head.classes, objectness, to.keys, to.boxes, to.class_ids);
    }
}

void Kernels::nms(const cuda::Stream& stream, Ptr block, const CandidateBuffers& from, int anchors, Ptr result,
                  int rows) const {
    nms_.launch(stream, {}, {1024}, 0, block, from.keys, from.boxes, from.class_ids, anchors, from.list, result, rows);
}

void Kernels::end2end(const cuda::Stream& stream, Ptr block, Ptr output, DType dtype, const Head& head, Ptr result,
                      int rows) const {
    end2end_.of(dtype).launch(stream, {}, {1024}, 0, block, output, head.rows, head.classes, result, rows);
}

void Kernels::postprocess(const cuda::Stream& stream, Ptr block, Ptr output, DType dtype, const Head& head,
                          const CandidateBuffers& candidates, Ptr result, int rows) const {
    check(rows >= 1 && rows <= max_result_rows, "a result buffer holds 1 to 1024 rows");
    if (head.kind == HeadKind::end2end) {
        end2end(stream, block, output, dtype, head, result, rows);
        return;
    }
    decode(stream, block, output, dtype, head, candidates);
    nms(stream, block, candidates, head.rows, result, rows);
}

}  // namespace edgeyolo
