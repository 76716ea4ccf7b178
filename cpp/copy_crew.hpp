// Threads that help to copy a frame into page-locked memory: one core copies at about 10 GB/s, several at a multiple.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace edgeyolo {

// They sleep between frames. One frame at a time is shared out; a caller who finds them at another frame copies alone.
class CopyCrew {
public:
    static constexpr int max_pieces = 64;

    // The crew of this process, which ends with the last who holds it: a helper for every 4 cores, at most 3, or as
    // many as the environment variable EDGEYOLO_COPY_THREADS says, at most 16. Null without any.
    static std::shared_ptr<CopyCrew> hire();

    explicit CopyCrew(int helpers);
    ~CopyCrew();
    CopyCrew(const CopyCrew&) = delete;
    CopyCrew& operator=(const CopyCrew&) = delete;

    // Calls copy(piece) once for each of 0 .. pieces-1, from this thread and the helpers, and copied(first, end) from
    // this thread alone, in order, for pieces that are there. Nothing of the call is in use when it returns or throws.
    // copy must not throw. At most max_pieces.
    void share(int pieces, const std::function<void(int)>& copy, const std::function<void(int, int)>& copied);

private:
    struct Work {
        const std::function<void(int)>* copy = nullptr;
        int pieces = 0;
        std::atomic<int> next{0};
        std::array<std::atomic<bool>, max_pieces> done{};

        bool copy_next();
    };
    struct Posted;

    void help();

    std::mutex busy_;  // held by the caller whose frame is shared out
    std::mutex mutex_;
    std::condition_variable wake_;
    Work* work_ = nullptr;
    bool leaving_ = false;
    std::atomic<int> inside_{0};  // helpers that use *work_
    std::vector<std::thread> helpers_;
};

}  // namespace edgeyolo
