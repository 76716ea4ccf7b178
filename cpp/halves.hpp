// The GPU work around a network that somebody else runs (ONNX Runtime): before it upload > letterbox, after it
// decode > nms > download, on one stream that the network uses too.
//
//     halves.begin({image}, input);      // on the stream: the picture stands in the network's input
//     ... run the network on halves.stream(), reading `input`, writing `output` ...
//     Results result = halves.finish(output)[0];
//
// One frame at a time; begin() and finish() from any thread, one thread at a time. Addresses are the caller's device
// memory; they may be the same each time (a graph of the network then reads and writes them) or not.
#pragma once
#include <memory>
#include <vector>
#include "frame.hpp"
#include "pipeline.hpp"

namespace edgeyolo {

struct HalvesOptions {
    Size target;  // of the network's input
    int batch = 1;
    DType input = DType::float32;  // float32 or float16
    DType output = DType::float32;
    Head head;  // of one picture
    Postprocessor::Options thresholds;
};

class Halves {
public:
    // Throws InvalidInput, EngineError (a dtype), DeviceError.
    Halves(cuda::DeviceRef device, HalvesOptions options);
    // Waits for the stream.
    ~Halves();
    Halves(const Halves&) = delete;
    Halves& operator=(const Halves&) = delete;

    const cuda::DeviceRef& device() const;
    cuda::StreamHandle stream() const;
    // Bytes of the network's input and output for the whole batch.
    std::size_t input_bytes() const;
    std::size_t output_bytes() const;

    // Puts the frames into (batch, 3, H, W) at `input`. Returns while the work runs; a frame of another thread's making
    // is handled as Pipeline::submit() does. `places`: how many of the batch the network runs this time, as many as
    // there are frames at least; 0 is all.
    void begin(const std::vector<Frame>& frames, cuda::DevicePtr input, int places = 0);
    // Waits for what begin() put on the stream.
    void wait();
    // Reads the network's output, waits, gives the results of the frames of begin().
    std::vector<Results> finish(cuda::DevicePtr output);
    // In place of finish(), when the network failed or its output is read elsewhere: waits, lets go of the frames, and
    // ends a capture that the network left open on the stream (on the thread that began it).
    void release();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace edgeyolo
