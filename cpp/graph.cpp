#include "graph.hpp"

#include <algorithm>

namespace edgeyolo {
namespace {

constexpr std::size_t remembered_shapes = 64;

std::string shape_words(const GraphRunner::Shape& shape) {
    if (shape.empty()) return {};
    std::string text = " for input shape (";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

// Moves the element at `index` to the front.
template <class T>
T& to_front(std::deque<T>& list, std::size_t index) {
    std::rotate(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(index),
                list.begin() + static_cast<std::ptrdiff_t>(index) + 1);
    return list.front();
}

}  // namespace

const char* path_name(Path path) {
    switch (path) {
        case Path::graph: return "graph";
        case Path::enqueue: return "enqueue_v3";
        case Path::execute: return "execute_v2";
    }
    return "?";
}

PathChoice choose_path(GraphMode mode, const EngineTraits& traits) {
    if (traits.data_dependent_outputs) return {Path::enqueue, "the shape of an output depends on the data", 0};
    if (mode == GraphMode::off) return {Path::enqueue, "graph=\"off\"", 0};
    if (traits.compiles_at_run_time)
        return {Path::enqueue, "TensorRT-RTX compiles kernels while it runs and has a graph strategy of its own", 0};
    if (traits.dla) return {Path::execute, "the engine runs on a DLA", 0};
    if (traits.embedded_nms) return {Path::execute, "the engine contains NMS", 0};
    if (traits.weight_streaming) return {Path::execute, "the engine streams its weights", 0};
    return {Path::graph, {}, traits.dynamic_shapes ? 3 : 1};
}

GraphRunner::GraphRunner(PathChoice choice, Options options)
    : choice_(std::move(choice)), options_(std::move(options)) {
    check(options_.graphs >= 1 && options_.tries >= 1, "a graph runner needs room for one graph and one try at least");
    stats_.path = choice_.path;
    stats_.reason = choice_.reason;
}

GraphRunner::~GraphRunner() {
    if (entries_.empty()) return;
    const std::lock_guard<std::mutex> lock(capture_mutex());  // execution contexts die here
    entries_.clear();
}

GraphRunner::Entry* GraphRunner::find(const Shape& shape) {
    for (std::size_t i = 0; i < entries_.size(); ++i)
        if (entries_[i].shape == shape) return i == 0 ? &entries_.front() : &to_front(entries_, i);
    return nullptr;
}

GraphRunner::Seen& GraphRunner::seen(const Shape& shape) {
    for (std::size_t i = 0; i < seen_.size(); ++i)
        if (seen_[i].shape == shape) return to_front(seen_, i);
    if (seen_.size() == remembered_shapes) seen_.pop_back();
    seen_.push_front({shape, 0, false});
    return seen_.front();
}

bool GraphRunner::may_capture() {
    const auto now = options_.clock();
    while (!capture_times_.empty() && now - capture_times_.front() >= std::chrono::minutes(1))
        capture_times_.pop_front();
    return capture_times_.size() < static_cast<std::size_t>(options_.captures_per_minute);
}

void GraphRunner::prepare(const cuda::Stream& stream, const Shape& shape, const Make& make) {
    if (choice_.path != Path::graph || find(shape)) return;
    Seen& state = seen(shape);
    if (state.given_up) return;
    ++state.uses;
    if (state.uses < choice_.captured_at_use || !may_capture()) return;
    capture_times_.push_back(options_.clock());
    const std::string reason = capture(stream, state, make);
    if (!reason.empty()) give_up(state, reason);
}

std::string GraphRunner::capture(const cuda::Stream& stream, Seen& state, const Make& make) {
    const std::lock_guard<std::mutex> lock(capture_mutex());
    if (entries_.size() == options_.graphs) drop(stream, entries_.size() - 1);
    std::string reason;
    try {
        const std::shared_ptr<FrameProgram> program = make();
        const cuda::Drain drain(stream);  // a program that is given up may have work in flight
        for (int i = 0; i < options_.tries; ++i) {
            auto graph = capture_graph(stream, *program, reason);
            if (!graph) {
                const std::lock_guard<std::mutex> stats_lock(stats_mutex_);
                ++stats_.failed_tries;
                continue;
            }
            const std::lock_guard<std::mutex> stats_lock(stats_mutex_);
            ++stats_.captures;
            stats_.capture_ms += graph->milliseconds;
            stats_.device_bytes += graph->device_bytes;
            stats_.path = Path::graph;
            if (stats_.fallbacks == 0) stats_.reason = graph->note;
            entries_.push_front({state.shape, program, std::move(*graph)});
            stats_.graphs = entries_.size();
            state.uses = 0;  // should the graph be evicted, the count starts again
            return {};
        }
    } catch (const cuda::DriverError& error) {
        if (error.fatal()) throw;
        reason = error.what();
    } catch (const Error& error) {
        reason = error.what();
    }
    return reason;
}

void GraphRunner::give_up(Seen& state, const std::string& reason) {
    state.given_up = true;
    const std::string text = "no CUDA graph" + shape_words(state.shape) + ", frames run by execute_v2: " + reason;
    {
        const std::lock_guard<std::mutex> lock(stats_mutex_);
        ++stats_.fallbacks;
        stats_.reason = text;
        if (entries_.empty()) stats_.path = Path::execute;
    }
    if (!warned_ && options_.warn) options_.warn(text);
    warned_ = true;
}

// Under capture_mutex().
void GraphRunner::drop(const cuda::Stream& stream, std::size_t index) {
    stream.synchronize();  // its last launch may still run
    const std::size_t bytes = entries_[index].graph.device_bytes;
    entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(index));
    const std::lock_guard<std::mutex> lock(stats_mutex_);
    stats_.device_bytes -= bytes;
    stats_.graphs = entries_.size();
}

void GraphRunner::run(const cuda::Stream& stream, const Shape& shape, FrameProgram& program) {
    Path path = choice_.path;
    if (path == Path::graph) {
        if (const Entry* entry = find(shape)) {
            try {
                entry->graph.exec.launch(stream);
                ++replays_;
                return;
            } catch (const cuda::DriverError& error) {
                if (error.fatal()) throw;
                // The frame is not lost: it runs below, by the other path.
                {
                    const std::lock_guard<std::mutex> lock(capture_mutex());
                    drop(stream, 0);
                }
                give_up(seen(shape), error.what());
            }
        }
        path = seen(shape).given_up ? Path::execute : Path::enqueue;
    }
    bool accepted = path == Path::enqueue && program.enqueue(stream);
    if (!accepted && choice_.path == Path::graph && path == Path::enqueue) {
        const std::string words = program.last_errors();
        give_up(seen(shape), words.empty() ? "enqueueV3 was refused" : words);
        path = Path::execute;
    }
    if (path == Path::execute) accepted = program.execute(stream);
    if (!accepted) {
        const std::string words = program.last_errors();
        throw EngineError(std::string("the engine refused to run by ") + path_name(path) +
                          (words.empty() ? ", and gives no reason" : ": " + words));
    }
    const std::lock_guard<std::mutex> lock(stats_mutex_);
    ++(path == Path::enqueue ? stats_.enqueued : stats_.executed);
}

GraphStats GraphRunner::stats() const {
    const std::lock_guard<std::mutex> lock(stats_mutex_);
    GraphStats copy = stats_;
    copy.replays = replays_;
    return copy;
}

}  // namespace edgeyolo
