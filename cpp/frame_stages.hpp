// The stages around the network, for a whole batch: letterbox before it, decode, NMS and download after it. Stages are
// passive: views in, work on the stream, nothing waited for. Used by the pipeline and by the halves alike.
#pragma once
#include <memory>
#include <vector>
#include "frame_upload.hpp"
#include "kernels.hpp"
#include "postprocess.hpp"

namespace edgeyolo {

// The block of a frame that has its thresholds only. Checks them as the CPU does, then against what the GPU can.
FrameBlock settings_of(const Postprocessor::Options& thresholds, int classes);

// One thread at a time, with a ContextGuard in scope. The result memory keeps its address.
class FrameStages {
public:
    FrameStages(const cuda::DeviceRef& device, std::shared_ptr<const Kernels> kernels, int places, int rows);

    // Pictures of the first `places` blocks -> (places, 3, target.height, target.width) at `input`.
    void before(const cuda::Stream& stream, const FrameUpload& upload, int places, cuda::DevicePtr input, DType dtype,
                Size target) const;
    // `output`: places times one picture's head. `candidates` serves one picture after the other.
    void after(const cuda::Stream& stream, const FrameUpload& upload, int places, cuda::DevicePtr output, DType dtype,
               const Head& head, const CandidateBuffers& candidates) const;

    // After the stream has got there: what came down to the host.
    Results results(int place) const;
    int count(int place) const { return view(place).header->count; }
    // The result of a place on the device, and its bytes.
    cuda::DevicePtr device_result(int place) const { return results_.pointer() + offset(place); }
    std::size_t stride() const { return stride_; }
    int rows() const { return rows_; }

    // For the self-check: all results overwritten on both sides; the valid rows, appended.
    void spoil(const cuda::Stream& stream) const;
    void append_valid(int place, std::vector<std::uint8_t>& bytes) const;

    std::size_t device_bytes() const { return results_.bytes(); }
    std::size_t pinned_bytes() const { return host_results_.bytes(); }

private:
    std::size_t offset(int place) const { return static_cast<std::size_t>(place) * stride_; }
    ResultView view(int place) const { return result_view(host_results_.data() + offset(place), rows_); }

    std::shared_ptr<const Kernels> kernels_;
    int rows_;
    std::size_t stride_;
    cuda::DeviceBuffer results_;
    cuda::PinnedBuffer host_results_;
};

}  // namespace edgeyolo
