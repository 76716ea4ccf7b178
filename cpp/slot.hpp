// One slot of the pipeline: a stream with its buffers, execution context and graphs, for one frame at a time.
#pragma once
#include <atomic>
#include <memory>
#include <optional>
#include <vector>
#include "frame_stages.hpp"
#include "frame_upload.hpp"
#include "graph.hpp"
#include "network_program.hpp"
#include "pipeline.hpp"

namespace edgeyolo {

// What all slots of a pipeline share.
struct SlotPlan {
    std::shared_ptr<LoadedEngine> engine;
    std::shared_ptr<const Kernels> kernels;
    HeadChoice head;
    FrameBlock settings;
    int rows = 0;  // of a result
    PathChoice path;
    GraphRunner::Options graphs;
};

// What a frame left behind.
struct FrameOutcome {
    std::vector<Results> results;
    std::optional<DeviceResults> on_device;
    std::optional<Timings> timings;
};

// One thread at a time, with a ContextGuard in scope; done() and the numbers from any thread.
class Slot {
public:
    explicit Slot(const SlotPlan& plan);
    // Waits for the stream. Needs no ContextGuard.
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;

    const cuda::Device& device() const { return *device_; }

    // Captures a static engine now rather than at the first frame. Throws DeviceError when the device is lost.
    void warm_up(Size target, int batch);

    // Puts one submit() on the stream. The slot must be idle. When it throws, call recover().
    void start(const std::vector<Frame>& frames, Size target, int batch, const SubmitOptions& options);
    bool done() const { return finished_.done(); }
    // Waits for the frame and copies its results out.
    FrameOutcome finish();
    // After an error: the stream comes to rest, whatever it says.
    void recover() noexcept;

    GraphStats stats() const { return runner_->stats(); }
    std::size_t device_bytes() const { return device_bytes_; }
    std::size_t pinned_bytes() const { return pinned_bytes_; }

private:
    struct TimingEvents {
        cuda::Event begin, uploaded, end;
        StageEvents stages;
    };

    std::shared_ptr<NetworkProgram> make_program(Size target, int batch);
    void prepare_timings();
    void keep_on_device(std::size_t pictures);
    Timings read_timings() const;
    void count_bytes();

    const SlotPlan plan_;
    const cuda::DeviceRef device_;
    cuda::Stream stream_;
    FrameUpload upload_;
    FrameStages stages_;
    cuda::Event finished_;
    std::unique_ptr<TimingEvents> events_;
    std::shared_ptr<NetworkProgram> program_;  // what runs without a graph
    std::vector<std::weak_ptr<NetworkProgram>> captured_;
    std::unique_ptr<GraphRunner> runner_;

    // Of the frame under way.
    std::size_t pictures_ = 0;
    bool timed_ = false;
    bool eager_ = false;
    std::optional<DeviceResults> on_device_;
    std::atomic<std::size_t> device_bytes_{0}, pinned_bytes_{0};
};

}  // namespace edgeyolo
