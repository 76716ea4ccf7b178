#include "halves.hpp"

#include <mutex>
#include "error.hpp"
#include "frame_stages.hpp"
#include "frame_upload.hpp"
#include "graph_capture.hpp"

namespace edgeyolo {
namespace {

std::shared_ptr<const Kernels> load_kernels(const cuda::DeviceRef& device) {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    return std::make_shared<const Kernels>(device);
}

const HalvesOptions& checked(const HalvesOptions& options) {
    check(options.batch >= 1, "a batch has at least one place, found " + std::to_string(options.batch));
    fit(Size{1, 1}, options.target);
    check(element_count(options.head) > 0, "the network's output must have rows");
    return options;
}

}  // namespace

class Halves::Impl {
public:
    Impl(cuda::DeviceRef device, HalvesOptions asked)
        : device_(std::move(device)),
          options_(checked(asked)),
          stream_(device_),
          upload_(device_, options_.batch, settings_of(options_.thresholds, options_.head.classes)),
          stages_(device_, load_kernels(device_), options_.batch, options_.thresholds.max_det),
          candidates_(device_,
                      options_.head.kind == HeadKind::end2end ? 0 : CandidateBuffers::bytes(options_.head.rows)) {
        for (const DType dtype : {options_.input, options_.output})
            check<EngineError>(
                dtype == DType::float32 || dtype == DType::float16,
                std::string("the network's input and output must be float32 or float16, found ") + dtype_name(dtype));
    }
    ~Impl() { const cuda::Drain drained(stream_); }
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    void begin(const std::vector<Frame>& frames, cuda::DevicePtr input, int places) {
        const cuda::ContextGuard guard(*device_);
        places_ = places ? places : options_.batch;
        check(
            places_ <= options_.batch && !frames.empty() && frames.size() <= static_cast<std::size_t>(places_),
            "one run takes 1 to " + std::to_string(options_.batch) + " frames, found " + std::to_string(frames.size()));
        for (const Frame& frame : frames) check_frame(frame, *device_);
        // Should the last frame never have been finished: its memory is about to be written again.
        stream_.synchronize();
        upload_.put(stream_, frames, options_.target);
        stages_.before(stream_, upload_, places_, input, options_.input, options_.target);
        // Kept until they have been read: finish() waits.
        frames_ = frames;
    }

    std::vector<Results> finish(cuda::DevicePtr output) {
        const cuda::ContextGuard guard(*device_);
        check(!frames_.empty(), "there is no frame to finish: call begin() first");
        stages_.after(stream_, upload_, places_, output, options_.output, options_.head,
                      CandidateBuffers::in(candidates_.pointer(), options_.head.rows));
        stream_.synchronize();
        std::vector<Results> results;
        for (std::size_t i = 0; i < frames_.size(); ++i) results.push_back(stages_.results(static_cast<int>(i)));
        frames_.clear();
        return results;
    }

    void wait() {
        const cuda::ContextGuard guard(*device_);
        stream_.synchronize();
    }

    void release() {
        const cuda::ContextGuard guard(*device_);
        if (stream_.capture_status() != cuda::CaptureStatus::none) (void)stream_.end_capture();
        stream_.synchronize();
        frames_.clear();
    }

    const cuda::DeviceRef device_;
    const HalvesOptions options_;
    std::vector<Frame> frames_;
    int places_ = 0;  // of the run under way
    cuda::Stream stream_;
    FrameUpload upload_;
    FrameStages stages_;
    cuda::DeviceBuffer candidates_;
};

Halves::Halves(cuda::DeviceRef device, HalvesOptions options)
    : impl_(std::make_unique<Impl>(std::move(device), std::move(options))) {}

Halves::~Halves() = default;

const cuda::DeviceRef& Halves::device() const {
    return impl_->device_;
}

cuda::StreamHandle Halves::stream() const {
    return impl_->stream_.get();
}

std::size_t Halves::input_bytes() const {
    const HalvesOptions& options = impl_->options_;
    return static_cast<std::size_t>(options.batch) * 3 * static_cast<std::size_t>(options.target.width) *
           static_cast<std::size_t>(options.target.height) * element_size(options.input);
}

std::size_t Halves::output_bytes() const {
    const HalvesOptions& options = impl_->options_;
    return static_cast<std::size_t>(options.batch) * element_count(options.head) * element_size(options.output);
}

void Halves::begin(const std::vector<Frame>& frames, cuda::DevicePtr input, int places) {
    impl_->begin(frames, input, places);
}

void Halves::wait() {
    impl_->wait();
}

std::vector<Results> Halves::finish(cuda::DevicePtr output) {
    return impl_->finish(output);
}

void Halves::release() {
    impl_->release();
}

}  // namespace edgeyolo
