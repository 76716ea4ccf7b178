// A free list: objects that are expensive to make (scratch memory) and that one thread at a time may use.
#pragma once
#include <memory>
#include <mutex>
#include <vector>

namespace edgeyolo {

// take() hands out an idle object or makes a new one; the lease puts it back when it dies. Thread-safe. The pool must
// outlive its leases. It grows to the largest number of threads that were inside at once and then allocates no more.
template <class T>
class Pool {
    struct GiveBack {
        Pool* pool;
        void operator()(T* object) const noexcept { pool->give_back(object); }
    };

public:
    using Lease = std::unique_ptr<T, GiveBack>;

    Lease take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.empty()) {
            all_.push_back(std::make_unique<T>());
            // Room for every object: giving back must not allocate, since it must not throw.
            idle_.reserve(all_.size());
            return Lease(all_.back().get(), GiveBack{this});
        }
        T* object = idle_.back();
        idle_.pop_back();
        return Lease(object, GiveBack{this});
    }

private:
    void give_back(T* object) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        idle_.push_back(object);
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<T>> all_;
    std::vector<T*> idle_;
};

}  // namespace edgeyolo
