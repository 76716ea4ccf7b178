// The test TensorRT: NVIDIA's abstract classes over the toy network, so that the real adapter runs where no TensorRT
// is, in CI and on a real GPU. Built only for tests. What is not implemented here fails loudly (gen_nvinfer.py).
// EDGEYOLO_FAKE_TENSORRT_VERSION (a number such as 80601) changes what getInferLibVersion() answers.
#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include "nvinfer_defaults.hpp"
#include "nvinfer_twins.hpp"
#include "toy_network.hpp"
#include "toy_plan.hpp"

namespace edgeyolo::toy {
namespace {

std::atomic<ILogger*> the_logger{nullptr};  // the first one that is given, as TensorRT has it

void log_error(const std::string& text) {
    if (ILogger* logger = the_logger.load()) logger->log(ILogger::Severity::kERROR, text.c_str());
}

// Nothing throws through TensorRT's interface: errors are logged, the answer is false or null.
template <class Result, class Work>
Result guarded(const char* where, Result failed, Work&& work) noexcept {
    try {
        return work();
    } catch (const std::exception& error) {
        log_error(std::string("IExecutionContext::") + where + ": Error Code 1: " + error.what());
        return failed;
    }
}

Dims to_dims(const std::vector<std::int64_t>& shape) {
    Dims dims{};
    dims.nbDims = static_cast<std::int32_t>(shape.size());
    for (std::size_t i = 0; i < shape.size(); ++i) dims.d[i] = shape[i];
    return dims;
}

Dims no_dims() {
    Dims dims{};
    dims.nbDims = -1;
    return dims;
}

// The output's shape for an input shape, -1 where it is not known.
std::vector<std::int64_t> output_shape(const Plan& plan, const std::vector<std::int64_t>& input) {
    const std::int64_t batch = input[0];
    const bool known = input[2] > 0 && input[3] > 0;
    const std::int64_t anchors = known ? plan.anchors(input[2], input[3]) : -1;
    switch (plan.kind) {
        case raw: return {batch, 4 + plan.classes, anchors};
        case raw_transposed: return {batch, anchors, 4 + plan.classes};
        case yolov5: return {batch, anchors, 5 + plan.classes};
        case end2end: return {batch, plan.rows, 6};
        case dynamic_rows: break;
    }
    return {-1, 6};
}

// What an engine and its contexts share.
struct Loaded {
    Plan plan;
    const cuda::Driver& driver;
    Kernels kernels{driver};
    std::int64_t budget = 0;
    std::atomic<int> contexts{0};

    Loaded(Plan parsed, const cuda::Driver& opened) : plan(std::move(parsed)), driver(opened) {
        budget = plan.budget < 0 ? plan.streamable : plan.budget;
    }
    bool streams_weights() const { return budget < plan.streamable; }
    bool is_input(const char* name) const { return plan.input_name == name; }
    bool is_output(const char* name) const { return plan.output_name == name; }
};

class ContextImpl final : public ExecutionContextDefaults {
public:
    explicit ContextImpl(std::shared_ptr<Loaded> loaded)
        : loaded_(std::move(loaded)), network_(loaded_->plan, loaded_->kernels, loaded_->driver), input_(plan().input) {
        ++loaded_->contexts;
    }
    ~ContextImpl() override { --loaded_->contexts; }

    bool setOptimizationProfileAsync(std::int32_t index, cudaStream_t) noexcept override {
        if (index < 0 || index >= static_cast<std::int32_t>(plan().profiles.size())) {
            log_error("setOptimizationProfileAsync: no profile " + std::to_string(index));
            return false;
        }
        profile_ = index;
        input_ = plan().input;
        network_.shape_changed();
        return true;
    }
    std::int32_t getOptimizationProfile() const noexcept override { return profile_; }

    bool setInputShape(const char* name, const Dims& dims) noexcept override {
        const Plan::Profile& profile = plan().profiles[static_cast<std::size_t>(profile_)];
        bool fits = loaded_->is_input(name) && dims.nbDims == 4;
        for (int i = 0; fits && i < 4; ++i)
            fits = dims.d[i] >= profile.shapes[0][static_cast<std::size_t>(i)] &&
                   dims.d[i] <= profile.shapes[2][static_cast<std::size_t>(i)];
        if (!fits) {
            log_error(std::string("IExecutionContext::setInputShape: Error Code 3: the dimensions set for ") + name +
                      " do not satisfy profile " + std::to_string(profile_));
            return false;
        }
        const std::vector<std::int64_t> shape(dims.d, dims.d + 4);
        if (shape != input_) network_.shape_changed();
        input_ = shape;
        return true;
    }
    Dims getTensorShape(const char* name) const noexcept override {
        if (loaded_->is_input(name)) return to_dims(input_);
        return loaded_->is_output(name) ? to_dims(output_shape(plan(), input_)) : no_dims();
    }
    bool setTensorAddress(const char* name, void* data) noexcept override {
        const auto address = reinterpret_cast<cuda::DevicePtr>(data);
        if (loaded_->is_input(name)) return input_address_ = address, true;
        if (loaded_->is_output(name)) return output_address_ = address, true;
        log_error(std::string("setTensorAddress: no tensor ") + name);
        return false;
    }
    std::int64_t getMaxOutputSize(const char* name) const noexcept override {
        if (!loaded_->is_output(name) || !specified()) return -1;
        auto shape = output_shape(plan(), input_);
        if (plan().kind == dynamic_rows) shape[0] = plan().anchors(input_[2], input_[3]);
        std::int64_t bytes = plan().output_half ? 2 : 4;
        for (const auto size : shape) bytes *= size;
        return bytes;
    }
    bool setOutputAllocator(const char* name, IOutputAllocator* allocator) noexcept override {
        if (!loaded_->is_output(name)) return false;
        allocator_ = allocator;
        return true;
    }
    void setAuxStreams(cudaStream_t* streams, std::int32_t count) noexcept override {
        if (count > 0 && plan().aux_streams > 0) network_.set_aux_stream(streams[0]);
    }

