// What TensorRT logged lately: warnings and errors, the newest 64. TensorRT logs from threads of its own, so there is a
// mutex, and nothing here may touch Python.
#pragma once
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

namespace edgeyolo::trt {

class LogRing {
public:
    void add(bool error, const char* text) noexcept {
        if (error) ++errors_of_this_thread();
        try {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (lines_.size() == capacity) lines_.pop_front();
            lines_.push_back({++added_, error, std::this_thread::get_id(), text ? text : ""});
        } catch (...) {  // out of memory: the line is lost, the count above is not
        }
    }

    // A number to hand to errors(): "from here on".
    std::uint64_t mark() const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return added_;
    }

    // At most 8 of the newest errors after `mark`, oldest first, one a line: this thread's when it has any (another
    // detector may be failing at this moment), else those of every thread.
    std::string errors(std::uint64_t mark = 0) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string mine;
        std::string all;
        int mine_left = 8;
        int all_left = 8;
        for (auto line = lines_.rbegin(); line != lines_.rend() && line->number > mark; ++line) {
            if (!line->error) continue;
            if (all_left-- > 0) all.insert(0, line->text + (all.empty() ? "" : "\n"));
            if (line->thread == std::this_thread::get_id() && mine_left-- > 0)
                mine.insert(0, line->text + (mine.empty() ? "" : "\n"));
        }
        return mine.empty() ? all : mine;
    }

    // Counts the errors logged on this thread. TensorRT sometimes logs an error and still answers as if all were well:
    // a call that raised this number has failed.
    static std::uint64_t& errors_of_this_thread() noexcept {
        thread_local std::uint64_t count = 0;
        return count;
    }

private:
    static constexpr std::size_t capacity = 64;
    struct Line {
        std::uint64_t number;
        bool error;
        std::thread::id thread;
        std::string text;
    };
    mutable std::mutex mutex_;
    std::uint64_t added_ = 0;
    std::deque<Line> lines_;
};

}  // namespace edgeyolo::trt
