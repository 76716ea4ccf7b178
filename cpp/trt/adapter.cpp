// The only file that includes NVIDIA's headers. It is compiled once per TensorRT major, each into a module of its own:
// nvinfer1's names are the same in every major, their layouts are not.
// Called are only methods that stand at one place of their table from 10.1 to the newest release of the major (what was
// added at the end differs between TensorRT and its variants), so one binary serves every minor of its major.
#include "adapter.hpp"
#include <NvInferRuntime.h>
#include <dlfcn.h>
#include <cstring>
#include <map>
#include <mutex>
#include "../error.hpp"
#include "log_ring.hpp"

static_assert(NV_TENSORRT_MAJOR > 10 || (NV_TENSORRT_MAJOR == 10 && NV_TENSORRT_MINOR >= 1),
              "edgeyolo needs the headers of TensorRT 10.1 or newer");

namespace edgeyolo::trt {
namespace {

namespace nv = nvinfer1;

class Logger final : public nv::ILogger {
public:
    void log(Severity severity, const char* text) noexcept override {
        if (severity <= Severity::kWARNING) ring.add(severity <= Severity::kERROR, text);
    }
    LogRing ring;
};

// A library keeps the first logger that it is given and ignores later ones, so there is one per library, and it lives
// for ever. `new` without `delete` on purpose: threads of TensorRT may still log while the process ends.
Logger& logger_of(void* library) {
    static auto& mutex = *new std::mutex;
    static auto& loggers = *new std::map<void*, Logger>;
    const std::lock_guard<std::mutex> lock(mutex);
    return loggers[library];
}

// Without a driver, libraries answer the address of a member of a null object (0x228 was seen).
template <class T>
T* sane(T* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) < 65536 ? nullptr : pointer;
}

// Did the calling thread log an error since this object was made?
class Watch {
public:
    bool clean() const { return LogRing::errors_of_this_thread() == before_; }

private:
    std::uint64_t before_ = LogRing::errors_of_this_thread();
};

std::string words(const Logger& logger, std::uint64_t mark) {
    const std::string text = logger.ring.errors(mark);
    return text.empty() ? "TensorRT logged no reason (another logger may be registered in this process)"
                        : "TensorRT says: " + text;
}

Shape to_shape(const nv::Dims& dims) {
    return dims.nbDims < 0 ? Shape{} : Shape(dims.d, dims.d + dims.nbDims);
}

DType to_dtype(nv::DataType type) {
    switch (type) {
        case nv::DataType::kFLOAT: return DType::float32;
        case nv::DataType::kHALF: return DType::float16;
        case nv::DataType::kBF16: return DType::bfloat16;
        case nv::DataType::kINT8: return DType::int8;
        case nv::DataType::kUINT8: return DType::uint8;
        case nv::DataType::kINT32: return DType::int32;
        case nv::DataType::kINT64: return DType::int64;
        case nv::DataType::kBOOL: return DType::boolean;
        default: return DType::other;
    }
}

std::string dtype_text(nv::DataType type) {
    const DType known = to_dtype(type);
    if (known != DType::other) return dtype_name(known);
    if (type == nv::DataType::kFP8) return "float8";
    if (type == nv::DataType::kINT4) return "int4";
    return "TensorRT data type " + std::to_string(static_cast<int>(type));
}

// What an engine needs for as long as one of its contexts lives. Members die in reverse order: engine, then runtime.
struct Loaded {
    Logger& logger;
    std::string library_text;
    std::unique_ptr<nv::IRuntime> runtime;
    std::unique_ptr<nv::ICudaEngine> engine;
};

// Hands TensorRT's requests for output memory to our interface.
class AllocatorBridge final : public nv::IOutputAllocator {
public:
    explicit AllocatorBridge(OutputAllocator& target) : target_(target) {}
    // 11 has no other call; 10 calls the plain one only from code older than 10.0.
    void* reallocateOutputAsync(const char* tensor, void* current, std::uint64_t size, std::uint64_t alignment,
                                cudaStream_t stream) override {
        return target_.allocate(tensor, current, size, alignment, stream);
    }
    void notifyShape(const char* tensor, const nv::Dims& dims) noexcept override {
        if (dims.nbDims >= 0) target_.set_shape(tensor, to_shape(dims).data(), dims.nbDims);
    }

private:
    OutputAllocator& target_;
};

class TrtContext final : public Context {
public:
    TrtContext(std::shared_ptr<const Loaded> loaded, std::unique_ptr<nv::IExecutionContext> context)
        : loaded_(std::move(loaded)), context_(std::move(context)) {}

