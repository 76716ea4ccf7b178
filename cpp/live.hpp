// Live-object counters: a leak fails a test. Every type that owns memory or a handle across frames carries a Live<>.
#pragma once
#include <atomic>

namespace edgeyolo {

struct LiveCounters {
    std::atomic<long> letterbox_workspaces{0};
    std::atomic<long> postprocessors{0};
    std::atomic<long> workspaces{0};
    std::atomic<long> devices{0};
    std::atomic<long> streams{0};
    std::atomic<long> events{0};
    std::atomic<long> modules{0};
    std::atomic<long> graphs{0};
    std::atomic<long> graph_execs{0};
    std::atomic<long> device_buffers{0};
    std::atomic<long> device_bytes{0};
    std::atomic<long> pinned_buffers{0};
    std::atomic<long> pinned_bytes{0};
};
inline LiveCounters& live() {
    static LiveCounters counters;
    return counters;
}

// A member that counts its owner in one counter. Copies and moves count as objects of their own.
template <std::atomic<long> LiveCounters::* Counter>
struct Live {
    Live() noexcept { ++(live().*Counter); }
    Live(const Live&) noexcept : Live() {}
    Live& operator=(const Live&) noexcept { return *this; }
    ~Live() { --(live().*Counter); }
};

}  // namespace edgeyolo
