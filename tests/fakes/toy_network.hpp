// One execution context's worth of the toy network: memory and launches, through the driver that the core uses too.
// Like TensorRT it works in whatever context is current, and refuses to run in another one than it was made in.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>
#include "cuda_driver.hpp"
#include "toy_plan.hpp"

namespace edgeyolo::toy {

// Kernels of one engine in one context.
class Kernels {
public:
    // Throws std::runtime_error with the driver's text, as everything here.
    explicit Kernels(const cuda::Driver& driver);
    ~Kernels();
    Kernels(const Kernels&) = delete;
    Kernels& operator=(const Kernels&) = delete;
    cuda::FunctionHandle begin{}, step{}, busy{}, head{}, count{};

private:
    const cuda::Driver& driver_;
    cuda::ModuleHandle module_{};
};

struct Run {
    cuda::StreamHandle stream{};
    std::vector<std::int64_t> input_shape;
    cuda::DevicePtr input = 0;
    cuda::DevicePtr output = 0;
    // dynamic_rows: asked for the output's memory once its rows are counted; 0 is a refusal.
    std::function<cuda::DevicePtr(std::int64_t rows)> allocate;
};

class Network {
public:
    Network(const Plan& plan, const Kernels& kernels, const cuda::Driver& driver);
    ~Network();
    Network(const Network&) = delete;
    Network& operator=(const Network&) = delete;

    // False when the plan says so. Throws std::runtime_error when the driver refuses.
    bool enqueue(const Run& run, bool streams_weights);
    // On a stream of its own; returns when the work is done.
    bool execute(Run run, bool streams_weights);
    // Starts the warm-ups anew.
    void shape_changed() { warmups_left_ = plan_.warmups; }
    void set_aux_stream(cuda::StreamHandle stream) { aux_stream_ = stream; }

private:
    void check(int code, const char* call) const;
    void launch(cuda::FunctionHandle function, unsigned blocks, unsigned threads, unsigned pictures,
                cuda::StreamHandle stream, void** params) const;
    void release() noexcept;

    const Plan& plan_;
    const Kernels& kernels_;
    const cuda::Driver& driver_;
    cuda::ContextHandle context_{};
    cuda::DevicePtr scratch_ = 0;
    cuda::DevicePtr extra_ = 0;  // what a warm-up allocates
    cuda::StreamHandle own_stream_{}, own_aux_stream_{}, aux_stream_{};
    cuda::EventHandle fork_{}, join_{};
    int warmups_left_ = 0;
};

}  // namespace edgeyolo::toy
