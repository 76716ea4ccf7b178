// What the tests of the adapter and of the loader share.
#pragma once
#include <gtest/gtest.h>
#include <string>
#include "error.hpp"
#include "simulated_gpu.hpp"
#include "trt/loader.hpp"

namespace edgeyolo {

// Set by the build: the folder of _trt<major>.so, the test TensorRT of the major.
inline const std::string adapter_folder = EDGEYOLO_TEST_ADAPTERS;
inline const std::string test_library = EDGEYOLO_TEST_TENSORRT;
constexpr int test_major = EDGEYOLO_TEST_MAJOR;

inline trt::Options options() {
    trt::Options result;
    result.library = test_library;
    result.adapter_folder = adapter_folder;
    return result;
}

inline const std::string static_plan =
    "edgeyolo toy plan 1\nname net\ninput images float32 1 3 64 96\noutput output0 float32 raw 3\nstrides 8\n";

template <class Error, class Work>
std::string message_of(Work&& work) {
    try {
        work();
    } catch (const Error& error) {
        return error.what();
    } catch (const std::exception& error) {
        return std::string("another error: ") + error.what();
    }
    return "no error";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace edgeyolo
