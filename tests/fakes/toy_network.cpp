#include "toy_network.hpp"
#include <stdexcept>

// The image of nvinfer_kernels.cu: a fatbin, or the list of names that the simulated driver takes.
extern "C" const unsigned char edgeyolo_nvinfer_kernels_image[];

namespace edgeyolo::toy {
namespace {

constexpr unsigned non_blocking = 1;
constexpr unsigned no_timing = 2;
constexpr unsigned block = 128;

int capture_status(const cuda::Driver& driver, cuda::StreamHandle stream) {
    int status = 0;
    driver.cuStreamIsCapturing(stream, &status);
    return status;
}

}  // namespace

Kernels::Kernels(const cuda::Driver& driver) : driver_(driver) {
    driver.check(driver.cuModuleLoadData(&module_, edgeyolo_nvinfer_kernels_image), "cuModuleLoadData");
    const std::pair<const char*, cuda::FunctionHandle*> all[] = {
        {"toy_begin", &begin}, {"toy_step", &step}, {"toy_busy", &busy}, {"toy_head", &head}, {"toy_count", &count}};
    for (const auto& [name, function] : all) {
        const int code = driver.cuModuleGetFunction(function, module_, name);
        if (code == cuda::success) continue;
        driver.cuModuleUnload(module_);
        driver.fail(code, "cuModuleGetFunction", name, -1);
    }
}

Kernels::~Kernels() {
    driver_.cuModuleUnload(module_);
}

Network::Network(const Plan& plan, const Kernels& kernels, const cuda::Driver& driver)
    : plan_(plan), kernels_(kernels), driver_(driver) {
    try {
        check(driver_.cuCtxGetCurrent(&context_), "cuCtxGetCurrent");
        if (!context_) throw std::runtime_error("no context is current");
        check(driver_.cuStreamCreate(&own_stream_, non_blocking), "cuStreamCreate");
        const auto bytes = static_cast<std::size_t>(plan.scratch) + scratch_words * sizeof(std::uint32_t);
        check(driver_.cuMemAlloc(&scratch_, bytes), "cuMemAlloc");
        check(driver_.cuMemsetD8Async(scratch_, 0, bytes, own_stream_), "cuMemsetD8Async");
        if (plan.aux_streams) {
            check(driver_.cuStreamCreate(&own_aux_stream_, non_blocking), "cuStreamCreate");
            check(driver_.cuEventCreate(&fork_, no_timing), "cuEventCreate");
            check(driver_.cuEventCreate(&join_, no_timing), "cuEventCreate");
            aux_stream_ = own_aux_stream_;
        }
        check(driver_.cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
    } catch (...) {
        release();
        throw;
    }
    warmups_left_ = plan.warmups;
}

Network::~Network() {
    release();
}

void Network::release() noexcept {
    if (own_stream_) driver_.cuStreamSynchronize(own_stream_);
    if (extra_) driver_.cuMemFree(extra_);
    if (scratch_) driver_.cuMemFree(scratch_);
    if (fork_) driver_.cuEventDestroy(fork_);
    if (join_) driver_.cuEventDestroy(join_);
    if (own_aux_stream_) driver_.cuStreamDestroy(own_aux_stream_);
    if (own_stream_) driver_.cuStreamDestroy(own_stream_);
}

void Network::check(int code, const char* call) const {
    driver_.check(code, call);
}

void Network::launch(cuda::FunctionHandle function, unsigned blocks, unsigned threads, unsigned pictures,
                     cuda::StreamHandle stream, void** params) const {
    check(driver_.cuLaunchKernel(function, blocks, pictures, 1, threads, 1, 1, 0, stream, params, nullptr),
          "cuLaunchKernel");
}

bool Network::enqueue(const Run& run, bool streams_weights) {
    cuda::ContextHandle current{};
    check(driver_.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current != context_)
        throw std::runtime_error("the current CUDA context is not the one that the engine lives in");

    const bool capturing = capture_status(driver_, run.stream) != 0;
    if (plan_.is("refuse_enqueue") || (capturing && plan_.is("refuse_capture"))) return false;
    if (capturing && plan_.is("empty_capture")) return true;
    if (warmups_left_ > 0) {
        if (extra_) check(driver_.cuMemFree(extra_), "cuMemFree");
        extra_ = 0;
        check(driver_.cuMemAlloc(&extra_, 4096), "cuMemAlloc");
    }
    // These two do not look at the answer, as a careless plugin does not.
    if (plan_.is("host_sync") || streams_weights) driver_.cuStreamSynchronize(run.stream);
    if (plan_.is("allocate")) {
        cuda::DevicePtr pointer = 0;
        if (driver_.cuMemAlloc(&pointer, 4096) == cuda::success) driver_.cuMemFree(pointer);
    }

    HeadArgs args{};
    args.batch = static_cast<std::int32_t>(run.input_shape[0]);
    args.height = static_cast<std::int32_t>(run.input_shape[2]);
    args.width = static_cast<std::int32_t>(run.input_shape[3]);
    args.input_half = plan_.input_half;
    args.output_half = plan_.output_half;
    args.kind = plan_.kind;
    args.classes = plan_.classes;
    for (std::size_t i = 0; i < plan_.strides.size(); ++i) args.strides[i] = plan_.strides[i];
    args.anchors = plan_.anchors(args.height, args.width);
    args.rows = plan_.rows;
    args.steps = plan_.kernels;
    args.noise = plan_.is("nondeterministic") ? 0.125f : 0.0f;
    const bool off =
        (capturing && plan_.is("differs_in_capture")) || (warmups_left_ > 0 && plan_.is("differs_in_warmup"));
    args.bias = off ? 1.0f : 0.0f;
    if (warmups_left_ > 0) --warmups_left_;

    cuda::DevicePtr scratch = scratch_;
    std::int32_t word = step_count;
    void* begin_params[] = {&scratch};
    void* step_params[] = {&scratch, &word};
    launch(kernels_.begin, 1, 1, 1, run.stream, begin_params);
    if (aux_stream_) {
        std::int32_t aux_word = aux_count;
        void* aux_params[] = {&scratch, &aux_word};
        check(driver_.cuEventRecord(fork_, run.stream), "cuEventRecord");
        check(driver_.cuStreamWaitEvent(aux_stream_, fork_, 0), "cuStreamWaitEvent");
        launch(kernels_.step, 1, 1, 1, aux_stream_, aux_params);
        check(driver_.cuEventRecord(join_, aux_stream_), "cuEventRecord");
        check(driver_.cuStreamWaitEvent(run.stream, join_, 0), "cuStreamWaitEvent");
    }
    for (int i = 0; i < plan_.kernels; ++i) launch(kernels_.step, 1, 1, 1, run.stream, step_params);
    if (plan_.busy) {
        auto microseconds = static_cast<std::uint32_t>(plan_.busy);
        void* busy_params[] = {&microseconds};
        launch(kernels_.busy, 1, 1, 1, run.stream, busy_params);
    }

    cuda::DevicePtr input = run.input;
    cuda::DevicePtr output = run.output;
    const int anchors = plan_.kind == end2end && args.rows > args.anchors ? args.rows : args.anchors;
    const unsigned blocks = (static_cast<unsigned>(anchors) + block - 1) / block;
    if (plan_.kind == dynamic_rows) {
        void* count_params[] = {&input, &scratch, &args};
        launch(kernels_.count, blocks, block, 1, run.stream, count_params);
        // The rows must be known on the host before the output can be placed: this is what cannot be captured.
        std::uint32_t rows = 0;
        check(driver_.cuMemcpyDtoHAsync(&rows, scratch_ + row_count * sizeof rows, sizeof rows, run.stream),
              "cuMemcpyDtoHAsync");
        check(driver_.cuStreamSynchronize(run.stream), "cuStreamSynchronize");
        output = run.allocate(rows);
        if (output == 0) throw std::runtime_error("the output allocator gave no memory");
    }
    void* head_params[] = {&input, &output, &scratch, &args};
    launch(kernels_.head, blocks, block, static_cast<unsigned>(args.batch), run.stream, head_params);
    return true;
}

bool Network::execute(Run run, bool streams_weights) {
    if (plan_.is("refuse_execute")) return false;
    run.stream = own_stream_;
    if (!enqueue(run, streams_weights)) return false;
    check(driver_.cuStreamSynchronize(own_stream_), "cuStreamSynchronize");
    return true;
}

}  // namespace edgeyolo::toy
