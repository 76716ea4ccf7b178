#include "loader.hpp"
#include <dlfcn.h>
#include <unistd.h>
#include <array>
#include <cstdlib>
#include "../cuda.hpp"
#include "../error.hpp"
#include "adapter.hpp"

namespace edgeyolo::trt {
namespace {

// Newest first. A major enters here when its adapter has been tried.
constexpr std::array<int, 2> majors{11, 10};
constexpr int oldest_version = 100100;  // 10.1: from there the calls of the adapter stand at one place

const char* const install_hint =
    "Install TensorRT 10 or 11 (on Jetson it comes with JetPack; elsewhere: pip install tensorrt), or name the file "
    "with EDGEYOLO_TENSORRT_LIBRARY=/path/to/libnvinfer.so.10";

std::string adapter_path(const Options& options, int major) {
    return options.adapter_folder + "/_trt" + std::to_string(major) + ".so";
}

bool exists(const std::string& path) {
    return access(path.c_str(), F_OK) == 0;
}

std::string adapters_text(const Options& options) {
    std::string text;
    for (const int major : majors)
        if (exists(adapter_path(options, major))) text += (text.empty() ? "" : " and ") + std::to_string(major);
    return text.empty() ? "no TensorRT version" : "TensorRT " + text;
}

std::string rebuild_hint(int major) {
    return "Rebuild edgeyolo with the headers of TensorRT " + std::to_string(major) +
           ": EDGEYOLO_TENSORRT_ROOT=/path/to/TensorRT pip install --no-binary edgeyolo edgeyolo";
}

// NVIDIA numbers TensorRT-RTX 1.y.z as 1yyzz in five digits, which no TensorRT ever had.
bool is_rtx(int version) {
    return version >= 10000 && version < 20000;
}

// Why this library cannot be used; empty when it can.
std::string refusal(const Library& library, const Options& options) {
    const int major = major_of(library.version);
    if (is_rtx(library.version))
        return library.text() +
               " is TensorRT-RTX, which edgeyolo does not run yet: its plans and its library differ "
               "from TensorRT's. Use TensorRT 10 or 11, or the ONNX model";
    if (options.major && major != options.major)
        return "TensorRT " + std::to_string(options.major) + " was asked for, found " + library.text();
    if (library.version < oldest_version)
        return "TensorRT 10.1 or newer is needed, found " + library.text() + ". Install a newer one";
    if (!exists(adapter_path(options, major)))
        return "this edgeyolo was built for " + adapters_text(options) + ", found " + library.text() + ". " +
               rebuild_hint(major);
    return {};
}

// RTLD_LOCAL: nvinfer1's symbols of two majors must not meet. The handle is never closed.
// handle == nullptr when there is no such library; `reason` then says why.
Library open(const std::string& name, std::string& reason) {
    Library library;
    library.handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library.handle) {
        const char* why = dlerror();
        reason = why ? why : "cannot open " + name;
        return library;
    }
    // Safe before anything else, in every version and variant.
    void* version = dlsym(library.handle, "getInferLibVersion");
    if (!version) {
        reason = name + " is no TensorRT runtime library: it has no getInferLibVersion";
        library.handle = nullptr;
        return library;
    }
    library.version = reinterpret_cast<int (*)()>(version)();
    Dl_info info{};
    library.path = dladdr(version, &info) && info.dli_fname ? info.dli_fname : name;
    library.lean = library.path.find("nvinfer_lean") != std::string::npos;
    return library;
}

Library open_named(const std::string& path, const Options& options) {
    std::string reason;
    Library library = open(path, reason);
    check<EngineError>(library.handle != nullptr,
                       "cannot use the TensorRT library '" + path + "': " + reason +
                           ". Name libnvinfer.so.10, libnvinfer.so.11 or their lean variants, or leave the path out");
    const std::string refused = refusal(library, options);
    check<EngineError>(refused.empty(), refused);
    return library;
}

std::vector<std::string> candidates(const Options& options) {
    std::vector<std::string> names;
    for (const char* stem : {"libnvinfer.so.", "libnvinfer_lean.so."}) {
        std::vector<std::string> sonames;
        for (const int major : majors) sonames.push_back(stem + std::to_string(major));
        names.insert(names.end(), sonames.begin(), sonames.end());
        for (const std::string& folder : options.folders)
            for (const std::string& soname : sonames)
                if (exists(folder + "/" + soname)) names.push_back(folder + "/" + soname);
    }
    return names;
}

// The plugins' library of the same major, beside the runtime or where the system has it.
void* open_plugins(const Library& library) {
    const std::string major = std::to_string(major_of(library.version));
    const std::string folder = library.path.substr(0, library.path.find_last_of('/') + 1);
    for (const std::string& stem :
         {folder + "libnvinfer_plugin.so.", std::string("libnvinfer_plugin.so."), folder + "libnvinfer_vc_plugin.so."})
        if (void* handle = dlopen((stem + major).c_str(), RTLD_NOW | RTLD_LOCAL)) return handle;
    throw EngineError("this engine asks for TensorRT's plugins, and libnvinfer_plugin.so." + major +
                      " is neither beside " + library.path +
                      " nor on the library path. Install it, or export the model without plugins");
}

const AdapterEntry& adapter(const Options& options, int major) {
    const std::string path = adapter_path(options, major);
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char* why = dlerror();
        throw EngineError("cannot open edgeyolo's adapter " + path + ": " + (why ? why : "no reason given") +
                          ". Install edgeyolo again");
    }
    const auto function = reinterpret_cast<AdapterFunction>(dlsym(handle, adapter_symbol));
    check<EngineError>(function != nullptr, path + " is no adapter of edgeyolo. Install edgeyolo again");
    const AdapterEntry& entry = *function();
    check<EngineError>(entry.abi == adapter_abi && major_of(entry.headers_version) == major,
                       path + " belongs to another build of edgeyolo (interface " + std::to_string(entry.abi) +
                           ", TensorRT " + version_text(entry.headers_version) + "; expected interface " +
                           std::to_string(adapter_abi) + ", TensorRT " + std::to_string(major) +
                           "). Install edgeyolo again");
    return entry;
}

}  // namespace

