// Streams of the simulated driver: a worker thread each, in order, with seeded pauses; capture into graphs.
#include <algorithm>
#include <utility>

#include "driver_state.hpp"

namespace edgeyolo::fake {
namespace {

void pause(std::mt19937& random, unsigned delay_us) {
    if (delay_us == 0) return;
    const unsigned draw = random() % 8;
    if (draw == 0) std::this_thread::sleep_for(std::chrono::microseconds(1 + random() % delay_us));
    if (draw == 1) std::this_thread::yield();
}

void work_off(const std::shared_ptr<Stream>& stream) {
    State& s = state();
    Lock lock(s.mutex);
    for (;;) {
        s.changed.wait(lock, [&] {
            if (stream->queue.empty()) return stream->stop;
            const auto& ready = stream->queue.front().ready;
            return !ready || ready();
        });
        if (stream->queue.empty()) return;
        const Operation operation = std::move(stream->queue.front());
        stream->queue.pop_front();
        stream->busy = true;
        ++device(stream->device).operations;
        const unsigned delay_us = s.delay_us;
        lock.unlock();
        pause(stream->random, delay_us);
        operation.run();
        lock.lock();
        stream->busy = false;
        s.changed.notify_all();
    }
}

// Every node must come before the origin's last ones, or the capture lost a fork.
bool joined(const Capture& capture) {
    std::vector<bool> reached(capture.nodes.size(), false);
    std::vector<std::size_t> open = capture.origin->tail;
    while (!open.empty()) {
        const std::size_t node = open.back();
        open.pop_back();
        if (reached[node]) continue;
        reached[node] = true;
        open.insert(open.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
    }
    return std::all_of(reached.begin(), reached.end(), [](bool value) { return value; });
}

void merge(std::vector<std::size_t>& tail, const std::vector<std::size_t>& nodes) {
    for (const std::size_t node : nodes)
        if (std::find(tail.begin(), tail.end(), node) == tail.end()) tail.push_back(node);
}

}  // namespace

std::shared_ptr<Stream> make_stream(int ordinal) {
    auto stream = std::make_shared<Stream>();
    add_object(stream, ordinal);
    stream->random.seed(state().seed ^ static_cast<unsigned>(stream->id * 2654435761u));
    // Detached: it ends when the stream is destroyed, or with the process.
    std::thread(work_off, stream).detach();
    return stream;
}

void run_work(int ordinal, const Work& work) {
    {
        const Lock lock(state().mutex);
        if (device(ordinal).lost) return;
    }
    const Access access(ordinal, work.what);
    bool illegal = false;
    try {
        work.run(access);
    } catch (const IllegalAddress&) {
        illegal = true;
    } catch (const std::exception& error) {
        const Lock lock(state().mutex);
        violation(work.what + ": its twin threw: " + error.what());
        illegal = true;
    }
    const Lock lock(state().mutex);
    if (access.torn()) {
        violation(work.what + ": memory was freed while it was in use");
        illegal = true;
    }
    if (illegal && !device(ordinal).lost) device(ordinal).lost = illegal_address;
}

void enqueue(const std::shared_ptr<Stream>& stream, Operation operation) {
    stream->queue.push_back(std::move(operation));
    state().changed.notify_all();
}

int submit(const std::shared_ptr<Stream>& stream, std::shared_ptr<Work> work) {
    if (!stream->capture) {
        const int ordinal = stream->device;
        enqueue(stream, {nullptr, [ordinal, work] { run_work(ordinal, *work); }});
        return ok;
    }
    Capture& capture = *stream->capture;
    if (capture.spoilt) capture.invalid = true;
    if (capture.invalid) return capture_invalidated;
    capture.nodes.push_back({std::move(work), stream->tail});
    stream->tail = {capture.nodes.size() - 1};
    return ok;
}

bool idle(const Stream& stream) {
    return stream.queue.empty() && !stream.busy;
}

void drain(Lock& lock, const Stream& stream) {
    state().changed.wait(lock, [&] { return idle(stream); });
}

int begin_capture(const std::shared_ptr<Stream>& stream, int mode) {
    State& s = state();
    if (mode < global || mode > relaxed) return invalid_value;
    if (stream->capture) return refuse(illegal_state, "cuStreamBeginCapture on a stream that captures already");
    auto capture = std::make_shared<Capture>();
    capture->mode = mode;
    capture->thread = std::this_thread::get_id();
    capture->origin = stream.get();
    capture->streams = {stream.get()};
    capture->spoilt = s.spoil.hits();
    capture->empty = s.empty.hits();
    capture->stale = s.stale.hits();
    stream->capture = capture;
    stream->tail.clear();
    s.captures.push_back(capture);
    return ok;
}

int end_capture(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph) {
    State& s = state();
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return illegal_state;
    if (capture->mode != relaxed && capture->thread != std::this_thread::get_id())
        return refuse(capture_wrong_thread, "cuStreamEndCapture on another thread than the one that began");
    if (capture->origin != stream.get())
        return refuse(invalidate(*capture, capture_unmatched), "cuStreamEndCapture on a stream that only joined");
    const bool complete = joined(*capture);
    for (Stream* member : capture->streams) {
        member->capture = nullptr;
        member->tail.clear();
    }
    s.captures.erase(std::remove(s.captures.begin(), s.captures.end(), capture), s.captures.end());
    if (capture->invalid) return capture_invalidated;
    if (!complete) return refuse(capture_unjoined, "cuStreamEndCapture while a forked stream was not joined");
    *graph = std::make_shared<Graph>();
    add_object(*graph, stream->device);
    (*graph)->stale = capture->stale;
    if (!capture->empty)
        for (const Capture::Node& node : capture->nodes) (*graph)->work.push_back(node.work);
    return ok;
}

int invalidate(Capture& capture, int code) {
    capture.invalid = true;
    return code;
}

// Not thread_local: see pushed().
static int& this_threads_mode() {
    return state().modes[std::this_thread::get_id()];
}

int exchange_capture_mode(int mode) {
    return std::exchange(this_threads_mode(), mode);
}

int unsafe_during_capture() {
    const int mode = this_threads_mode();
    int code = ok;
    for (const auto& capture : state().captures) {
        if (mode == relaxed || capture->mode == relaxed) continue;
        const bool mine = capture->thread == std::this_thread::get_id();
        if (mine || (mode == global && capture->mode == global)) code = invalidate(*capture);
    }
    return code;
}

int record_event(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event) {
    event->capture = stream->capture;
    event->nodes = stream->tail;
    if (stream->capture) return stream->capture->invalid ? capture_invalidated : ok;
    const long number = ++event->recorded;
    enqueue(stream, {nullptr, [event, number] {
                         const Lock lock(state().mutex);
                         event->completed = std::max(event->completed, number);
                         event->time = std::chrono::steady_clock::now();
                         state().changed.notify_all();
                     }});
    return ok;
}

int wait_event(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event) {
    if (event->capture) {
        if (event->capture->invalid) return capture_invalidated;
        const auto& running = state().captures;
        if (std::find(running.begin(), running.end(), event->capture) == running.end())
            return refuse(capture_isolation, "cuStreamWaitEvent on an event of a capture that has ended");
        if (stream->capture && stream->capture != event->capture) {
            invalidate(*event->capture);
            return refuse(invalidate(*stream->capture, capture_isolation), "cuStreamWaitEvent joins two captures");
        }
        stream->capture = event->capture;
        stream->capture->streams.insert(stream.get());
        merge(stream->tail, event->nodes);
        return ok;
    }
    if (stream->capture)
        return refuse(invalidate(*stream->capture, capture_isolation),
                      "cuStreamWaitEvent makes a capture depend on work outside it");
    const long number = event->recorded;
    enqueue(stream, {[event, number] { return event->completed >= number; }, [] {}});
    return ok;
}

}  // namespace edgeyolo::fake
