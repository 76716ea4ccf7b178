// The kernels of the test TensorRT. Their twins are in nvinfer_twins.cpp, their formulas in toy_detector.hpp.
#include "toy_detector.hpp"

using edgeyolo::toy::HeadArgs;

extern "C" __global__ void toy_begin(std::uint32_t* scratch) {
    scratch[edgeyolo::toy::step_count] = 0;
    scratch[edgeyolo::toy::row_count] = 0;
    ++scratch[edgeyolo::toy::run_count];
}

extern "C" __global__ void toy_step(std::uint32_t* scratch, std::int32_t word) {
    ++scratch[word];
}

extern "C" __global__ void toy_busy(std::uint32_t microseconds) {
    unsigned long long start;
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < 1000ull * microseconds);
}

template <class In, class Out>
__device__ void head(const void* input, void* output, const std::uint32_t* scratch, const HeadArgs& args) {
    const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    edgeyolo::toy::head_thread(static_cast<const In*>(input), static_cast<Out*>(output), scratch, args,
                               static_cast<int>(blockIdx.y), index);
}

extern "C" __global__ void toy_head(const void* input, void* output, const std::uint32_t* scratch, HeadArgs args) {
    if (args.input_half && args.output_half)
        head<std::uint16_t, std::uint16_t>(input, output, scratch, args);
    else if (args.input_half)
        head<std::uint16_t, float>(input, output, scratch, args);
    else if (args.output_half)
        head<float, std::uint16_t>(input, output, scratch, args);
    else
        head<float, float>(input, output, scratch, args);
}

extern "C" __global__ void toy_count(const void* input, std::uint32_t* scratch, HeadArgs args) {
    const int index = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (index >= args.anchors) return;
    const bool complete = scratch[edgeyolo::toy::step_count] == static_cast<std::uint32_t>(args.steps);
    const float score =
        args.input_half
            ? edgeyolo::toy::anchor(static_cast<const std::uint16_t*>(input), args, 0.0f, complete, index).score
            : edgeyolo::toy::anchor(static_cast<const float*>(input), args, 0.0f, complete, index).score;
    if (score > edgeyolo::toy::row_threshold) atomicAdd(scratch + edgeyolo::toy::row_count, 1u);
}