    bool enqueueV3(cudaStream_t stream) noexcept override {
        return guarded("enqueueV3", false, [&] {
            const bool done =
                network_.enqueue(run(stream, input_address_, output_address_), loaded_->streams_weights());
            if (!done || plan().is("error_enqueue"))
                log_error("IExecutionContext::enqueueV3: Error Code 7: as the plan asks");
            return done;
        });
    }
    bool executeV2(void* const* bindings) noexcept override {
        return guarded("executeV2", false, [&] {
            const auto address = [&](int i) { return reinterpret_cast<cuda::DevicePtr>(bindings[i]); };
            const bool done = network_.execute(run(nullptr, address(0), address(1)), loaded_->streams_weights());
            if (!done) log_error("IExecutionContext::executeV2: Error Code 7: as the plan asks");
            return done;
        });
    }

private:
    const Plan& plan() const { return loaded_->plan; }
    bool specified() const {
        return output_shape(plan(), input_)[0] != 0 && input_[0] > 0 && input_[2] > 0 && input_[3] > 0;
    }

    Run run(cudaStream_t stream, cuda::DevicePtr input, cuda::DevicePtr output) {
        if (!specified()) throw std::runtime_error("not all input dimensions are specified");
        const bool by_allocator = plan().kind == dynamic_rows;
        if (!input || (!output && !by_allocator)) throw std::runtime_error("a tensor has no address");
        if (by_allocator && !allocator_) throw std::runtime_error("a data-dependent output has no allocator");
        Run result;
        result.stream = stream;
        result.input_shape = input_;
        result.input = input;
        result.output = output;
        result.allocate = [this, stream](std::int64_t rows) {
            const char* name = plan().output_name.c_str();
            const auto bytes = static_cast<std::uint64_t>(rows) * 6 * (plan().output_half ? 2 : 4);
            last_output_ = allocator_->reallocateOutputAsync(name, last_output_, bytes ? bytes : 1, 256, stream);
            if (last_output_) allocator_->notifyShape(name, to_dims({rows, 6}));
            return reinterpret_cast<cuda::DevicePtr>(last_output_);
        };
        return result;
    }

    std::shared_ptr<Loaded> loaded_;
    Network network_;
    std::int32_t profile_ = 0;
    std::vector<std::int64_t> input_;
    cuda::DevicePtr input_address_ = 0;
    cuda::DevicePtr output_address_ = 0;
    IOutputAllocator* allocator_ = nullptr;
    void* last_output_ = nullptr;
};

// NVIDIA's outer classes hold the inner one as mImpl and delete nothing: these own it.
struct FakeContext final : IExecutionContext {
    explicit FakeContext(std::shared_ptr<Loaded> loaded) : impl(std::move(loaded)) { mImpl = &impl; }
    ContextImpl impl;
};

class InspectorImpl final : public EngineInspectorDefaults {
public:
    explicit InspectorImpl(const Plan& plan)
        : text_("{\"Layers\": [\"toy_begin\", \"toy_head\"], \"Bindings\": [\"" + plan.input_name + "\", \"" +
                plan.output_name + "\"]}") {}
    const char* getEngineInformation(LayerInformationFormat) const noexcept override { return text_.c_str(); }

private:
    std::string text_;
};

struct FakeInspector final : IEngineInspector {
    explicit FakeInspector(const Plan& plan) : impl(plan) { mImpl = &impl; }
    InspectorImpl impl;
};

class EngineImpl final : public CudaEngineDefaults {
public:
    explicit EngineImpl(std::shared_ptr<Loaded> loaded) : loaded_(std::move(loaded)) {}

