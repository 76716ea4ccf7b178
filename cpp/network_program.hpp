// The work of one frame for one input shape: an execution context, the network's tensors, and the one enqueue() that
// serves the eager run and the capture.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>
#include "frame_stages.hpp"
#include "frame_upload.hpp"
#include "graph_capture.hpp"
#include "loaded_engine.hpp"

namespace edgeyolo {

// What the pipeline decided about the network's output.
struct HeadChoice {
    HeadKind kind = HeadKind::raw;
    int classes = 0;
    std::size_t output = 0;  // which of the engine's outputs
};

// The head that an output of this shape holds, per picture. Shapes are (N, rows, columns), or (rows, columns) for one
// picture. EngineError when they do not fit the choice.
Head head_for(const HeadChoice& choice, const TensorInfo& tensor, const Shape& shape, int batch);

// Events at the borders of the stages, recorded when they are there and nothing is captured.
struct StageEvents {
    cuda::Event letterboxed, inferred;
};

// Create and destroy it under capture_mutex() with a ContextGuard in scope. `upload` and `stages` outlive it.
class NetworkProgram final : public FrameProgram {
public:
    NetworkProgram(std::shared_ptr<LoadedEngine> engine, FrameUpload& upload, FrameStages& stages, HeadChoice head);

    // The input shape of the runs to come. Takes effect with the next run, and must not change while one is under way.
    void want(Size target, int batch);

    bool enqueue(const cuda::Stream& stream) override;
    bool execute(const cuda::Stream& stream) override;
    std::string last_errors() const override { return engine_->engine().last_errors(); }
    void prepare_check(const cuda::Stream& stream, unsigned seed) override;
    ProgramOutput read_check(const cuda::Stream& stream) override;

    const StageEvents* marks = nullptr;  // of the next run
    // Of the network's tensors and the candidates; from any thread.
    std::size_t device_bytes() const { return device_bytes_; }

private:
    // Where an output goes whose size TensorRT knows only while it runs.
    class Growing final : public OutputAllocator {
    public:
        explicit Growing(cuda::DeviceRef device) : device_(std::move(device)) {}
        void* allocate(const char*, void*, std::size_t bytes, std::size_t, void*) noexcept override;
        void set_shape(const char*, const std::int64_t* dims, int rank) noexcept override;
        Shape shape;
        cuda::DeviceBuffer memory;

    private:
        cuda::DeviceRef device_;
    };
    struct Output {
        TensorInfo tensor;
        Shape shape;
        cuda::DeviceBuffer memory;
        std::unique_ptr<Growing> growing;
        cuda::DevicePtr pointer() const { return growing ? growing->memory.pointer() : memory.pointer(); }
    };

    bool apply_shape(const cuda::Stream& stream);
    void place_outputs();
    void after(const cuda::Stream& stream);

    const std::shared_ptr<LoadedEngine> engine_;
    FrameUpload& upload_;
    FrameStages& stages_;
    const HeadChoice choice_;
    const TensorInfo input_;

    Shape wanted_, applied_;
    Size target_;
    int batch_ = 0;
    Head head_;

    // The context goes first: it holds addresses of all that stands above it.
    cuda::DeviceBuffer input_memory_, candidates_;
    std::vector<Output> outputs_;
    std::vector<cuda::Stream> aux_streams_;
    std::unique_ptr<Context> context_;
    std::atomic<std::size_t> device_bytes_{0};
};

}  // namespace edgeyolo
