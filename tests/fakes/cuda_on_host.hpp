// Runs the source of a CUDA kernel on the host, one fiber per thread of a block, the blocks one after the other. It
// finds wrong indices, and missing barriers by letting one warp run far ahead of the others: what the host twins cannot
// show, and what otherwise only a GPU shows. It knows as much of CUDA as cpp/*.cu uses.
//
// Include it before the .cu file, then: cuda_on_host::run(grid, block, [&] { kernel(arguments...); });
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

namespace cuda_on_host {

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};

inline Dim thread_index, block_index;  // of the running fiber

class Block {
public:
    Block(Dim size, unsigned seed, const std::function<void()>& kernel) : kernel_(kernel), random_(seed) {
        fibers_.resize(size.x * size.y * size.z);
        warps_.resize((fibers_.size() + 31) / 32);
        for (std::size_t i = 0; i < fibers_.size(); ++i) {
            Fiber& fiber = fibers_[i];
            const auto n = static_cast<unsigned>(i);
            fiber.index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
            ++warps_[i / 32].live;
            fiber.stack.reset(new char[stack_bytes]);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = stack_bytes;
            fiber.context.uc_link = &scheduler_;
            makecontext(&fiber.context, &Block::enter, 0);
        }
        live_ = fibers_.size();
    }

    void run() {
        current_block = this;
        std::vector<std::size_t> order(warps_.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        while (live_ > 0) {
            std::shuffle(order.begin(), order.end(), random_);
            // A warp runs as far as it can before the next one starts: where a barrier is missing, it gets too far.
            bool moved = false;
            for (const std::size_t warp : order)
                while (step(warp)) moved = true;
            if (!moved) throw std::logic_error("the threads of a block wait for each other for ever");
        }
    }

    void sync_block() {
        Fiber& fiber = fibers_[running_];
        fiber.wait = Wait::block;
        fiber.generation = block_generation_;
        if (++block_arrived_ == live_) release_block();
        yield();
    }
    // Every live lane of the warp hands in a value; returns what all of them handed in.
    const std::uint32_t* exchange(std::uint32_t value) {
        Fiber& fiber = fibers_[running_];
        Warp& warp = warps_[running_ / 32];
        std::uint32_t* values = warp.values[warp.generation % 2];
        if (warp.arrived == 0) std::fill_n(values, 32, 0u);
        values[running_ % 32] = value;
        fiber.wait = Wait::warp;
        fiber.generation = warp.generation;
        if (++warp.arrived == warp.live) {
            warp.arrived = 0;
            ++warp.generation;
        }
        yield();
        return values;
    }
    unsigned lane() const { return static_cast<unsigned>(running_ % 32); }

    static inline Block* current_block = nullptr;

private:
    static constexpr std::size_t stack_bytes = 64 * 1024;
    enum class Wait {
        none,
        block,
        warp
    };
    struct Fiber {
        ucontext_t context{};
        std::unique_ptr<char[]> stack;
        Dim index;
        Wait wait = Wait::none;
        std::uint64_t generation = 0;
        bool done = false;
    };
    struct Warp {
        std::size_t live = 0, arrived = 0;
        std::uint64_t generation = 0;
        std::uint32_t values[2][32] = {};
    };

    bool ready(const Fiber& fiber, std::size_t i) const {
        if (fiber.wait == Wait::block) return block_generation_ != fiber.generation;
        if (fiber.wait == Wait::warp) return warps_[i / 32].generation != fiber.generation;
        return true;
    }
    // Lets each lane that can run do so up to its next wait. False when none can.
    bool step(std::size_t warp) {
        bool moved = false;
        for (std::size_t i = 32 * warp; i < std::min(32 * warp + 32, fibers_.size()); ++i) {
            Fiber& fiber = fibers_[i];
            if (fiber.done || !ready(fiber, i)) continue;
            moved = true;
            running_ = i;
            thread_index = fiber.index;
            swapcontext(&scheduler_, &fiber.context);
        }
        return moved;
    }
    void release_block() {
        block_arrived_ = 0;
        ++block_generation_;
    }
    void yield() {
        const std::size_t me = running_;
        swapcontext(&fibers_[me].context, &scheduler_);
        fibers_[me].wait = Wait::none;
    }
    static void enter() {
        Block& self = *current_block;
        self.kernel_();
        self.fibers_[self.running_].done = true;
        --self.live_;
        --self.warps_[self.running_ / 32].live;
        if (self.live_ > 0 && self.block_arrived_ == self.live_) self.release_block();
    }

    const std::function<void()>& kernel_;
    std::mt19937 random_;
    std::vector<Fiber> fibers_;
    std::vector<Warp> warps_;
    ucontext_t scheduler_{};
    std::size_t live_ = 0, running_ = 0, block_arrived_ = 0;
    std::uint64_t block_generation_ = 0;
};

inline void run(Dim grid, Dim block, const std::function<void()>& kernel, unsigned seed = 1) {
    // Backwards: nothing may hang on the order of the blocks.
    for (unsigned y = grid.y; y-- > 0;)
        for (unsigned x = grid.x; x-- > 0;) {
            block_index = {x, y, 0};
            Block(block, seed + 31 * x + 17 * y, kernel).run();
        }
}

}  // namespace cuda_on_host

#define __global__
#define __device__
#define __shared__ static
#define __noinline__
#define __launch_bounds__(...)
#define threadIdx cuda_on_host::thread_index
#define blockIdx cuda_on_host::block_index

inline void __syncthreads() {
    cuda_on_host::Block::current_block->sync_block();
}
inline void __syncwarp() {
    cuda_on_host::Block::current_block->exchange(0);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
    const std::uint32_t* values = cuda_on_host::Block::current_block->exchange(predicate ? 1 : 0);
    unsigned ballot = 0;
    for (unsigned i = 0; i < 32; ++i) ballot |= values[i] << i;
    return ballot;
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    static_assert(sizeof(T) == 4);
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const std::uint32_t* values = cuda_on_host::Block::current_block->exchange(bits);
    std::memcpy(&value, &values[lane & 31], 4);
    return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    const auto lane = static_cast<int>(cuda_on_host::Block::current_block->lane());
    return __shfl_sync(mask, value, lane ^ distance);
}
inline int __popc(unsigned bits) {
    return __builtin_popcount(bits);
}
template <class T>
T atomicAdd(T* place, T value) {
    const T before = *place;
    *place += value;
    return before;
}
template <class T>
T atomicOr(T* place, T value) {
    const T before = *place;
    *place |= value;
    return before;
}
