// The GPU's steps around a network, one picture at a time and with everything read back: for comparing them with the
// CPU's, on the machine where they run (selfcheck, tests).
#pragma once
#include <memory>
#include <vector>
#include "halves.hpp"

namespace edgeyolo {

class GpuSteps {
public:
    // Throws DeviceError, InvalidInput for thresholds out of range.
    GpuSteps(int ordinal, Size target, const Head& head, Postprocessor::Options thresholds);

    struct Outcome {
        std::vector<float> planes;  // (3, target.height, target.width), what the letterbox made of the image
        Results results;            // what decode and NMS made of `output`
    };
    // output: element_count(head) floats, as a network would have written them for this image.
    Outcome run(const ImageView& image, const float* output);

private:
    Size target_;
    Head head_;
    cuda::DeviceRef device_;
    cuda::Stream stream_;
    cuda::DeviceBuffer input_, output_;
    std::unique_ptr<Halves> halves_;  // dies before the memory that its work uses
};

}  // namespace edgeyolo
