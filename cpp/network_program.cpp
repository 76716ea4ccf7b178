#include "network_program.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include "error.hpp"
#include "half_math.hpp"

namespace edgeyolo {
namespace {

std::size_t elements(const Shape& shape) {
    std::size_t count = 1;
    for (const std::int64_t size : shape) count *= static_cast<std::size_t>(std::max<std::int64_t>(size, 0));
    return count;
}

bool depends_on_data(const Shape& shape) {
    return std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; });
}

void* address(cuda::DevicePtr pointer) {
    return reinterpret_cast<void*>(pointer);
}

// Memory that only grows. What it held is lost; nothing on a stream may still use it.
void grow(cuda::DeviceBuffer& buffer, const cuda::DeviceRef& device, std::size_t bytes) {
    if (bytes <= buffer.bytes()) return;
    buffer = {};
    buffer = cuda::DeviceBuffer(device, bytes);
}

}  // namespace

Head head_for(const HeadChoice& choice, const TensorInfo& tensor, const Shape& shape, int batch) {
    const auto refuse = [&](const std::string& expected) {
        throw EngineError("the output " + tensor.name + " has the shape " + shape_text(shape) + ", expected was " +
                          expected + ": name the head and the number of classes that this model has");
    };
    Shape one = shape;
    if (one.size() == 3 && (one[0] == batch || one[0] == -1)) one.erase(one.begin());
    if (one.size() != 2 || (shape.size() == 2 && batch != 1))
        refuse("three dimensions, " + std::to_string(batch) + " pictures first");
    const bool raw = choice.kind == HeadKind::raw;
    const std::int64_t columns = one[raw ? 0 : 1];
    const int first = choice.kind == HeadKind::yolov5 ? 5 : 4;
    const int wanted = choice.kind == HeadKind::end2end ? 6 : first + choice.classes;
    if (columns != wanted)
        refuse(std::to_string(wanted) + " values per box (" + std::to_string(choice.classes) + " classes)");
    if (one[raw ? 1 : 0] > (1 << 24)) refuse("less than 16 million boxes");
    return {choice.kind, static_cast<int>(one[raw ? 1 : 0]), choice.classes};
}

void* NetworkProgram::Growing::allocate(const char*, void*, std::size_t bytes, std::size_t, void*) noexcept {
    try {
        grow(memory, device_, std::max<std::size_t>(bytes, 1));
        return address(memory.pointer());
    } catch (...) {  // TensorRT reports that there is no memory
        return nullptr;
    }
}

void NetworkProgram::Growing::set_shape(const char*, const std::int64_t* dims, int rank) noexcept {
    try {
        shape.assign(dims, dims + rank);
    } catch (...) {
        shape.clear();
    }
}

NetworkProgram::NetworkProgram(std::shared_ptr<LoadedEngine> engine, FrameUpload& upload, FrameStages& stages,
                               HeadChoice head)
    : engine_(std::move(engine)), upload_(upload), stages_(stages), choice_(head), input_(engine_->input()) {
    const cuda::DeviceRef& device = engine_->device();
    for (const TensorInfo& tensor : engine_->outputs()) outputs_.push_back({tensor, {}, {}, {}});
    context_ = engine_->engine().create_context();
    // TensorRT's own ones would do, but are not promised to be non-blocking, which a capture needs.
    std::vector<void*> streams;
    for (int i = 0; i < engine_->engine().aux_streams(); ++i) {
        aux_streams_.emplace_back(device);
        streams.push_back(aux_streams_.back().get());
    }
    if (!streams.empty()) context_->set_aux_streams(streams.data(), static_cast<int>(streams.size()));
}

void NetworkProgram::want(Size target, int batch) {
    wanted_ = {batch, 3, target.height, target.width};
    target_ = target;
    batch_ = batch;
}

// False when TensorRT refuses.
bool NetworkProgram::apply_shape(const cuda::Stream& stream) {
    if (wanted_ == applied_) return true;
    applied_.clear();  // should anything below fail, the next run starts over
    const int profile = engine_->profile_for(wanted_);
    if (profile >= 0 && profile != context_->profile()) {
        if (!context_->set_profile(profile, stream.get())) return false;
        stream.synchronize();
    }
    if (!context_->set_input_shape(input_.name.c_str(), wanted_)) return false;
    grow(input_memory_, engine_->device(), elements(wanted_) * element_size(input_.dtype));
    if (!context_->set_address(input_.name.c_str(), address(input_memory_.pointer()))) return false;
    for (Output& output : outputs_) {
        const char* name = output.tensor.name.c_str();
        output.shape = context_->shape(name);
        if (depends_on_data(output.shape)) {
            if (!output.growing) output.growing = std::make_unique<Growing>(engine_->device());
            if (!context_->set_output_allocator(name, output.growing.get())) return false;
            continue;
        }
        const auto known = static_cast<std::size_t>(std::max<std::int64_t>(0, context_->max_output_size(name)));
        grow(output.memory, engine_->device(),
             std::max(known, elements(output.shape) * element_size(output.tensor.dtype)));
        if (!context_->set_address(name, address(output.memory.pointer()))) return false;
    }
    const Output& boxes = outputs_[choice_.output];
    if (!boxes.growing) {
        head_ = head_for(choice_, boxes.tensor, boxes.shape, batch_);
        if (head_.kind != HeadKind::end2end) grow(candidates_, engine_->device(), CandidateBuffers::bytes(head_.rows));
    }
    std::size_t bytes = input_memory_.bytes() + candidates_.bytes();
    for (const Output& output : outputs_) bytes += output.memory.bytes();
    device_bytes_ = bytes;
    applied_ = wanted_;
    return true;
}

