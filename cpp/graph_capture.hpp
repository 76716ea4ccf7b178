// One capture: from a program that runs step by step to a graph that was seen to do the same. No policy (graph.hpp).
#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>
#include "cuda.hpp"

namespace edgeyolo {

// What one run of a program left behind, read back to the host.
struct ProgramOutput {
    // Everything that a repeated run must give again bit for bit: the valid rows and the network's raw outputs.
    std::vector<std::uint8_t> exact;
    // The raw outputs as numbers, for engines that do not repeat themselves. May contain NaN.
    std::vector<float> values;
};

// The work of one frame for one input shape: an execution context, fixed buffers, fixed addresses. The pipeline
// implements it. All calls come with the device's ContextGuard in scope, from one thread at a time.
class FrameProgram {
public:
    virtual ~FrameProgram() = default;
    // Puts the whole frame on the stream, from the parameter block to the results in pinned memory, without waiting:
    // the same call runs eagerly and is captured. False when the engine refuses.
    virtual bool enqueue(const cuda::Stream& stream) = 0;
    // The same through executeV2, which takes no stream: synchronise the stream, execute, put the rest on the stream.
    virtual bool execute(const cuda::Stream& stream) = 0;
    // The engine's own words for the latest refusal; may be empty.
    virtual std::string last_errors() const { return {}; }

    // For the self-check. Puts a picture made from `seed` where the program reads its frame, parameter block included,
    // and overwrites every output, the pinned results too, so that stale ones are noticed.
    virtual void prepare_check(const cuda::Stream& stream, unsigned seed) = 0;
    // Waits for the stream.
    virtual ProgramOutput read_check(const cuda::Stream& stream) = 0;
};

// One process-wide lock around everything that a capture in another thread may not meet: creating and destroying
// execution contexts, warm-up, capture, instantiation. Replay never takes it. GraphRunner takes it itself: do not hold
// it when calling one.
std::mutex& capture_mutex();

struct CapturedGraph {
    cuda::GraphExec exec;
    std::size_t nodes = 0;
    double milliseconds = 0;       // capture, instantiation and upload; without warm-up and self-check
    std::size_t device_bytes = 0;  // what they took of the device's free memory; other processes blur it
    std::string note;              // "nondeterministic engine: ..." or empty
};

// Warms up, captures, instantiates, checks the replay against eager runs. Under capture_mutex(). On refusal the result
// is empty, `reason` says why, and the stream, the program and the device are as usable as before. A lost device is a
// DeviceError.
std::optional<CapturedGraph> capture_graph(const cuda::Stream& stream, FrameProgram& program, std::string& reason);

}  // namespace edgeyolo
