// A network and its execution contexts, by tensor name. No TensorRT type appears here: cpp/trt/adapter.cpp implements
// these classes once per TensorRT major, tests/fakes/nvinfer.cpp stands behind it in the tests.
//
// Lifetime: a Context keeps its Engine alive, an Engine its runtime; the library behind them is never closed and its
// logger never dies. So they may be destroyed in any order, but always with the device's context current.
// Device: every call except the plain getters touches the device. The caller pushes the context of the device that the
// engine was loaded for (cuda::ContextGuard) around each of them, destruction included; nothing here changes it.
// Threads: an Engine may be used from several threads, a Context from one at a time.
// `stream` is the driver's CUstream.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace edgeyolo {

enum class DType {
    float32,
    float16,
    bfloat16,
    int8,
    uint8,
    int32,
    int64,
    boolean,
    other
};

// Bytes of one element; 0 for `other` (FP8, INT4, ...), which the pipeline refuses.
constexpr std::size_t element_size(DType dtype) {
    switch (dtype) {
        case DType::float32:
        case DType::int32: return 4;
        case DType::float16:
        case DType::bfloat16: return 2;
        case DType::int64: return 8;
        case DType::int8:
        case DType::uint8:
        case DType::boolean: return 1;
        case DType::other: break;
    }
    return 0;
}
const char* dtype_name(DType dtype);

using Shape = std::vector<std::int64_t>;     // -1 is a dynamic dimension
std::string shape_text(const Shape& shape);  // "(1, 3, -1, -1)"

// What one optimization profile allows for an input.
struct ProfileShape {
    Shape min, opt, max;
};

struct TensorInfo {
    std::string name;
    bool input = false;
    DType dtype = DType::other;
    std::string dtype_text;  // the library's own name of a type that is `other`
    bool linear = true;      // plain row-major memory; false: a vectorised format, which the pipeline refuses
    bool on_host = false;    // a shape tensor: TensorRT reads it from host memory
    Shape shape;             // as built
    std::vector<ProfileShape> profiles;  // inputs only, one per optimization profile
};

// Where TensorRT asks for the memory of an output whose shape depends on the data. Called while enqueue runs, on its
// thread; must not throw.
class OutputAllocator {
public:
    virtual ~OutputAllocator() = default;
    // `current` is what the last call returned for this tensor, or nullptr. nullptr as the answer makes enqueue fail.
    virtual void* allocate(const char* tensor, void* current, std::size_t bytes, std::size_t alignment,
                           void* stream) noexcept = 0;
    // The output's true shape, known once its producer has run.
    virtual void set_shape(const char* tensor, const std::int64_t* dims, int rank) noexcept = 0;
};

class Context {
public:
    virtual ~Context() = default;
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    // The setters and runs answer false when TensorRT refuses; Engine::last_errors() has its words.
    virtual bool set_input_shape(const char* name, const Shape& shape) = 0;
    // The shape under the input shapes set so far: a -1 left once all of them are set is a data-dependent dimension.
    // Empty for a name that is no tensor of this engine.
    virtual Shape shape(const char* name) const = 0;
    virtual bool set_address(const char* name, void* device_pointer) = 0;
    // Upper bound of an output's bytes for the current input shapes; -1 when unknown.
    virtual std::int64_t max_output_size(const char* name) const = 0;
    // The allocator outlives its use: set nullptr, or destroy the context, before it dies.
    virtual bool set_output_allocator(const char* name, OutputAllocator* allocator) = 0;
    // Only outside a capture. The switch is ordered on `stream`; input shapes are to be set again.
    virtual bool set_profile(int index, void* stream) = 0;
    virtual int profile() const = 0;
    // Engine::aux_streams() of them, all different, none the default stream. Without this TensorRT makes its own.
    virtual void set_aux_streams(void* const* streams, int count) = 0;

    // enqueueV3: returns once the work is on the stream.
    virtual bool enqueue(void* stream) = 0;
    // executeV2: synchronous, on a stream of its own. `bindings` in the order of Engine::io(); it does not wait for any
    // other stream, so what wrote the inputs must have been synchronised.
    virtual bool execute(void* const* bindings) = 0;

protected:
    Context() = default;
};

class Engine {
public:
    virtual ~Engine() = default;
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    virtual const std::string& name() const = 0;
    virtual const std::vector<TensorInfo>& io() const = 0;  // in I/O index order
    virtual int profiles() const = 0;
    virtual int aux_streams() const = 0;
    // Bytes of scratch that one context needs.
    virtual std::int64_t device_memory_size() const = 0;

    // Weight streaming: 0 streamable bytes for an engine built without it. It is in use while the budget is smaller
    // than the streamable size; enqueue then is synchronous and cannot be captured.
    virtual std::int64_t streamable_weights_size() const = 0;
    virtual std::int64_t weight_streaming_budget() const = 0;
    virtual bool set_weight_streaming_budget(std::int64_t bytes) = 0;  // only while no context exists

    // The layers as JSON, as far as the engine was built to tell them; empty when it tells nothing.
    virtual std::string inspect() const = 0;
    // The DLA core that the runtime was given for this engine; -1 where the machine has none. That the engine uses it
    // stands in its header (`dla`) or in inspect(), not here.
    virtual int dla_core() const = 0;

    // Throws EngineError with TensorRT's own words.
    virtual std::unique_ptr<Context> create_context() = 0;

    // The newest errors that TensorRT logged, those of this thread when there are any, one a line, oldest first.
    virtual std::string last_errors() const = 0;

protected:
    Engine() = default;
};

inline bool streams_weights(const Engine& engine) {
    return engine.weight_streaming_budget() < engine.streamable_weights_size();
}

}  // namespace edgeyolo
