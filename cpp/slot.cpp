#include "slot.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include "error.hpp"

namespace edgeyolo {

Slot::Slot(const SlotPlan& plan)
    : plan_(plan),
      device_(plan.engine->device()),
      stream_(device_),
      upload_(device_, plan.engine->largest_batch(), plan.settings),
      stages_(device_, plan.kernels, plan.engine->largest_batch(), plan.rows),
      finished_(device_) {
    runner_ = std::make_unique<GraphRunner>(plan_.path, plan_.graphs);
    const cuda::ContextGuard guard(*device_);
    const std::lock_guard<std::mutex> lock(capture_mutex());
    program_ = asking_the_device(
        *device_, [&] { return std::make_shared<NetworkProgram>(plan_.engine, upload_, stages_, plan_.head); });
    // Nothing may throw from here on: a context dies under the lock only in ~Slot().
}

Slot::~Slot() {
    const LastContext context(*device_);
    {
        const cuda::Drain drained(stream_);
    }
    runner_.reset();  // takes capture_mutex() itself
    const std::lock_guard<std::mutex> lock(capture_mutex());
    program_.reset();
}

std::shared_ptr<NetworkProgram> Slot::make_program(Size target, int batch) {
    if (!plan_.engine->dynamic()) return program_;
    auto program = std::make_shared<NetworkProgram>(plan_.engine, upload_, stages_, plan_.head);
    program->want(target, batch);
    captured_.erase(
        std::remove_if(captured_.begin(), captured_.end(), [](const auto& known) { return known.expired(); }),
        captured_.end());
    captured_.push_back(program);
    return program;
}

void Slot::warm_up(Size target, int batch) {
    program_->want(target, batch);
    // The blocks must hold something before the first warm-up run.
    upload_.put(stream_, {}, target);
    if (!plan_.engine->dynamic())
        runner_->prepare(stream_, {batch, 3, target.height, target.width}, [&] { return make_program(target, batch); });
    stream_.synchronize();
    count_bytes();
}

void Slot::start(const std::vector<Frame>& frames, Size target, int batch, const SubmitOptions& options) {
    const GraphRunner::Shape shape{batch, 3, target.height, target.width};
    on_device_.reset();
    pictures_ = frames.size();
    timed_ = options.timings;
    program_->marks = nullptr;
    program_->want(target, batch);
    runner_->prepare(stream_, shape, [&] { return make_program(target, batch); });

    if (timed_) prepare_timings();
    if (timed_) events_->begin.record(stream_);
    upload_.put(stream_, frames, target);
    if (timed_) events_->uploaded.record(stream_);
    if (timed_) program_->marks = &events_->stages;
    const long replays = timed_ ? runner_->stats().replays : 0;
    asking_the_device(*device_, [&] { runner_->run(stream_, shape, *program_); });
    if (timed_) eager_ = runner_->stats().replays == replays;
    program_->marks = nullptr;
    if (timed_) events_->end.record(stream_);
    if (options.leave_on_device) keep_on_device(frames.size());
    finished_.record(stream_);
    count_bytes();
}

void Slot::prepare_timings() {
    if (events_) return;
    auto events = std::make_unique<TimingEvents>();
    for (cuda::Event* event :
         {&events->begin, &events->uploaded, &events->end, &events->stages.letterboxed, &events->stages.inferred})
        *event = cuda::Event(device_, true);
    events_ = std::move(events);
}

// Memory of its own per frame, not of a pool: when the caller drops it, work of his on it may still be running, which
// only the driver's own free waits for.
void Slot::keep_on_device(std::size_t pictures) {
    DeviceResults kept;
    kept.device = device_;
    kept.memory_ = cuda::DeviceBuffer(device_, pictures * stages_.stride());
    stream_.copy_on_device(kept.memory_.pointer(), stages_.device_result(0), kept.memory_.bytes());
    on_device_ = std::move(kept);
}

FrameOutcome Slot::finish() {
    finished_.synchronize();
    FrameOutcome outcome;
    if (timed_) outcome.timings = read_timings();
    if (!on_device_) {
        for (std::size_t i = 0; i < pictures_; ++i) outcome.results.push_back(stages_.results(static_cast<int>(i)));
        return outcome;
    }
    const auto rows = static_cast<std::size_t>(stages_.rows());
    for (std::size_t i = 0; i < pictures_; ++i) {
        DeviceResults::Picture picture;
        picture.count = stages_.count(static_cast<int>(i));
        picture.boxes = on_device_->memory_.pointer() + i * stages_.stride() + sizeof(ResultHeader);
        picture.scores = picture.boxes + rows * sizeof(Box);
        picture.class_ids = picture.scores + rows * sizeof(float);
        on_device_->pictures.push_back(picture);
    }
    outcome.on_device = std::move(on_device_);
    on_device_.reset();
    return outcome;
}

Timings Slot::read_timings() const {
    constexpr float unknown = std::numeric_limits<float>::quiet_NaN();
    Timings times;
    times.upload = events_->uploaded.since(events_->begin);
    times.frame = events_->end.since(events_->uploaded);
    times.letterbox = eager_ ? events_->stages.letterboxed.since(events_->uploaded) : unknown;
    times.network = eager_ ? events_->stages.inferred.since(events_->stages.letterboxed) : unknown;
    times.postprocess = eager_ ? events_->end.since(events_->stages.inferred) : unknown;
    return times;
}

void Slot::recover() noexcept {
    {
        const cuda::Drain drained(stream_);
    }
    program_->marks = nullptr;
    on_device_.reset();
}

void Slot::count_bytes() {
    std::size_t bytes = upload_.device_bytes() + stages_.device_bytes() + program_->device_bytes();
    for (const auto& known : captured_)
        if (const auto program = known.lock()) bytes += program->device_bytes();
    device_bytes_ = bytes;
    pinned_bytes_ = upload_.pinned_bytes() + stages_.pinned_bytes();
}

}  // namespace edgeyolo