int major_of(int version) {
    return version >= 10000 ? version / 10000 : version / 1000;  // 8.6.1 is 8601, 10.16.1 is 101601, RTX 1.7.1 is 10701
}

std::string version_text(int version) {
    const int unit = version >= 10000 ? 10000 : 1000;
    return std::to_string(version / unit) + "." + std::to_string(version % unit / 100) + "." +
           std::to_string(version % 100);
}

std::string Library::text() const {
    return "TensorRT " + version_text(version) + (lean ? " lean (" : " (") + path + ")";
}

Library find_library(const Options& options) {
    if (!options.library.empty()) return open_named(options.library, options);
    const char* variable = std::getenv("EDGEYOLO_TENSORRT_LIBRARY");
    if (variable && *variable) return open_named(variable, options);

    std::string refused;  // the first library that is there and does not fit tells the most
    std::string broken;   // a file that is there and cannot be opened
    for (const std::string& name : candidates(options)) {
        std::string reason;
        Library library = open(name, reason);
        if (!library.handle) {
            // The loader's text begins with the file that is missing: if it is another one, this library is there and
            // lacks something.
            if (broken.empty() && reason.compare(0, name.size(), name) != 0) broken = reason;
            continue;
        }
        reason = refusal(library, options);
        if (reason.empty()) return library;
        if (refused.empty()) refused = reason;
    }
    if (!refused.empty()) throw EngineError(refused);
    throw EngineError(
        "no TensorRT library found: looked for libnvinfer.so.11, .10 and libnvinfer_lean.so.11, .10 on the "
        "library path and in " +
        std::to_string(options.folders.size()) + " further folders. " + (broken.empty() ? "" : broken + ". ") +
        install_hint);
}

std::unique_ptr<Engine> load_engine(const void* plan, std::size_t size, const Options& options) {
    cuda::driver();
    const Library library = find_library(options);
    AdapterRequest request;
    request.library = library.handle;
    request.library_text = library.text();
    request.plugins = options.plugins ? open_plugins(library) : nullptr;
    request.plan = plan;
    request.plan_size = size;
    request.dla_core = options.dla_core;
    return adapter(options, major_of(library.version)).load(request);
}

}  // namespace edgeyolo::trt
