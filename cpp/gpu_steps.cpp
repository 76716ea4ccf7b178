#include "gpu_steps.hpp"
#include <utility>

namespace edgeyolo {

GpuSteps::GpuSteps(int ordinal, Size target, const Head& head, Postprocessor::Options thresholds)
    : target_(target), head_(head), device_(cuda::Device::open(ordinal)), stream_(device_) {
    HalvesOptions options;
    options.target = target;
    options.head = head;
    options.thresholds = std::move(thresholds);
    halves_ = std::make_unique<Halves>(device_, std::move(options));
    input_ = cuda::DeviceBuffer(device_, halves_->input_bytes());
    output_ = cuda::DeviceBuffer(device_, halves_->output_bytes());
}

GpuSteps::Outcome GpuSteps::run(const ImageView& image, const float* output) {
    Outcome outcome;
    outcome.planes.resize(halves_->input_bytes() / sizeof(float));
    const cuda::ContextGuard guard(*device_);
    stream_.copy_to_device(output_.pointer(), output, output_.bytes());
    stream_.synchronize();
    halves_->begin({image}, input_.pointer());
    outcome.results = std::move(halves_->finish(output_.pointer()).at(0));
    // finish() has waited for all that stood on its stream.
    stream_.copy_to_host(outcome.planes.data(), input_.pointer(), input_.bytes());
    stream_.synchronize();
    return outcome;
}

}  // namespace edgeyolo
