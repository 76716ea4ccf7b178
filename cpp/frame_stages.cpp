#include "frame_stages.hpp"

#include <cstring>
#include "error.hpp"

namespace edgeyolo {
namespace {

template <class T>
void append(std::vector<std::uint8_t>& bytes, const T* values, int count) {
    const auto* start = reinterpret_cast<const std::uint8_t*>(values);
    bytes.insert(bytes.end(), start, start + static_cast<std::size_t>(count) * sizeof(T));
}

}  // namespace

FrameBlock settings_of(const Postprocessor::Options& thresholds, int classes) {
    const Postprocessor checked(thresholds);
    check(classes >= 1, "a model has at least one class, found " + std::to_string(classes));
    check(thresholds.allowed.empty() || thresholds.allowed.size() == static_cast<std::size_t>(classes),
          "the class filter was made for " + std::to_string(thresholds.allowed.size()) +
              " classes, the network's output has " + std::to_string(classes));
    FrameBlock block{};
    set_thresholds(block, thresholds.conf, thresholds.iou, thresholds.max_det, thresholds.agnostic,
                   thresholds.allowed.empty() ? nullptr : thresholds.allowed.data(), classes);
    return block;
}

FrameStages::FrameStages(const cuda::DeviceRef& device, std::shared_ptr<const Kernels> kernels, int places, int rows)
    : kernels_(std::move(kernels)),
      rows_(rows),
      stride_((result_bytes(rows) + 255) / 256 * 256),
      results_(device, static_cast<std::size_t>(places) * stride_),
      host_results_(device, static_cast<std::size_t>(places) * stride_) {
    std::memset(host_results_.data(), 0, host_results_.bytes());
}

void FrameStages::before(const cuda::Stream& stream, const FrameUpload& upload, int places, cuda::DevicePtr input,
                         DType dtype, Size target) const {
    const std::size_t bytes =
        3 * static_cast<std::size_t>(target.width) * static_cast<std::size_t>(target.height) * element_size(dtype);
    for (int i = 0; i < places; ++i)
        kernels_->letterbox(stream, upload.block(i), input + static_cast<std::size_t>(i) * bytes, dtype, target);
}

void FrameStages::after(const cuda::Stream& stream, const FrameUpload& upload, int places, cuda::DevicePtr output,
                        DType dtype, const Head& head, const CandidateBuffers& candidates) const {
    const std::size_t bytes = element_count(head) * element_size(dtype);
    for (int i = 0; i < places; ++i) {
        if (head.rows == 0)  // an output of no rows: the kernels have nothing to do, the result is empty all the same
            stream.fill(device_result(i), 0, stride_);
        else
            kernels_->postprocess(stream, upload.block(i), output + static_cast<std::size_t>(i) * bytes, dtype, head,
                                  candidates, device_result(i), rows_);
    }
    stream.copy_to_host(host_results_.data(), results_.pointer(), static_cast<std::size_t>(places) * stride_);
}

Results FrameStages::results(int place) const {
    const ResultView from = view(place);
    const auto count = from.header->count;
    const float* boxes = &from.boxes->x1;
    Results results;
    results.boxes.assign(boxes, boxes + 4 * count);
    results.scores.assign(from.scores, from.scores + count);
    results.class_ids.assign(from.class_ids, from.class_ids + count);
    return results;
}

void FrameStages::spoil(const cuda::Stream& stream) const {
    std::memset(host_results_.data(), 0xee, host_results_.bytes());
    stream.fill(results_.pointer(), 0xee, results_.bytes());
}

void FrameStages::append_valid(int place, std::vector<std::uint8_t>& bytes) const {
    const ResultView from = view(place);
    // A count that is none stays in the comparison, and is not believed.
    const int count = from.header->count >= 0 && from.header->count <= rows_ ? from.header->count : 0;
    append(bytes, from.header, 1);
    append(bytes, from.boxes, count);
    append(bytes, from.scores, count);
    append(bytes, from.class_ids, count);
}

}  // namespace edgeyolo
