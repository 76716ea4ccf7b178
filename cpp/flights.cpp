#include "flights.hpp"

#include <algorithm>
#include "error.hpp"

namespace edgeyolo {
namespace {

using State = Flight::State;
using Clock = std::chrono::steady_clock;

// The end of time for none.
Clock::time_point deadline_of(std::optional<std::chrono::nanoseconds> timeout) {
    const Clock::time_point now = Clock::now();
    if (!timeout || *timeout >= Clock::time_point::max() - now) return Clock::time_point::max();
    return now + std::chrono::duration_cast<Clock::duration>(*timeout);
}

}  // namespace

void Flights::add(std::unique_ptr<Slot> slot) {
    Place place;
    place.slot = std::move(slot);
    places_.push_back(std::move(place));
}

// Under the lock. Null while every place is owned.
Flights::Place* Flights::next() {
    Place* oldest = nullptr;
    for (Place& place : places_) {
        if (place.state == Place::State::idle) return &place;
        if (place.state == Place::State::flying && (!oldest || place.number < oldest->number)) oldest = &place;
    }
    return oldest;
}

std::size_t Flights::claim() {
    Place* place = nullptr;
    Ticket before;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const long turn = next_turn_++;
        changed_.wait(lock, [&] { return closed_ || (turn == serving_ && (place = next()) != nullptr); });
        check(!closed_, "the detector is closed");
        ++serving_;
        if (place->state == Place::State::flying) before = place->flight;
        place->state = Place::State::owned;
    }
    changed_.notify_all();
    if (before) collect(*place, before);
    collect_abandoned();
    return static_cast<std::size_t>(place - places_.data());
}

// A frame that is done and that nobody holds a ticket of would keep the caller's image until its slot is needed.
void Flights::collect_abandoned() {
    for (std::size_t index = 0; index < places_.size(); ++index) {
        Ticket ticket;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (index >= places_.size()) return;
            Place& place = places_[index];
            if (place.state != Place::State::flying || place.flight.use_count() > 1 || !landing(place)) continue;
            ticket = place.flight;
            place.state = Place::State::owned;
        }
        collect(places_[index], ticket);
        release(index);
    }
}

void Flights::take_off(std::size_t index, const Ticket& ticket, std::vector<Frame> frames) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        Place& place = places_[index];
        ticket->place = index;
        ticket->frames = std::move(frames);
        ticket->state = State::flying;
        place.flight = ticket;
        place.number = frames_++;
        place.state = Place::State::flying;
    }
    changed_.notify_all();
}

void Flights::release(std::size_t index) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        places_[index].state = Place::State::idle;
    }
    changed_.notify_all();
}

// The place is owned by the calling thread, before and after.
void Flights::collect(Place& place, const Ticket& ticket) {
    FrameOutcome outcome;
    std::exception_ptr error;
    try {
        const cuda::ContextGuard guard(place.slot->device());
        outcome = place.slot->finish();
    } catch (...) {
        error = std::current_exception();
        place.slot->recover();
    }
    std::vector<Frame> dropped;  // what keeps a GPU frame alive may run code of the caller: not under the lock
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ticket->outcome = std::move(outcome);
        ticket->error = error;
        dropped.swap(ticket->frames);
        ticket->state = State::landed;
        place.flight.reset();
    }
    changed_.notify_all();
}

// Under the lock. A device that answers with an error counts as landed: collect() finds out more.
bool Flights::landing(const Place& place) const {
    try {
        const cuda::ContextGuard guard(place.slot->device());
        return place.slot->done();
    } catch (const Error&) {
        return true;
    }
}

bool Flights::done(const Ticket& ticket) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ticket->state != State::flying) return ticket->over();
    const Place& place = places_[ticket->place];
    return place.state == Place::State::flying && landing(place);
}

std::optional<FrameOutcome> Flights::wait(const Ticket& ticket, std::optional<std::chrono::nanoseconds> timeout) {
    const Clock::time_point deadline = deadline_of(timeout);
    const bool forever = deadline == Clock::time_point::max();
    // An event cannot be waited for with a limit: look again and again, at first quickly.
    std::chrono::microseconds pause(20);

    std::unique_lock<std::mutex> lock(mutex_);
    while (ticket->state == State::flying) {
        Place& place = places_[ticket->place];
        if (place.state == Place::State::flying && (forever || landing(place))) {
            place.state = Place::State::owned;
            lock.unlock();
            collect(place, ticket);
            release(ticket->place);
            lock.lock();
        } else if (forever) {
            changed_.wait(lock);  // another thread is collecting it
        } else if (Clock::now() >= deadline) {
            return std::nullopt;
        } else {
            changed_.wait_until(lock, std::min(deadline, Clock::now() + pause));
            pause = std::min(pause * 5 / 4, std::chrono::microseconds(200));
        }
    }
    check(ticket->state == State::landed, "the results of this frame were fetched before: they are handed out once");
    ticket->state = State::taken;
    if (ticket->error) std::rethrow_exception(ticket->error);
    FrameOutcome outcome = std::move(ticket->outcome);
    ticket->outcome = {};
    ticket->outcome.timings = outcome.timings;
    return outcome;
}

std::vector<std::unique_ptr<Slot>> Flights::close() {
    std::vector<std::unique_ptr<Slot>> slots;
    std::unique_lock<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    // Nobody claims a place any more, so that one that came to rest stays so.
    for (std::size_t i = 0; i < places_.size(); ++i) {
        changed_.wait(lock, [&] { return i >= places_.size() || places_[i].state != Place::State::owned; });
        if (i >= places_.size()) return slots;  // another thread has closed meanwhile
        if (places_[i].state == Place::State::idle) continue;
        const Ticket ticket = places_[i].flight;
        places_[i].state = Place::State::owned;
        lock.unlock();
        collect(places_[i], ticket);
        lock.lock();
        places_[i].state = Place::State::idle;
        changed_.notify_all();
    }
    for (Place& place : places_) slots.push_back(std::move(place.slot));
    places_.clear();
    return slots;
}

Flights::Totals Flights::totals() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Totals totals;
    totals.frames = frames_;
    totals.closed = closed_;
    for (const Place& place : places_) {
        totals.graphs.push_back(place.slot->stats());
        totals.device_bytes += place.slot->device_bytes();
        totals.pinned_bytes += place.slot->pinned_bytes();
    }
    return totals;
}

}  // namespace edgeyolo
