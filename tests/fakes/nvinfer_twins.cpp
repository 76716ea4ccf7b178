// Host twins of nvinfer_kernels.cu, for the simulated driver.
#include "nvinfer_twins.hpp"
#include <dlfcn.h>
#include <chrono>
#include <cstdint>
#include <thread>
#include "toy_detector.hpp"
#include "twins.hpp"

namespace edgeyolo::toy {
namespace {

using fake::Dim;
using fake::Memory;
using fake::param;
using Address = unsigned long long;

std::uint32_t* scratch_of(void** params, int index, const Memory& memory) {
    return memory.at<std::uint32_t>(param<Address>(params, index), scratch_words);
}

void begin(Dim, Dim, unsigned, void** params, const Memory& memory) {
    std::uint32_t* scratch = scratch_of(params, 0, memory);
    scratch[step_count] = 0;
    scratch[row_count] = 0;
    ++scratch[run_count];
}

void step(Dim, Dim, unsigned, void** params, const Memory& memory) {
    ++scratch_of(params, 0, memory)[param<std::int32_t>(params, 1)];
}

void busy(Dim, Dim, unsigned, void** params, const Memory&) {
    std::this_thread::sleep_for(std::chrono::microseconds(param<std::uint32_t>(params, 0)));
}

std::size_t output_elements(const HeadArgs& args, std::size_t rows) {
    if (args.kind == end2end || args.kind == dynamic_rows) return rows * 6;
    return static_cast<std::size_t>(args.anchors) * (args.classes + (args.kind == yolov5 ? 5 : 4));
}

template <class In, class Out>
void run_head(Dim grid, Dim block, void** params, const Memory& memory, const HeadArgs& args) {
    const std::uint32_t* scratch = scratch_of(params, 2, memory);
    const std::size_t pictures = args.batch;
    const std::size_t rows = args.kind == dynamic_rows ? scratch[row_count] : args.rows;
    const auto* input = memory.at<In>(param<Address>(params, 0), pictures * 3 * args.height * args.width);
    auto* output = memory.at<Out>(param<Address>(params, 1), pictures * output_elements(args, rows));
    for (unsigned picture = 0; picture < grid.y; ++picture)
        for (unsigned index = 0; index < grid.x * block.x; ++index)
            head_thread(input, output, scratch, args, static_cast<int>(picture), static_cast<int>(index));
}

void head(Dim grid, Dim block, unsigned, void** params, const Memory& memory) {
    const auto args = param<HeadArgs>(params, 3);
    if (args.input_half && args.output_half)
        run_head<std::uint16_t, std::uint16_t>(grid, block, params, memory, args);
    else if (args.input_half)
        run_head<std::uint16_t, float>(grid, block, params, memory, args);
    else if (args.output_half)
        run_head<float, std::uint16_t>(grid, block, params, memory, args);
    else
        run_head<float, float>(grid, block, params, memory, args);
}

template <class In>
void count_rows(void** params, const Memory& memory, const HeadArgs& args) {
    const std::size_t plane = static_cast<std::size_t>(args.height) * args.width;
    const auto* input = memory.at<In>(param<Address>(params, 0), 3 * plane);
    std::uint32_t* scratch = scratch_of(params, 1, memory);
    const bool complete = scratch[step_count] == static_cast<std::uint32_t>(args.steps);
    for (int index = 0; index < args.anchors; ++index)
        if (anchor(input, args, 0.0f, complete, index).score > row_threshold) ++scratch[row_count];
}

void count(Dim, Dim, unsigned, void** params, const Memory& memory) {
    const auto args = param<HeadArgs>(params, 2);
    args.input_half ? count_rows<std::uint16_t>(params, memory, args) : count_rows<float>(params, memory, args);
}

}  // namespace

void register_twins(const std::string& driver_library) {
    void* driver = dlopen(driver_library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!driver) return;
    using Register = void (*)(const char*, fake::Twin, const std::size_t*, std::size_t);
    const auto add = reinterpret_cast<Register>(dlsym(driver, "edgeyolo_fake_register_twin"));
    if (add) {
        constexpr std::size_t pointer = sizeof(Address);
        constexpr std::size_t word = sizeof(std::uint32_t);
        constexpr std::size_t begin_sizes[] = {pointer};
        constexpr std::size_t step_sizes[] = {pointer, word};
        constexpr std::size_t busy_sizes[] = {word};
        constexpr std::size_t head_sizes[] = {pointer, pointer, pointer, sizeof(HeadArgs)};
        constexpr std::size_t count_sizes[] = {pointer, pointer, sizeof(HeadArgs)};
        add("toy_begin", begin, begin_sizes, 1);
        add("toy_step", step, step_sizes, 2);
        add("toy_busy", busy, busy_sizes, 1);
        add("toy_head", head, head_sizes, 4);
        add("toy_count", count, count_sizes, 3);
    }
    dlclose(driver);
}

}  // namespace edgeyolo::toy