    bool set_input_shape(const char* name, const Shape& shape) override {
        nv::Dims dims{};
        if (shape.size() > nv::Dims::MAX_DIMS) return false;
        dims.nbDims = static_cast<std::int32_t>(shape.size());
        std::copy(shape.begin(), shape.end(), dims.d);
        return context_->setInputShape(name, dims);
    }
    Shape shape(const char* name) const override { return to_shape(context_->getTensorShape(name)); }
    bool set_address(const char* name, void* device_pointer) override {
        return context_->setTensorAddress(name, device_pointer);
    }
    std::int64_t max_output_size(const char* name) const override { return context_->getMaxOutputSize(name); }
    bool set_output_allocator(const char* name, OutputAllocator* allocator) override {
        auto bridge = allocator ? std::make_unique<AllocatorBridge>(*allocator) : nullptr;
        if (!context_->setOutputAllocator(name, bridge.get())) return false;
        bridges_[name] = std::move(bridge);  // the old one dies after TensorRT has let go of it
        return true;
    }
    bool set_profile(int index, void* stream) override {
        return context_->setOptimizationProfileAsync(index, static_cast<cudaStream_t>(stream));
    }
    int profile() const override { return context_->getOptimizationProfile(); }
    void set_aux_streams(void* const* streams, int count) override {
        std::vector<cudaStream_t> typed(static_cast<std::size_t>(count));
        for (std::size_t i = 0; i < typed.size(); ++i) typed[i] = static_cast<cudaStream_t>(streams[i]);
        context_->setAuxStreams(typed.data(), count);
    }
    bool enqueue(void* stream) override {
        const Watch watch;
        return context_->enqueueV3(static_cast<cudaStream_t>(stream)) && watch.clean();
    }
    bool execute(void* const* bindings) override {
        const Watch watch;
        return context_->executeV2(bindings) && watch.clean();
    }

private:
    std::shared_ptr<const Loaded> loaded_;
    std::map<std::string, std::unique_ptr<AllocatorBridge>> bridges_;  // dies after the context that points at them
    std::unique_ptr<nv::IExecutionContext> context_;
};

TensorInfo describe(const nv::ICudaEngine& engine, const char* name) {
    TensorInfo info;
    info.name = name;
    info.input = engine.getTensorIOMode(name) == nv::TensorIOMode::kINPUT;
    const nv::DataType type = engine.getTensorDataType(name);
    info.dtype = to_dtype(type);
    info.dtype_text = dtype_text(type);
    info.linear = engine.getTensorFormat(name) == nv::TensorFormat::kLINEAR;
    info.on_host = engine.getTensorLocation(name) == nv::TensorLocation::kHOST;
    info.shape = to_shape(engine.getTensorShape(name));
    // Asking for the profile of an output, or of a host tensor's shape, logs an error.
    for (int i = 0; info.input && !info.on_host && i < engine.getNbOptimizationProfiles(); ++i)
        info.profiles.push_back({to_shape(engine.getProfileShape(name, i, nv::OptProfileSelector::kMIN)),
                                 to_shape(engine.getProfileShape(name, i, nv::OptProfileSelector::kOPT)),
                                 to_shape(engine.getProfileShape(name, i, nv::OptProfileSelector::kMAX))});
    return info;
}

class TrtEngine final : public Engine {
public:
    explicit TrtEngine(std::shared_ptr<const Loaded> loaded) : loaded_(std::move(loaded)) {
        const char* name = engine().getName();
        name_ = name ? name : "";
        for (int i = 0; i < engine().getNbIOTensors(); ++i)
            io_.push_back(describe(engine(), engine().getIOTensorName(i)));
    }

