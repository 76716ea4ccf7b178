#include "pipeline.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include "error.hpp"
#include "flights.hpp"
#include "slot.hpp"

namespace edgeyolo {
namespace {

std::string number(std::int64_t value) {
    return std::to_string(value);
}

GraphStats sum(const std::vector<GraphStats>& parts) {
    GraphStats total = parts.front();
    for (std::size_t i = 1; i < parts.size(); ++i) {
        const GraphStats& part = parts[i];
        // The worst is told: a slot that fell back must not hide behind one that did not.
        if (part.path != total.path && part.path != Path::graph) total.path = part.path;
        if (total.reason.empty()) total.reason = part.reason;
        total.captures += part.captures;
        total.failed_tries += part.failed_tries;
        total.replays += part.replays;
        total.enqueued += part.enqueued;
        total.executed += part.executed;
        total.fallbacks += part.fallbacks;
        total.capture_ms += part.capture_ms;
        total.device_bytes += part.device_bytes;
        total.graphs += part.graphs;
    }
    return total;
}

// Two submits of one buffer at a time would both read what the second one wrote.
void mark_reader(const Frame& frame, const Ticket& ticket, const std::function<bool(const Ticket&)>& done) {
    const auto* shared = std::get_if<std::shared_ptr<FrameBuffer>>(&frame);
    if (!shared) return;
    FrameBuffer& buffer = **shared;
    const std::lock_guard<std::mutex> lock(buffer.mutex);
    const auto reader = std::static_pointer_cast<Flight>(buffer.reader.lock());
    if (reader && reader != ticket && !done(reader))
        throw InvalidInput(
            "this frame buffer is still in flight: fetch the result of its last submit first, or use a buffer per "
            "frame in flight");
    buffer.reader = ticket;
}

}  // namespace

class Pipeline::Impl {
public:
    Impl(std::shared_ptr<LoadedEngine> engine, PipelineOptions options);

    Ticket submit(const std::vector<Frame>& frames, const SubmitOptions& options);
    std::optional<FrameOutcome> wait(const Ticket& ticket, std::optional<std::chrono::nanoseconds> timeout,
                                     bool on_device);
    bool done(const Ticket& ticket) const;
    void close();
    PipelineInfo info() const;
    // Throws DeviceError after fork().
    void alive() const;
    bool forked() const { return driver_.forked(); }
    // InvalidInput once closed. A call keeps its own reference, so that close() in another thread waits for nobody.
    std::shared_ptr<LoadedEngine> engine() const;

    PipelineOptions options_;
    Size target_;
    int batch_ = 1;
    Shape output_shape_;

private:
    SlotPlan plan(const std::shared_ptr<LoadedEngine>& engine);
    int run_batch(const LoadedEngine& engine, Size target, std::size_t pictures) const;
    void check_ticket(const Ticket& ticket) const;

