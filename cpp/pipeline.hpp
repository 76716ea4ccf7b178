// One frame's way on the GPU: upload > letterbox > engine > decode > nms > download, on slots that work in parallel.
//
//     auto engine = LoadedEngine::open("yolo26n.engine", 0, trt_options);      // look at it, choose the head
//     Pipeline pipeline(engine, options);
//     Ticket ticket = pipeline.submit({image});
//     std::vector<Results> results = pipeline.wait(ticket);                     // one per picture
//
// A slot is one stream with its buffers, execution context and graphs; it holds one frame from submit() on until the
// frame is done and its results have been copied out, by wait() or by the next submit() that needs the slot. So any
// number of frames may be submitted before the first wait(): submit() then blocks until the oldest one is done.
// Threads: everything may be called from any thread. Slots are given out in the order of the calls.
// Device: all work happens on the engine's device; the caller's current device never changes.
// After fork() every call throws DeviceError, and destructors do nothing.
#pragma once
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>
#include "frame.hpp"
#include "graph.hpp"
#include "loaded_engine.hpp"
#include "postprocess.hpp"

namespace edgeyolo {

struct PipelineOptions {
    int slots = 2;  // 1 to 16
    GraphMode graph = GraphMode::automatic;
    HeadKind head = HeadKind::raw;
    int classes = 0;
    std::string output;                 // the tensor with the boxes; empty: the first output
    Postprocessor::Options thresholds;  // max_det up to 1024, a filter over up to 2048 classes
    Size target;  // of a dynamic engine, for frames that do not say; {0, 0}: the profile's optimum
    // What the engine file's header says; what it does not say is tried.
    bool dla = false;
    bool embedded_nms = false;
    std::size_t graphs = 8;                        // of a dynamic engine, per slot
    int captures_per_minute = 4;                   // of a dynamic engine, per slot
    std::function<void(const std::string&)> warn;  // a capture was given up; from the thread that called, no lock held
};

struct SubmitOptions {
    Size target;                   // of a dynamic engine, this time; {0, 0}: PipelineOptions::target
    bool leave_on_device = false;  // fetch the results with wait_on_device()
    bool timings = false;
};

// Milliseconds on the device. Inside a graph the stages cannot be told apart: they are NaN then.
struct Timings {
    float upload = 0;  // the frame and its parameter block; next to nothing for a GPU frame
    float frame = 0;   // all after it, the results' way to the host included
    float letterbox = 0;
    float network = 0;
    float postprocess = 0;  // with the download
};

// Results of one submit() that stayed on the GPU: per picture boxes (count, 4) float32 xyxy in its pixels, scores
// (count) float32, class ids (count) int32, best first. Complete when wait_on_device() returns. The memory is this
// object's own and lives as long as it does, also after close().
class DeviceResults {
public:
    struct Picture {
        cuda::DevicePtr boxes = 0;
        cuda::DevicePtr scores = 0;
        cuda::DevicePtr class_ids = 0;
        int count = 0;
    };
    std::vector<Picture> pictures;
    cuda::DeviceRef device;

private:
    friend class Slot;
    cuda::DeviceBuffer memory_;
};

struct Flight;  // a frame between submit() and wait(); known to the pipeline
using Ticket = std::shared_ptr<Flight>;

struct PipelineInfo {
    GraphStats graph;  // of all slots together
    int slots = 0;
    int batch = 0;  // pictures that one submit() takes
    Size target;
    HeadKind head = HeadKind::raw;
    Shape output_shape;            // for `target` and one picture
    std::size_t device_bytes = 0;  // buffers of ours, without TensorRT's scratch
    std::size_t pinned_bytes = 0;
    std::int64_t scratch_bytes = 0;  // of TensorRT, as the engine tells it, for one context
    long frames = 0;                 // submitted
    bool closed = false;
};

class Pipeline {
public:
    // Makes the slots; for a static engine this warms up and captures too. Throws InvalidInput for options out of
    // range, EngineError for tensors that cannot be used (the message lists them), DeviceError.
    Pipeline(std::shared_ptr<LoadedEngine> engine, PipelineOptions options);
    // Waits for the frames in flight. Never throws.
    ~Pipeline();
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    // Pinned memory for a frame. DeviceError when there is none.
    std::shared_ptr<FrameBuffer> frame_buffer(Size size, PixelFormat format) const;

    // 1 to batch() pictures, each of its own size and kind. Blocks while every slot is taken by another call. A static
    // engine of batch N runs whole; the places without a picture hold grey and give no results. A dynamic batch runs
    // with as many as are handed in (each number is an input shape of its own), or the profile's minimum.
    // Throws InvalidInput (a frame, their number, `target`, closed), EngineError (TensorRT refused), DeviceError.
    Ticket submit(const std::vector<Frame>& frames, const SubmitOptions& options = {});

    // The results, per picture, once: a second call is an InvalidInput. Empty when `timeout` passed first; the ticket
    // stays good then. Throws what went wrong with the frame. A ticket that is dropped without wait() costs nothing.
    std::optional<std::vector<Results>> wait(const Ticket& ticket,
                                             std::optional<std::chrono::nanoseconds> timeout = {});
    // The same for a frame that was submitted with leave_on_device.
    std::optional<DeviceResults> wait_on_device(const Ticket& ticket,
                                                std::optional<std::chrono::nanoseconds> timeout = {});
    // Whether wait() would answer at once. Never blocks.
    bool done(const Ticket& ticket);
    // After wait(); empty unless the frame was submitted with `timings`.
    static std::optional<Timings> timings(const Ticket& ticket);

    int batch() const;
    Size target() const;
    PipelineInfo info() const;
    // InvalidInput once closed: close() gives the engine up.
    std::shared_ptr<LoadedEngine> engine() const;

    // Waits for the frames in flight (their results can still be fetched) and returns all memory but that of frame
    // buffers and device results that the caller holds. Again: nothing. Calls that are waiting for a slot throw
    // InvalidInput.
    void close();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace edgeyolo
