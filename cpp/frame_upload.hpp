// Brings the frames of one slot to the device: pixels into a buffer that only grows, and one parameter block per place
// of the batch at a fixed device address. A graph that reads the blocks never has to know where a frame is.
#pragma once
#include <memory>
#include <vector>
#include "copy_crew.hpp"
#include "cuda.hpp"
#include "frame.hpp"
#include "kernels.hpp"

namespace edgeyolo {

// Thresholds are in `settings`; the frame's part is overwritten. One thread at a time, with a ContextGuard in scope.
class FrameUpload {
public:
    FrameUpload(const cuda::DeviceRef& device, int places, const FrameBlock& settings);

    cuda::DevicePtr block(int place) const {
        return blocks_.pointer() + static_cast<cuda::DevicePtr>(place) * sizeof(FrameBlock);
    }
    // Frames and blocks onto the stream. What the last call put there must be done: its memory is rewritten.
    // Host pixels are read before the call returns. `conf` below 0 leaves the threshold as it is.
    // Places behind the last frame get a grey picture and give no results.
    void put(const cuda::Stream& stream, const std::vector<Frame>& frames, Size target, float conf = -1.f);

    std::size_t device_bytes() const { return pixels_.bytes() + blocks_.bytes(); }
    std::size_t pinned_bytes() const { return staging_.bytes() + host_blocks_.bytes(); }

private:
    void make_room(const std::vector<Frame>& frames);
    void place(const cuda::Stream& stream, const Frame& frame, FrameBlock& block, const Letterbox& geometry,
               std::size_t& offset);
    void clear_place(FrameBlock& block, Size target) const;

    cuda::DeviceRef device_;
    int places_;
    FrameBlock settings_;
    std::shared_ptr<CopyCrew> crew_;
    cuda::PinnedBuffer staging_;
    cuda::DeviceBuffer pixels_;
    cuda::PinnedBuffer host_blocks_;  // the blocks, then one grey pixel
    cuda::DeviceBuffer blocks_;
    cuda::Event producer_;  // on the stream of whoever made a GPU frame
};

}  // namespace edgeyolo
