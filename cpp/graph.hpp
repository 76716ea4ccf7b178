// When a slot's work runs as a CUDA graph, and what runs instead: the policy over graph_capture.hpp.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>
#include "graph_capture.hpp"

namespace edgeyolo {

enum class GraphMode {
    automatic,
    off
};

// How a frame runs.
enum class Path {
    graph,    // replay
    enqueue,  // enqueueV3, step by step
    execute   // executeV2
};
const char* path_name(Path path);  // "graph", "enqueue_v3", "execute_v2"

// What is known of an engine; what is not known is false: a capture is then tried.
struct EngineTraits {
    bool dynamic_shapes = false;
    bool data_dependent_outputs = false;
    bool dla = false;
    bool embedded_nms = false;
    bool weight_streaming = false;
    bool compiles_at_run_time = false;  // TensorRT-RTX
};

struct PathChoice {
    Path path = Path::graph;
    std::string reason;       // why not a graph
    int captured_at_use = 1;  // of one input shape
};
PathChoice choose_path(GraphMode mode, const EngineTraits& traits);

struct GraphStats {
    Path path = Path::graph;
    std::string reason;            // why the path is not a graph, or what is to be known about it
    long captures = 0;             // graphs that were made
    long failed_tries = 0;         // captures that did not work out
    long replays = 0;              // frames by graph
    long enqueued = 0;             // frames by enqueueV3
    long executed = 0;             // frames by executeV2
    long fallbacks = 0;            // input shapes given up
    double capture_ms = 0;         // of all captures
    std::size_t device_bytes = 0;  // of the graphs held now
    std::size_t graphs = 0;        // held now
};

// The graphs of one slot, one per input shape. For each frame, on the slot's stream:
//     prepare(stream, shape, make);      // the slot is idle: captures when it is time to
//     ... copy the frame and the parameter block ...
//     run(stream, shape, program);       // replays, or runs the program
// One thread at a time, the device's ContextGuard in scope; stats() from any thread. Destroy it before the stream, with
// the stream idle.
class GraphRunner {
public:
    using Shape = std::vector<std::int64_t>;
    using Clock = std::function<std::chrono::steady_clock::time_point()>;
    // The program to capture. For static shapes the slot's own; for dynamic shapes a new one with an execution context
    // of its own, because a graph freezes the context that it recorded. Called under capture_mutex().
    using Make = std::function<std::shared_ptr<FrameProgram>()>;

    struct Options {
        std::size_t graphs = 8;  // held at once; the one unused for longest goes first
        int tries = 3;           // of a capture: another thread's synchronise can spoil one
        int captures_per_minute =
            4;  // for more than one shape: shapes that come and go must not mean capturing all day
        std::function<void(const std::string&)> warn;  // once, when a capture was given up
        Clock clock = std::chrono::steady_clock::now;
    };

    GraphRunner(PathChoice choice, Options options);
    ~GraphRunner();
    GraphRunner(const GraphRunner&) = delete;
    GraphRunner& operator=(const GraphRunner&) = delete;

    // Overwrites the program's inputs and outputs when it captures. Throws DeviceError when the device is lost, and
    // what `make` throws unless that is an edgeyolo::Error, which is a reason for the other path.
    void prepare(const cuda::Stream& stream, const Shape& shape, const Make& make);
    // EngineError when the engine refuses on the last path that is left; DeviceError.
    void run(const cuda::Stream& stream, const Shape& shape, FrameProgram& program);

    GraphStats stats() const;

private:
    struct Entry {
        Shape shape;
        // The graph dies before the program whose buffers and context it recorded.
        std::shared_ptr<FrameProgram> program;
        CapturedGraph graph;
    };
    // What is remembered of a shape without a graph.
    struct Seen {
        Shape shape;
        int uses = 0;
        bool given_up = false;
    };

    Entry* find(const Shape& shape);
    Seen& seen(const Shape& shape);
    bool may_capture();
    // Why there is no graph; empty when there is one.
    std::string capture(const cuda::Stream& stream, Seen& shape, const Make& make);
    void give_up(Seen& shape, const std::string& reason);
    void drop(const cuda::Stream& stream, std::size_t index);

    const PathChoice choice_;
    const Options options_;
    std::deque<Entry> entries_;  // the latest used first
    std::deque<Seen> seen_;      // the latest used first
    std::deque<std::chrono::steady_clock::time_point> capture_times_;
    bool warned_ = false;

    mutable std::mutex stats_mutex_;
    GraphStats stats_;
    std::atomic<long> replays_{0};
};

}  // namespace edgeyolo