bool NetworkProgram::enqueue(const cuda::Stream& stream) {
    if (!apply_shape(stream)) return false;
    stages_.before(stream, upload_, batch_, input_memory_.pointer(), input_.dtype, target_);
    if (marks) marks->letterboxed.record(stream);
    if (!context_->enqueue(stream.get())) return false;
    if (marks) marks->inferred.record(stream);
    after(stream);
    return true;
}

bool NetworkProgram::execute(const cuda::Stream& stream) {
    if (!apply_shape(stream)) return false;
    stages_.before(stream, upload_, batch_, input_memory_.pointer(), input_.dtype, target_);
    if (marks) marks->letterboxed.record(stream);
    // executeV2 runs on a stream of its own and waits for none of ours.
    stream.synchronize();
    std::vector<void*> bindings;
    std::size_t output = 0;
    for (const TensorInfo& tensor : engine_->engine().io())
        bindings.push_back(address(tensor.input ? input_memory_.pointer() : outputs_[output++].pointer()));
    if (!context_->execute(bindings.data())) return false;
    if (marks) marks->inferred.record(stream);
    after(stream);
    return true;
}

void NetworkProgram::after(const cuda::Stream& stream) {
    const Output& boxes = outputs_[choice_.output];
    Head head = head_;
    if (boxes.growing) {
        // Known by now: TensorRT tells it before enqueueV3 returns. The memory may have moved as well.
        head = head_for(choice_, boxes.tensor, boxes.growing->shape, batch_);
        if (head.kind != HeadKind::end2end) grow(candidates_, engine_->device(), CandidateBuffers::bytes(head.rows));
    }
    stages_.after(stream, upload_, batch_, boxes.pointer(), boxes.tensor.dtype, head,
                  CandidateBuffers::in(candidates_.pointer(), head.rows));
}

void NetworkProgram::prepare_check(const cuda::Stream& stream, unsigned seed) {
    stream.synchronize();
    // A little smaller than the input, so that the letterbox resizes and pads.
    const Size size{std::max(1, target_.width * 3 / 4), std::max(1, target_.height * 2 / 3)};
    const std::size_t bytes = 3 * static_cast<std::size_t>(size.width) * static_cast<std::size_t>(size.height);
    std::vector<std::vector<std::uint8_t>> pictures(static_cast<std::size_t>(batch_));
    std::vector<Frame> frames;
    std::mt19937 random(seed);
    for (auto& picture : pictures) {
        picture.resize(bytes);
        for (std::uint8_t& value : picture) value = static_cast<std::uint8_t>(random() >> 24);
        frames.push_back(ImageView{picture.data(), size, 3 * size.width, 3, 1, PixelFormat::bgr});
    }
    // A low threshold: the more rows there are, the more is compared.
    upload_.put(stream, frames, target_, 0.01f);
    stages_.spoil(stream);
    for (const Output& output : outputs_)
        if (output.pointer()) stream.fill(output.pointer(), 0xab, output.memory.bytes());
    stream.synchronize();
}

ProgramOutput NetworkProgram::read_check(const cuda::Stream& stream) {
    ProgramOutput result;
    for (const Output& output : outputs_) {
        const std::size_t count = elements(output.shape);
        std::vector<std::uint8_t> bytes(count * element_size(output.tensor.dtype));
        stream.copy_to_host(bytes.data(), output.pointer(), bytes.size());
        stream.synchronize();
        result.exact.insert(result.exact.end(), bytes.begin(), bytes.end());
        if (output.tensor.dtype == DType::float32) {
            const std::size_t first = result.values.size();
            result.values.resize(first + count);
            std::memcpy(result.values.data() + first, bytes.data(), bytes.size());
        } else if (output.tensor.dtype == DType::float16) {
            for (std::size_t i = 0; i < count; ++i) {
                std::uint16_t half = 0;
                std::memcpy(&half, bytes.data() + 2 * i, 2);
                result.values.push_back(half_to_float(half));
            }
        }
    }
    stream.synchronize();
    for (int place = 0; place < batch_; ++place) stages_.append_valid(place, result.exact);
    return result;
}

}  // namespace edgeyolo