    const char* getName() const noexcept override { return plan().name.c_str(); }
    std::int32_t getNbOptimizationProfiles() const noexcept override {
        return static_cast<std::int32_t>(plan().profiles.size());
    }
    std::int32_t getNbIOTensors() const noexcept override { return 2; }
    const char* getIOTensorName(std::int32_t index) const noexcept override {
        return index == 0 ? plan().input_name.c_str() : index == 1 ? plan().output_name.c_str() : nullptr;
    }
    TensorIOMode getTensorIOMode(const char* name) const noexcept override {
        return loaded_->is_input(name) ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
    }
    DataType getTensorDataType(const char* name) const noexcept override {
        return (loaded_->is_input(name) ? plan().input_half : plan().output_half) ? DataType::kHALF : DataType::kFLOAT;
    }
    TensorFormat getTensorFormat(const char*) const noexcept override { return TensorFormat::kLINEAR; }
    TensorLocation getTensorLocation(const char*) const noexcept override { return TensorLocation::kDEVICE; }
    Dims getTensorShape(const char* name) const noexcept override {
        return to_dims(loaded_->is_input(name) ? plan().input : output_shape(plan(), plan().input));
    }
    Dims getProfileShape(const char* name, std::int32_t index, OptProfileSelector which) const noexcept override {
        if (!loaded_->is_input(name)) {
            log_error("getProfileShape: not an input");
            return no_dims();
        }
        return to_dims(plan().profiles[static_cast<std::size_t>(index)].shapes[static_cast<int>(which)]);
    }
    std::int32_t getNbAuxStreams() const noexcept override { return plan().aux_streams; }
    std::int64_t getDeviceMemorySizeV2() const noexcept override { return plan().scratch; }
    std::int64_t getStreamableWeightsSize() const noexcept override { return plan().streamable; }
    std::int64_t getWeightStreamingBudgetV2() const noexcept override { return loaded_->budget; }
    bool setWeightStreamingBudgetV2(std::int64_t bytes) noexcept override {
        if (bytes < 0 || loaded_->contexts > 0) {
            log_error("setWeightStreamingBudgetV2: not while an execution context exists");
            return false;
        }
        loaded_->budget = bytes;
        return true;
    }
    IEngineInspector* createEngineInspector() const noexcept override { return new FakeInspector(plan()); }
    IExecutionContext* createExecutionContext(ExecutionContextAllocationStrategy) noexcept override {
        if (plan().is("refuse_context") || plan().is("error_context"))
            log_error("createExecutionContext: as the plan asks");
        if (plan().is("refuse_context")) return nullptr;
        return guarded<IExecutionContext*>("createExecutionContext", nullptr, [&] { return new FakeContext(loaded_); });
    }

private:
    const Plan& plan() const { return loaded_->plan; }
    std::shared_ptr<Loaded> loaded_;
};

struct FakeEngine final : ICudaEngine {
    explicit FakeEngine(std::shared_ptr<Loaded> loaded) : impl(std::move(loaded)) { mImpl = &impl; }
    EngineImpl impl;
};

class RuntimeImpl final : public RuntimeDefaults {
public:
    ICudaEngine* deserializeCudaEngine(const void* blob, std::size_t size) noexcept override {
        return guarded<ICudaEngine*>("deserializeCudaEngine", nullptr, [&]() -> ICudaEngine* {
            Plan plan = parse_plan(std::string(static_cast<const char*>(blob), size));
            if (plan.major && plan.major != NV_TENSORRT_MAJOR)
                throw std::runtime_error(
                    "Version tag does not match. Current Version: " + std::to_string(NV_TENSORRT_MAJOR) +
                    ", Serialized Engine Version: " + std::to_string(plan.major));
            if (plan.is("refuse_load")) throw std::runtime_error("the plan asks to be refused");
            if (plan.is("error_load")) log_error("deserializeCudaEngine: an error that TensorRT does not act on");
            const cuda::Driver& driver = cuda::driver();
            register_twins(driver.library);
            return new FakeEngine(std::make_shared<Loaded>(std::move(plan), driver));
        });
    }
    using RuntimeDefaults::deserializeCudaEngine;
    void setDLACore(std::int32_t core) noexcept override { dla_core_ = core; }
    std::int32_t getDLACore() const noexcept override { return dla_core_; }
    std::int32_t getNbDLACores() const noexcept override { return 2; }

private:
    std::int32_t dla_core_ = -1;
};

struct FakeRuntime final : IRuntime {
    FakeRuntime() { mImpl = &impl; }
    RuntimeImpl impl;
};

}  // namespace

void not_implemented(const char* method) {
    log_error(std::string("the test TensorRT does not implement ") + method);
}

}  // namespace edgeyolo::toy

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT std::int32_t getInferLibVersion() noexcept {
    const char* asked = std::getenv("EDGEYOLO_FAKE_TENSORRT_VERSION");
    return asked ? std::atoi(asked) : NV_TENSORRT_VERSION;
}

EXPORT void* createInferRuntime_INTERNAL(void* logger, std::int32_t) noexcept {
    nvinfer1::ILogger* none = nullptr;
    edgeyolo::toy::the_logger.compare_exchange_strong(none, static_cast<nvinfer1::ILogger*>(logger));
    try {
        edgeyolo::cuda::driver();
    } catch (const std::exception& error) {
        edgeyolo::toy::log_error(error.what());
        return reinterpret_cast<void*>(0x228);  // what real libraries answer without a driver
    }
    return static_cast<nvinfer1::IRuntime*>(new edgeyolo::toy::FakeRuntime);
}
