// An engine file, loaded on one device: what it is, before anything is decided about thresholds and head.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>
#include "cuda.hpp"
#include "engine.hpp"
#include "engine_file.hpp"
#include "error.hpp"
#include "image.hpp"
#include "trt/loader.hpp"

namespace edgeyolo {

// Runs `work`. TensorRT answers "no" to whatever goes wrong; when that is the device, this throws the DeviceError that
// says so in place of the EngineError. Wants a ContextGuard.
template <class Work>
auto asking_the_device(const cuda::Device& device, Work&& work) {
    try {
        return work();
    } catch (const EngineError&) {
        cuda::memory_info(device);  // throws when the device is lost
        throw;
    }
}

// For destructors of what TensorRT made: it must see its own device. Where the context cannot be made current even at a
// second try (the device is lost), they go on without it, as the handles of cuda.hpp do. Not after fork().
class LastContext {
public:
    explicit LastContext(const cuda::Device& device) noexcept;

private:
    std::optional<cuda::ContextGuard> guard_;
};

class LoadedEngine {
public:
    // Reads the file, finds TensorRT, loads the plan on device `ordinal`. The caller's current device stays as it is.
    // Throws EngineError (the file, the library, the plan), DeviceError (the driver, memory), InvalidInput (ordinal).
    static std::shared_ptr<LoadedEngine> open(const std::string& path, int ordinal, const trt::Options& options);
    static std::shared_ptr<LoadedEngine> open(const EngineFile& file, int ordinal, const trt::Options& options);
    ~LoadedEngine();
    LoadedEngine(const LoadedEngine&) = delete;
    LoadedEngine& operator=(const LoadedEngine&) = delete;

    const std::string& path() const { return path_; }
    const std::string& header() const { return header_; }  // JSON text; empty for a bare plan
    const std::string& plan_digest() const { return plan_digest_; }
    std::size_t plan_bytes() const { return plan_bytes_; }
    const trt::Library& library() const { return library_; }
    const cuda::DeviceRef& device() const { return device_; }
    Engine& engine() const { return *engine_; }

    // The one input, checked: (N, 3, H, W), float32 or float16, plain device memory. EngineError tells what does not
    // fit; -1 is a dynamic dimension.
    const TensorInfo& input() const;
    // The outputs in the engine's order, each in plain device memory.
    std::vector<TensorInfo> outputs() const;
    // Place of the named one; of the first for no name. InvalidInput lists the names.
    std::size_t output_index(const std::string& name) const;

    bool dynamic() const;  // a dimension of the input is -1
    // Of a static engine its input; of a dynamic one the optimum of the first profile.
    Size default_target() const;
    int largest_batch() const;
    // The first profile that allows this input shape; -1 when none does. In words: what they allow.
    int profile_for(const Shape& shape) const;
    std::string allowed_shapes() const;

    // The shapes of the outputs for `batch` pictures of `target` pixels; a dimension that depends on the data stays
    // -1. For a dynamic engine this makes an execution context and drops it again. InvalidInput when the engine does
    // not take such an input.
    std::vector<Shape> output_shapes(Size target, int batch = 1) const;
    Shape output_shape(Size target, int batch = 1, const std::string& output = {}) const;

private:
    LoadedEngine() = default;

    std::string path_, header_, plan_digest_;
    std::size_t plan_bytes_ = 0;
    trt::Library library_;
    cuda::DeviceRef device_;  // outlives the engine
    std::unique_ptr<Engine> engine_;
};

}  // namespace edgeyolo