    const std::string& name() const override { return name_; }
    const std::vector<TensorInfo>& io() const override { return io_; }
    int profiles() const override { return engine().getNbOptimizationProfiles(); }
    int aux_streams() const override { return engine().getNbAuxStreams(); }
    std::int64_t device_memory_size() const override { return engine().getDeviceMemorySizeV2(); }
    std::int64_t streamable_weights_size() const override { return engine().getStreamableWeightsSize(); }
    std::int64_t weight_streaming_budget() const override { return engine().getWeightStreamingBudgetV2(); }
    bool set_weight_streaming_budget(std::int64_t bytes) override { return engine().setWeightStreamingBudgetV2(bytes); }
    std::string inspect() const override {
        const std::unique_ptr<nv::IEngineInspector> inspector(sane(engine().createEngineInspector()));
        const char* text = inspector ? inspector->getEngineInformation(nv::LayerInformationFormat::kJSON) : nullptr;
        return text ? text : "";
    }
    int dla_core() const override { return loaded_->runtime->getDLACore(); }
    std::unique_ptr<Context> create_context() override {
        const std::uint64_t mark = loaded_->logger.ring.mark();
        const Watch watch;
        std::unique_ptr<nv::IExecutionContext> context(sane(engine().createExecutionContext()));
        if (!context || !watch.clean())
            throw EngineError("cannot create an execution context with " + loaded_->library_text + ". " +
                              words(loaded_->logger, mark) + ". Is the device's memory full? This engine asks for " +
                              std::to_string(device_memory_size()) + " bytes per context");
        return std::make_unique<TrtContext>(loaded_, std::move(context));
    }
    std::string last_errors() const override { return loaded_->logger.ring.errors(); }

private:
    nv::ICudaEngine& engine() const { return *loaded_->engine; }

    std::shared_ptr<const Loaded> loaded_;
    std::string name_;
    std::vector<TensorInfo> io_;
};

template <class Function>
Function* symbol(void* library, const char* name, const std::string& library_text) {
    void* found = dlsym(library, name);
    check<EngineError>(found != nullptr, library_text + " has no function " + name + ": it is no TensorRT runtime");
    return reinterpret_cast<Function*>(found);
}

std::unique_ptr<Engine> load(const AdapterRequest& request) {
    Logger& logger = logger_of(request.library);
    const std::uint64_t mark = logger.ring.mark();
    const Watch watch;
    if (request.plugins) {
        auto* init = symbol<bool(void*, const char*)>(request.plugins, "initLibNvInferPlugins", request.library_text);
        check<EngineError>(init(&logger, ""), "TensorRT's plugins cannot be registered. " + words(logger, mark));
    }

    auto* create =
        symbol<void*(void*, std::int32_t)>(request.library, "createInferRuntime_INTERNAL", request.library_text);
    auto loaded = std::shared_ptr<Loaded>(new Loaded{logger, request.library_text, nullptr, nullptr});
    loaded->runtime.reset(sane(static_cast<nv::IRuntime*>(create(&logger, NV_TENSORRT_VERSION))));
    if (!loaded->runtime || !watch.clean()) {
        loaded->runtime.release();  // half made: its destructor crashes
        throw EngineError(request.library_text + " gave no runtime. " + words(logger, mark));
    }
    if (request.dla_core >= 0) {
        const int cores = loaded->runtime->getNbDLACores();
        check<EngineError>(request.dla_core < cores, "DLA core " + std::to_string(request.dla_core) +
                                                         " was asked for, this device has " + std::to_string(cores) +
                                                         " of them");
        loaded->runtime->setDLACore(request.dla_core);
    }
    loaded->engine.reset(sane(loaded->runtime->deserializeCudaEngine(request.plan, request.plan_size)));
    if (!loaded->engine || !watch.clean())
        throw EngineError("the plan cannot be loaded by " + request.library_text + ". " + words(logger, mark) +
                          ". A plan runs on the TensorRT version and the kind of GPU that it was built for: export it "
                          "again on this machine");
    return std::make_unique<TrtEngine>(std::move(loaded));
}

}  // namespace
}  // namespace edgeyolo::trt

extern "C" __attribute__((visibility("default"))) const edgeyolo::trt::AdapterEntry* edgeyolo_trt_adapter() {
    static constexpr edgeyolo::trt::AdapterEntry entry{edgeyolo::trt::adapter_abi, NV_TENSORRT_VERSION,
                                                       edgeyolo::trt::load};
    return &entry;
}