    const cuda::Driver& driver_;
    mutable std::mutex engine_mutex_;
    std::shared_ptr<LoadedEngine> engine_;  // empty once closed: a ticket that somebody holds must not keep the weights
    std::int64_t scratch_bytes_ = 0;
    Flights flights_;
    std::atomic<bool> warned_{false};
    mutable std::mutex stats_mutex_;
    GraphStats last_stats_;  // of the slots that close() destroyed
};

Pipeline::Impl::Impl(std::shared_ptr<LoadedEngine> engine, PipelineOptions options)
    : options_(std::move(options)), driver_(engine->device()->driver), engine_(std::move(engine)) {
    check(options_.slots >= 1 && options_.slots <= 16, "slots must be 1 to 16, found " + number(options_.slots));
    target_ = options_.target == Size{} ? engine_->default_target() : options_.target;
    batch_ = engine_->largest_batch();
    scratch_bytes_ = engine_->engine().device_memory_size();
    const SlotPlan shared = plan(engine_);
    const cuda::ContextGuard guard(*engine_->device());
    for (int i = 0; i < options_.slots; ++i) {
        auto slot = std::make_unique<Slot>(shared);
        slot->warm_up(target_, run_batch(*engine_, target_, 1));
        flights_.add(std::move(slot));
    }
}

// All that can be known, and refused, before memory is taken.
SlotPlan Pipeline::Impl::plan(const std::shared_ptr<LoadedEngine>& engine) {
    SlotPlan plan;
    plan.engine = engine;
    plan.settings = settings_of(options_.thresholds, options_.classes);
    plan.rows = options_.thresholds.max_det;
    plan.head = {options_.head, options_.classes, engine->output_index(options_.output)};
    const TensorInfo boxes = engine->outputs()[plan.head.output];
    check<EngineError>(boxes.dtype == DType::float32 || boxes.dtype == DType::float16,
                       "the output " + boxes.name + " must be float32 or float16, found " + boxes.dtype_text +
                           ": export the engine with such tensors");

    const int least = run_batch(*engine, target_, 1);
    const std::vector<Shape> shapes = engine->output_shapes(target_, least);
    output_shape_ = shapes[plan.head.output];
    EngineTraits traits;
    traits.dynamic_shapes = engine->dynamic();
    for (const Shape& shape : shapes)
        for (const std::int64_t size : shape) traits.data_dependent_outputs |= size < 0;
    traits.dla = options_.dla;
    traits.embedded_nms = options_.embedded_nms;
    traits.weight_streaming = streams_weights(engine->engine());
    if (!traits.data_dependent_outputs) head_for(plan.head, boxes, output_shape_, least);
    plan.path = choose_path(options_.graph, traits);
    plan.graphs.graphs = options_.graphs;
    plan.graphs.captures_per_minute = options_.captures_per_minute;
    plan.graphs.warn = [this](const std::string& text) {
        if (!warned_.exchange(true) && options_.warn) options_.warn(text);
    };
    const std::lock_guard<std::mutex> lock(capture_mutex());
    plan.kernels = std::make_shared<const Kernels>(engine->device());
    return plan;
}

void Pipeline::Impl::alive() const {
    if (forked()) cuda::driver();  // throws, with the words for it
}

// How many places of the batch the network runs for so many pictures.
int Pipeline::Impl::run_batch(const LoadedEngine& engine, Size target, std::size_t pictures) const {
    const TensorInfo& input = engine.input();
    const auto count = static_cast<std::int64_t>(pictures);
    if (count < 1 || count > batch_)
        throw InvalidInput("one submit takes 1 to " + number(batch_) + " frames, the batch of this engine, found " +
                           number(count));
    Shape shape{input.shape[0] >= 0 ? input.shape[0] : count, 3, target.height, target.width};
    int profile = engine.profile_for(shape);
    if (profile < 0 && input.shape[0] < 0) {
        for (const ProfileShape& allowed : input.profiles) {
            shape[0] = std::max(count, allowed.min.at(0));
            profile = engine.profile_for(shape);
            if (profile >= 0) break;
        }
    }
    if (profile < 0)
        throw InvalidInput("the engine does not take the input shape " + shape_text(shape) + ": it takes " +
                           engine.allowed_shapes());
    return static_cast<int>(shape[0]);
}

Ticket Pipeline::Impl::submit(const std::vector<Frame>& frames, const SubmitOptions& options) {
    alive();
    const Size target = options.target == Size{} ? target_ : options.target;
    const auto engine = this->engine();
    const cuda::Device& device = *engine->device();
    const int batch = run_batch(*engine, target, frames.size());
    const cuda::ContextGuard guard(device);
    auto ticket = std::make_shared<Flight>();
    ticket->owner = this;
    ticket->on_device = options.leave_on_device;
    // The flight, and with it the mark in a frame buffer, ends with this scope unless the frame gets on its way.
    for (const Frame& frame : frames) check_frame(frame, device);
    for (const Frame& frame : frames)
        mark_reader(frame, ticket,
                    [this](const Ticket& other) { return other->over() || (other->owner == this && done(other)); });

    const std::size_t place = flights_.claim();
    try {
        Slot& slot = flights_.slot(place);
        slot.start(frames, target, batch, options);
        std::vector<Frame> kept;  // host pixels have been read
        for (const Frame& frame : frames)
            if (!std::holds_alternative<ImageView>(frame)) kept.push_back(frame);
        flights_.take_off(place, ticket, std::move(kept));
    } catch (...) {
        flights_.slot(place).recover();
        flights_.release(place);
        throw;
    }
    return ticket;
}

void Pipeline::Impl::check_ticket(const Ticket& ticket) const {
    check(ticket && ticket->owner == this, "this is no ticket of this detector");
}

bool Pipeline::Impl::done(const Ticket& ticket) const {
    alive();
    check_ticket(ticket);
    return flights_.done(ticket);
}

std::optional<FrameOutcome> Pipeline::Impl::wait(const Ticket& ticket, std::optional<std::chrono::nanoseconds> timeout,
                                                 bool on_device) {
    alive();
    check_ticket(ticket);
    check(ticket->on_device == on_device,
          on_device ? "the results of this frame come to the host: submit it with leave_on_device to keep them there"
                    : "the results of this frame stay on the GPU, as was asked for at its submit");
    return flights_.wait(ticket, timeout);
}

std::shared_ptr<LoadedEngine> Pipeline::Impl::engine() const {
    const std::lock_guard<std::mutex> lock(engine_mutex_);
    check(engine_ != nullptr, "the detector is closed");
    return engine_;
}

void Pipeline::Impl::close() {
    // Declared first, so that it dies after the slots, whose contexts it made.
    std::shared_ptr<LoadedEngine> engine;
    const std::vector<std::unique_ptr<Slot>> slots = flights_.close();
    {
        const std::lock_guard<std::mutex> lock(engine_mutex_);
        engine = std::move(engine_);
    }
    if (slots.empty()) return;
    std::vector<GraphStats> parts;
    for (const auto& slot : slots) parts.push_back(slot->stats());
    const std::lock_guard<std::mutex> lock(stats_mutex_);
    last_stats_ = sum(parts);
    last_stats_.device_bytes = last_stats_.graphs = 0;
}

PipelineInfo Pipeline::Impl::info() const {
    PipelineInfo info;
    info.slots = options_.slots;
    info.batch = batch_;
    info.target = target_;
    info.head = options_.head;
    info.output_shape = output_shape_;
    info.scratch_bytes = scratch_bytes_;
    const Flights::Totals totals = flights_.totals();
    info.device_bytes = totals.device_bytes;
    info.pinned_bytes = totals.pinned_bytes;
    info.frames = totals.frames;
    info.closed = totals.closed;
    const std::lock_guard<std::mutex> lock(stats_mutex_);
    info.graph = totals.graphs.empty() ? last_stats_ : sum(totals.graphs);
    return info;
}

Pipeline::Pipeline(std::shared_ptr<LoadedEngine> engine, PipelineOptions options) {
    check(engine != nullptr, "a pipeline needs an engine");
    impl_ = std::make_unique<Impl>(std::move(engine), std::move(options));
}

Pipeline::~Pipeline() {
    if (impl_->forked()) {
        // The parent's locks and handles mean nothing here; TensorRT must not be touched.
        (void)impl_.release();
        return;
    }
    try {
        impl_->close();
    } catch (...) {  // out of memory: the members free what they can
    }
}

std::shared_ptr<FrameBuffer> Pipeline::frame_buffer(Size size, PixelFormat format) const {
    return std::make_shared<FrameBuffer>(impl_->engine()->device(), size, format);
}

Ticket Pipeline::submit(const std::vector<Frame>& frames, const SubmitOptions& options) {
    return impl_->submit(frames, options);
}

std::optional<std::vector<Results>> Pipeline::wait(const Ticket& ticket,
                                                   std::optional<std::chrono::nanoseconds> timeout) {
    auto outcome = impl_->wait(ticket, timeout, false);
    if (!outcome) return std::nullopt;
    return std::move(outcome->results);
}

std::optional<DeviceResults> Pipeline::wait_on_device(const Ticket& ticket,
                                                      std::optional<std::chrono::nanoseconds> timeout) {
    auto outcome = impl_->wait(ticket, timeout, true);
    if (!outcome) return std::nullopt;
    return std::move(outcome->on_device);
}

bool Pipeline::done(const Ticket& ticket) {
    return impl_->done(ticket);
}

std::optional<Timings> Pipeline::timings(const Ticket& ticket) {
    check(ticket && ticket->state == Flight::State::taken, "timings are known after wait()");
    return ticket->outcome.timings;
}

int Pipeline::batch() const {
    return impl_->batch_;
}

Size Pipeline::target() const {
    return impl_->target_;
}

PipelineInfo Pipeline::info() const {
    return impl_->info();
}

std::shared_ptr<LoadedEngine> Pipeline::engine() const {
    return impl_->engine();
}

void Pipeline::close() {
    impl_->alive();
    impl_->close();
}

}  // namespace edgeyolo
