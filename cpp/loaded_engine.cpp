#include "loaded_engine.hpp"

#include <algorithm>
#include <mutex>
#include "error.hpp"
#include "graph_capture.hpp"

namespace edgeyolo {
namespace {

std::string describe(const TensorInfo& tensor) {
    std::string text = tensor.input ? "input " : "output ";
    text += tensor.name + " " + (tensor.dtype == DType::other ? tensor.dtype_text : dtype_name(tensor.dtype)) + " " +
            shape_text(tensor.shape);
    if (!tensor.linear) text += " in a vectorised format";
    if (tensor.on_host) text += " in host memory";
    return text;
}

[[noreturn]] void refuse(const LoadedEngine& engine, const std::string& what) {
    std::string tensors;
    for (const TensorInfo& tensor : engine.engine().io()) tensors += "\n  " + describe(tensor);
    throw EngineError(engine.path() + ": " + what + ". Its tensors:" + tensors);
}

void check_tensor(const LoadedEngine& engine, const TensorInfo& tensor) {
    if (tensor.on_host) refuse(engine, tensor.name + " must be in device memory");
    if (!tensor.linear)
        refuse(engine, tensor.name + " must be in plain row-major memory: build it without an I/O format");
    if (element_size(tensor.dtype) == 0) refuse(engine, tensor.name + " has a data type that is not supported");
}

bool allows(const ProfileShape& profile, const Shape& shape) {
    if (profile.min.size() != shape.size() || profile.max.size() != shape.size()) return false;
    for (std::size_t i = 0; i < shape.size(); ++i)
        if (shape[i] < profile.min[i] || shape[i] > profile.max[i]) return false;
    return true;
}

}  // namespace

LastContext::LastContext(const cuda::Device& device) noexcept {
    for (int i = 0; i < 2 && !guard_; ++i) {
        try {
            guard_.emplace(device);
        } catch (const std::exception&) {  // the handles' own destructors report
        }
    }
}

std::shared_ptr<LoadedEngine> LoadedEngine::open(const std::string& path, int ordinal, const trt::Options& options) {
    return open(EngineFile::read(path), ordinal, options);
}

std::shared_ptr<LoadedEngine> LoadedEngine::open(const EngineFile& file, int ordinal, const trt::Options& options) {
    // From here on its destructor cleans up.
    const std::shared_ptr<LoadedEngine> loaded(new LoadedEngine);
    loaded->path_ = file.path();
    loaded->header_ = std::string(file.header());
    loaded->plan_digest_ = file.plan_digest();
    loaded->plan_bytes_ = file.plan_size();
    loaded->device_ = cuda::Device::open(ordinal);
    loaded->library_ = trt::find_library(options);
    {
        const cuda::ContextGuard guard(*loaded->device_);
        // Loading allocates and synchronises, which a capture in another thread may not meet.
        const std::lock_guard<std::mutex> lock(capture_mutex());
        loaded->engine_ = asking_the_device(*loaded->device_,
                                            [&] { return trt::load_engine(file.plan(), file.plan_size(), options); });
    }
    loaded->input();
    for (const TensorInfo& tensor : loaded->outputs()) check_tensor(*loaded, tensor);
    return loaded;
}

LoadedEngine::~LoadedEngine() {
    if (!engine_) return;
    if (device_->driver.forked()) {  // TensorRT must not be touched
        (void)engine_.release();
        return;
    }
    const LastContext context(*device_);
    const std::lock_guard<std::mutex> lock(capture_mutex());
    engine_.reset();
}

const TensorInfo& LoadedEngine::input() const {
    const TensorInfo* found = nullptr;
    for (const TensorInfo& tensor : engine_->io()) {
        if (!tensor.input) continue;
        if (found) refuse(*this, "one input was expected, the picture");
        found = &tensor;
    }
    if (!found) refuse(*this, "it has no input");
    check_tensor(*this, *found);
    if (found->shape.size() != 4 || found->shape[1] != 3)
        refuse(*this, "the input must have the shape (N, 3, height, width)");
    if (found->dtype != DType::float32 && found->dtype != DType::float16)
        refuse(*this, "the input must be float32 or float16: export the engine with such tensors");
    return *found;
}

std::vector<TensorInfo> LoadedEngine::outputs() const {
    std::vector<TensorInfo> found;
    for (const TensorInfo& tensor : engine_->io())
        if (!tensor.input) found.push_back(tensor);
    if (found.empty()) refuse(*this, "it has no output");
    return found;
}

bool LoadedEngine::dynamic() const {
    for (const std::int64_t size : input().shape)
        if (size < 0) return true;
    return false;
}

Size LoadedEngine::default_target() const {
    const TensorInfo& tensor = input();
    const auto side = [&](std::size_t axis) {
        const bool fixed = tensor.shape[axis] >= 0 || tensor.profiles.empty();
        return static_cast<int>(fixed ? tensor.shape[axis] : tensor.profiles.front().opt.at(axis));
    };
    return {side(3), side(2)};
}

int LoadedEngine::largest_batch() const {
    const TensorInfo& tensor = input();
    if (tensor.shape[0] >= 0) return static_cast<int>(tensor.shape[0]);
    std::int64_t largest = 1;
    for (const ProfileShape& profile : tensor.profiles) largest = std::max(largest, profile.max.at(0));
    return static_cast<int>(largest);
}

int LoadedEngine::profile_for(const Shape& shape) const {
    const TensorInfo& tensor = input();
    if (!dynamic()) return shape == tensor.shape ? 0 : -1;
    for (std::size_t i = 0; i < tensor.profiles.size(); ++i)
        if (allows(tensor.profiles[i], shape)) return static_cast<int>(i);
    return -1;
}

std::string LoadedEngine::allowed_shapes() const {
    if (!dynamic()) return shape_text(input().shape);
    std::string text;
    for (const ProfileShape& profile : input().profiles)
        text += (text.empty() ? "" : ", or ") + shape_text(profile.min) + " to " + shape_text(profile.max);
    return text;
}

std::vector<Shape> LoadedEngine::output_shapes(Size target, int batch) const {
    const Shape wanted{batch, 3, target.height, target.width};
    std::vector<Shape> shapes;
    if (!dynamic()) {
        if (wanted != input().shape)
            throw InvalidInput("this engine takes the input shape " + shape_text(input().shape) + ", asked was " +
                               shape_text(wanted));
        for (const TensorInfo& tensor : outputs()) shapes.push_back(tensor.shape);
        return shapes;
    }
    const int profile = profile_for(wanted);
    if (profile < 0)
        throw InvalidInput("no optimization profile of this engine allows the input shape " + shape_text(wanted) +
                           ": it takes " + allowed_shapes());
    const cuda::ContextGuard guard(*device_);
    const cuda::Stream stream(device_);
    const std::lock_guard<std::mutex> lock(capture_mutex());
    const std::unique_ptr<Context> context = engine_->create_context();
    if (profile != 0) {
        check<EngineError>(context->set_profile(profile, stream.get()), engine_->last_errors());
        stream.synchronize();
    }
    check<EngineError>(context->set_input_shape(input().name.c_str(), wanted), engine_->last_errors());
    for (const TensorInfo& tensor : outputs()) shapes.push_back(context->shape(tensor.name.c_str()));
    return shapes;
}

Shape LoadedEngine::output_shape(Size target, int batch, const std::string& output) const {
    return output_shapes(target, batch)[output_index(output)];
}

std::size_t LoadedEngine::output_index(const std::string& name) const {
    const std::vector<TensorInfo> all = outputs();
    if (name.empty()) return 0;
    std::string names;
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i].name == name) return i;
        names += (i ? ", " : "") + all[i].name;
    }
    throw InvalidInput("the engine has no output '" + name + "', it has: " + names);
}

}  // namespace edgeyolo
