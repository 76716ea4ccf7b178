// The GPU under test: the simulated driver, or with EDGEYOLO_REQUIRE_GPU=1 the real one. The control functions of the
// simulated driver as C++ values.
#pragma once
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <cstdlib>
#include <string>

#include "cuda.hpp"
#include "driver.hpp"
#include "twins.hpp"

namespace edgeyolo::test {

inline bool real_gpu() {
    const char* value = std::getenv("EDGEYOLO_REQUIRE_GPU");
    return value && std::string(value) == "1";
}

// One function of the simulated driver: FAKE(reset)().
#define FAKE(name) ::edgeyolo::test::control<decltype(edgeyolo_fake_##name)>("edgeyolo_fake_" #name)
template <class Function>
Function* control(const char* name) {
    static void* library = dlopen(EDGEYOLO_FAKE_CUDA_PATH, RTLD_NOW | RTLD_LOCAL);
    void* symbol = library ? dlsym(library, name) : nullptr;
    if (!symbol) throw std::runtime_error(std::string("the simulated driver has no ") + name);
    return reinterpret_cast<Function*>(symbol);
}

inline std::string violations() {
    std::string text(static_cast<std::size_t>(FAKE(violation_text)(nullptr, 0)) + 1, '\0');
    FAKE(violation_text)(text.data(), static_cast<long>(text.size()));
    text.pop_back();
    return text;
}

// Handles and bytes that this process holds through cuda.hpp.
inline long live_gpu_objects() {
    const LiveCounters& count = live();
    return count.devices + count.streams + count.events + count.modules + count.graphs + count.graph_execs +
           count.device_buffers + count.device_bytes + count.pinned_buffers + count.pinned_bytes;
}

// Runs on the real GPU too.
class Gpu : public testing::Test {
protected:
    void SetUp() override {
        if (real_gpu()) return;
        setenv("EDGEYOLO_CUDA_DRIVER", EDGEYOLO_FAKE_CUDA_PATH, 1);
        FAKE(reset)();
    }
    void TearDown() override {
        EXPECT_EQ(live_gpu_objects(), 0) << "the core leaked";
        if (real_gpu()) return;
        EXPECT_EQ(violations(), "");
        EXPECT_EQ(FAKE(reset)(), 0) << "handles of the driver were leaked";
    }
};

// Needs what only the simulated driver has: faults, strictness, a second device.
class SimulatedGpu : public Gpu {
protected:
    void SetUp() override {
        if (real_gpu()) GTEST_SKIP() << "on the simulated driver only";
        Gpu::SetUp();
    }
    void TearDown() override {
        if (!real_gpu()) Gpu::TearDown();
    }
    // The violation that this test provokes, and no other.
    static void expect_violation(const std::string& part) {
        EXPECT_EQ(FAKE(violations)(), 1) << violations();
        EXPECT_NE(violations().find(part), std::string::npos) << violations();
        FAKE(clear_violations)();
    }
};

// Any driver function, of whichever driver is in use.
template <class Function>
Function* raw(const char* name) {
    return reinterpret_cast<Function*>(cuda::driver().lookup(name));
}

}  // namespace edgeyolo::test
