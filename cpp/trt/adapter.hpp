// The seam between the core and the adapters _trt10.so, _trt11.so, ...: the one symbol that each of them exports.
// Core and adapters come from one build, so classes and exceptions may cross; `abi` refuses an adapter left over from
// another one.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include "../engine.hpp"

namespace edgeyolo::trt {

// Raise it with every change to engine.hpp or this file.
constexpr int adapter_abi = 1;

struct AdapterRequest {
    void* library = nullptr;     // dlopen's handle of libnvinfer, never closed
    std::string library_text;    // "TensorRT 10.16.1 (/usr/lib/libnvinfer.so.10)", for messages
    void* plugins = nullptr;     // dlopen's handle of libnvinfer_plugin; nullptr: the engine needs none
    const void* plan = nullptr;  // may be freed after the call
    std::size_t plan_size = 0;
    int dla_core = -1;  // -1: none asked for
};

struct AdapterEntry {
    int abi;
    int headers_version;  // NV_TENSORRT_VERSION that it was compiled against
    // Deserialises the plan for the current device. Throws EngineError.
    std::unique_ptr<Engine> (*load)(const AdapterRequest& request);
};

using AdapterFunction = const AdapterEntry* (*)();
constexpr const char* adapter_symbol = "edgeyolo_trt_adapter";

}  // namespace edgeyolo::trt
