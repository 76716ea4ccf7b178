// Finds TensorRT's runtime library on this machine, picks the adapter of its major, loads plans with it.
//
// Order of the search: Options::library, the variable EDGEYOLO_TENSORRT_LIBRARY (each names one file, and no other is
// tried then), the system's libnvinfer.so.11 and .10, the same in Options::folders (the pip wheels), then the lean
// library libnvinfer_lean.so likewise, last because it runs only plans that were built version compatible. The first
// one is taken whose adapter stands in Options::adapter_folder. A library that the process has loaded already counts as
// one of the system.
#pragma once
#include <memory>
#include <string>
#include <vector>
#include "../engine.hpp"

namespace edgeyolo::trt {

struct Options {
    std::string library;               // a file; empty = search
    std::vector<std::string> folders;  // tensorrt_libs, tensorrt_lean_libs of the Python environment
    std::string adapter_folder;        // where _trt10.so, _trt11.so stand: beside _core
    int major = 0;                     // accept only this one; 0 = the newest that fits
    bool plugins = false;              // register NVIDIA's plugins first; only for engines that use them
    int dla_core = -1;                 // -1: none
};

// A library, opened for good: closing one that has started threads crashes.
struct Library {
    std::string path;
    int version = 0;  // as getInferLibVersion() has it: 101601 is 10.16.1
    bool lean = false;
    void* handle = nullptr;
    std::string text() const;  // "TensorRT 10.16.1 (/usr/lib/libnvinfer.so.10)"
};

// Needs no device. Throws EngineError that names what was found where, and what to do.
Library find_library(const Options& options);

// The plan's bytes may go after the call. The caller has pushed the device's context (see engine.hpp). Without a driver
// this is a DeviceError, before TensorRT is touched: its libraries crash there. Throws EngineError otherwise.
std::unique_ptr<Engine> load_engine(const void* plan, std::size_t size, const Options& options);

int major_of(int version);
std::string version_text(int version);

}  // namespace edgeyolo::trt
