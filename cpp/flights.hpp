// Which frame uses which slot, from submit() to wait(): the order of service, and who waits for whom.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>
#include "slot.hpp"

namespace edgeyolo {

// A frame between submit() and wait(). Guarded by the mutex of its Flights; `owner` and `on_device` never change, and
// `state` may be read at any time.
struct Flight {
    enum class State {
        starting,
        flying,
        landed,  // its outcome is here
        taken
    };
    const void* owner = nullptr;
    bool on_device = false;
    std::size_t place = 0;
    std::atomic<State> state{State::starting};
    std::vector<Frame> frames;  // keeps buffers and GPU frames alive
    FrameOutcome outcome;
    std::exception_ptr error;

    bool over() const { return state == State::landed || state == State::taken; }
};

// All calls from any thread.
class Flights {
public:
    // Before all other calls.
    void add(std::unique_ptr<Slot> slot);

    // A slot for the calling thread: an idle one, or the one whose frame is under way for longest, which is waited for
    // and collected. Calls are served in their order. Follow it by take_off() or release().
    // Throws InvalidInput when closed.
    std::size_t claim();
    Slot& slot(std::size_t place) { return *places_[place].slot; }
    void take_off(std::size_t place, const Ticket& ticket, std::vector<Frame> frames);
    void release(std::size_t place);

    bool done(const Ticket& ticket) const;
    // Null when `timeout` passed first. Throws what went wrong with the frame; InvalidInput the second time.
    std::optional<FrameOutcome> wait(const Ticket& ticket, std::optional<std::chrono::nanoseconds> timeout);

    // No claim succeeds any more; waits for all frames, whose outcomes stay, and hands out the slots for destruction.
    std::vector<std::unique_ptr<Slot>> close();

    struct Totals {
        std::vector<GraphStats> graphs;  // per slot; empty when closed
        std::size_t device_bytes = 0;
        std::size_t pinned_bytes = 0;
        long frames = 0;
        bool closed = false;
    };
    Totals totals() const;

private:
    struct Place {
        enum class State {
            idle,
            owned,  // by a thread that starts, waits for, or collects a frame
            flying
        } state = State::idle;
        std::unique_ptr<Slot> slot;
        Ticket flight;
        long number = 0;  // of the frame: the oldest has the lowest
    };

    Place* next();
    void collect_abandoned();
    void collect(Place& place, const Ticket& ticket);
    bool landing(const Place& place) const;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Place> places_;
    long next_turn_ = 0;
    long serving_ = 0;
    long frames_ = 0;
    bool closed_ = false;
};

}  // namespace edgeyolo
