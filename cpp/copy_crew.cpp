#include "copy_crew.hpp"

#include <algorithm>
#include <cstdlib>
#include <system_error>

namespace edgeyolo {
namespace {

int wanted_helpers() {
    constexpr int most_asked = 16;
    if (const char* text = std::getenv("EDGEYOLO_COPY_THREADS"))
        return std::clamp(static_cast<int>(std::strtol(text, nullptr, 10)), 0, most_asked);
    return std::min(3, static_cast<int>(std::thread::hardware_concurrency() / 4));
}

}  // namespace

std::shared_ptr<CopyCrew> CopyCrew::hire() {
    static std::mutex mutex;
    static std::weak_ptr<CopyCrew> hired;
    const std::lock_guard<std::mutex> lock(mutex);
    auto crew = hired.lock();
    const int helpers = crew ? 0 : wanted_helpers();
    if (helpers > 0) hired = crew = std::make_shared<CopyCrew>(helpers);
    return crew;
}

CopyCrew::CopyCrew(int helpers) {
    try {
        for (int i = 0; i < helpers; ++i) helpers_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {  // no more threads to be had: those that there are will do
    }
}

CopyCrew::~CopyCrew() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        leaving_ = true;
    }
    wake_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
}

bool CopyCrew::Work::copy_next() {
    const int piece = next.fetch_add(1, std::memory_order_relaxed);
    if (piece >= pieces) return false;
    (*copy)(piece);
    done[static_cast<std::size_t>(piece)].store(true, std::memory_order_release);
    return true;
}

void CopyCrew::help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        wake_.wait(lock,
                   [&] { return leaving_ || (work_ && work_->next.load(std::memory_order_relaxed) < work_->pieces); });
        if (leaving_) return;
        Work& work = *work_;
        inside_.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        while (work.copy_next()) continue;
        inside_.fetch_sub(1, std::memory_order_release);
        lock.lock();
    }
}

// Takes the work back: the caller's memory is not touched any more once this is gone.
struct CopyCrew::Posted {
    CopyCrew& crew;
    Work& work;

    Posted(CopyCrew& posted_to, Work& posted) : crew(posted_to), work(posted) {
        {
            const std::lock_guard<std::mutex> lock(crew.mutex_);
            crew.work_ = &work;
        }
        crew.wake_.notify_all();
    }
    ~Posted() {
        work.next.store(work.pieces, std::memory_order_relaxed);
        {
            const std::lock_guard<std::mutex> lock(crew.mutex_);
            crew.work_ = nullptr;
        }
        // A helper that is late is in the middle of one piece, some 20 us: sleeping would take longer.
        while (crew.inside_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    }
    Posted(const Posted&) = delete;
    Posted& operator=(const Posted&) = delete;
};

void CopyCrew::share(int pieces, const std::function<void(int)>& copy, const std::function<void(int, int)>& copied) {
    const std::unique_lock<std::mutex> mine(busy_, std::try_to_lock);
    if (!mine || helpers_.empty() || pieces < 2) {
        for (int piece = 0; piece < pieces; ++piece) {
            copy(piece);
            copied(piece, piece + 1);
        }
        return;
    }
    Work work;
    work.copy = &copy;
    work.pieces = pieces;
    const Posted posted(*this, work);
    int told = 0;
    const auto tell = [&] {
        int end = told;
        while (end < pieces && work.done[static_cast<std::size_t>(end)].load(std::memory_order_acquire)) ++end;
        if (end == told) return false;
        copied(told, end);
        told = end;
        return true;
    };
    while (work.copy_next()) tell();
    while (told < pieces)
        if (!tell()) std::this_thread::yield();
}

}  // namespace edgeyolo
