// The GPU kernels of one frame: what each needs and how it is launched. All of them may be captured in a graph: they
// take fixed addresses, read everything that changes from the FrameBlock, allocate nothing and read nothing back.
#pragma once
#include <cstddef>
#include <cstdint>
#include "candidate_math.hpp"
#include "cuda.hpp"
#include "decode.hpp"
#include "engine.hpp"
#include "frame_block.hpp"
#include "image.hpp"
#include "letterbox.hpp"

namespace edgeyolo {

// Device memory between decode and NMS, for a head of so many anchors. It needs no initial content.
struct CandidateBuffers {
    cuda::DevicePtr keys = 0;       // (anchors) uint64
    cuda::DevicePtr list = 0;       // (anchors, rounded up to a power of two) uint64
    cuda::DevicePtr boxes = 0;      // (anchors, 4) float32
    cuda::DevicePtr class_ids = 0;  // (anchors) int32

    static std::size_t bytes(int anchors);
    // Parts of one piece of memory of bytes(anchors), aligned to 256.
    static CandidateBuffers in(cuda::DevicePtr memory, int anchors);
};

// Fills the frame's part of the block. Throws InvalidInput for a row that spans 2 GiB or more.
// `pixels` is the device address of channel 0 of pixel (0, 0); strides as in ImageView, whose `data` is not looked at.
void set_frame(FrameBlock& block, const ImageView& image, cuda::DevicePtr pixels, const Letterbox& geometry);
// An NV12 frame: Y plane and UV plane on the device, bytes between rows.
void set_frame_nv12(FrameBlock& block, cuda::DevicePtr luma, std::ptrdiff_t luma_stride, cuda::DevicePtr chroma,
                    std::ptrdiff_t chroma_stride, YuvMatrix matrix, const Letterbox& geometry);
// Fills the postprocessing part. `allowed`: one byte per class, 0 = dropped; nullptr = all.
// Throws InvalidInput for a filter over more than FrameBlock::max_classes classes, or max_det above max_result_rows.
void set_thresholds(FrameBlock& block, float conf, double iou, int max_det, bool agnostic, const std::uint8_t* allowed,
                    int classes);

// Whether this build has kernels for a real GPU: it was made with nvcc.
bool has_gpu_kernels();

// The loaded kernels of one device; shared by all its streams, from any thread. Launches want a ContextGuard in scope
// and throw DeviceError. dtype is float32 or float16, anything else is an EngineError.
class Kernels {
public:
    // Loads every kernel and runs each once with nothing to do: CUDA loads lazily, which a capture would not survive.
    // Throws DeviceError when no machine code of this build fits the device.
    explicit Kernels(const cuda::DeviceRef& device);

    // Frame -> (3, target.height, target.width) RGB planes, 0..1.
    void letterbox(const cuda::Stream& stream, cuda::DevicePtr block, cuda::DevicePtr planes, DType dtype,
                   Size target) const;
    // Network output -> result buffer of result_bytes(rows), rows at most max_result_rows. Two launches, one for
    // end2end (which uses no candidate buffers).
    void postprocess(const cuda::Stream& stream, cuda::DevicePtr block, cuda::DevicePtr output, DType dtype,
                     const Head& head, const CandidateBuffers& candidates, cuda::DevicePtr result, int rows) const;

    // The two halves of postprocess(), for tests and timings.
    void decode(const cuda::Stream& stream, cuda::DevicePtr block, cuda::DevicePtr output, DType dtype,
                const Head& head, const CandidateBuffers& candidates) const;
    void nms(const cuda::Stream& stream, cuda::DevicePtr block, const CandidateBuffers& candidates, int anchors,
             cuda::DevicePtr result, int rows) const;

private:
    using Ptr = cuda::DevicePtr;
    // One of two kernels, by the tensor's type.
    template <class... Params>
    struct ByType {
        cuda::Kernel<Params...> float32, float16;
        const cuda::Kernel<Params...>& of(DType dtype) const;
    };
    void end2end(const cuda::Stream& stream, Ptr block, Ptr output, DType dtype, const Head& head, Ptr result,
                 int rows) const;
    void run_each_once(const cuda::DeviceRef& device) const;

    cuda::Module letterbox_module_, decode_module_, nms_module_;
    ByType<Ptr, Ptr, int, int> letterbox_;                        // block, planes, width, height
    ByType<Ptr, Ptr, int, int, Ptr, Ptr, Ptr> decode_columns_;    // block, head, anchors, classes, keys, boxes, ids
    ByType<Ptr, Ptr, int, int, int, Ptr, Ptr, Ptr> decode_rows_;  // ..., classes, objectness, keys, boxes, ids
    ByType<Ptr, Ptr, int, int, Ptr, int> end2end_;                // block, head, rows in, classes, result, rows
    cuda::Kernel<Ptr, Ptr, Ptr, Ptr, int, Ptr, Ptr, int> nms_;  // block, keys, boxes, ids, anchors, list, result, rows
};

}  // namespace edgeyolo
