#include "cuda_driver.hpp"

#include <dlfcn.h>
#include <unistd.h>
#include <cstdlib>

namespace edgeyolo::cuda {
namespace {

constexpr const char* system_library = "libcuda.so.1";
constexpr const char* library_variable = "EDGEYOLO_CUDA_DRIVER";

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void* open_library(const std::string& path) {
    if (!path.empty() && path.find('/') == std::string::npos)
        throw DeviceError(std::string(library_variable) +
                          " must be the path of a driver library, with a '/' in it; found '" + path + "'");
    // Never closed: the driver keeps threads and handlers of its own.
    void* library = dlopen(path.empty() ? system_library : path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
    const char* reason = dlerror();
    const std::string why = reason ? reason : "no reason given";
    if (!path.empty())
        throw DeviceError("the CUDA driver named by " + std::string(library_variable) + " cannot be opened: " + why +
                          ". Correct or unset the variable");
    throw DeviceError(
        "no CUDA driver: " + why +
        ". Install NVIDIA's driver (in a container: start it with GPU access, e.g. --gpus all), or use the "
        "CPU (device=\"cpu\")");
}

}  // namespace

bool is_fatal(int code) noexcept {
    switch (code) {
        case 46:   // DEVICE_UNAVAILABLE
        case 214:  // ECC_UNCORRECTABLE
        case 220:  // NVLINK_UNCORRECTABLE
        case 226:  // CONTAINED
        case 700:  // ILLEGAL_ADDRESS
        case 702:  // LAUNCH_TIMEOUT
        case 709:  // CONTEXT_IS_DESTROYED
        case 710:  // ASSERT
        case 714:  // HARDWARE_STACK_ERROR
        case 715:  // ILLEGAL_INSTRUCTION
        case 716:  // MISALIGNED_ADDRESS
        case 717:  // INVALID_ADDRESS_SPACE
        case 718:  // INVALID_PC
        case 719:  // LAUNCH_FAILED
        case 721:  // TENSOR_MEMORY_LEAK
        case 999:  // UNKNOWN
        case deinitialized: return true;
        default: return false;
    }
}

Driver::Driver(const std::string& path) : pid_(getpid()) {
    void* handle = open_library(path);
    library = path.empty() ? system_library : path;
    // The first form of cuGetProcAddress (11.3) has no status argument; only the second is used.
    get_proc_address_ = reinterpret_cast<GetProcAddress>(dlsym(handle, "cuGetProcAddress_v2"));
    if (!get_proc_address_) {
        std::string found = "found one without cuGetProcAddress_v2";
        using GetVersion = int (*)(int*);
        const auto get_version = reinterpret_cast<GetVersion>(dlsym(handle, "cuDriverGetVersion"));
        if (int number = 0; get_version && get_version(&number) == success) found = "found " + version_text(number);
        throw DeviceError("the CUDA driver is too old: expected CUDA " + version_text(driver_api_version) +
                          " or newer (driver 525, JetPack 6), " + found + " in " + library +
                          ". Update NVIDIA's driver");
    }
    Dl_info info{};
    if (dladdr(reinterpret_cast<void*>(get_proc_address_), &info) && info.dli_fname) library = info.dli_fname;

#define EDGEYOLO_DRIVER_LOAD(name, ...) name = reinterpret_cast<int (*)(__VA_ARGS__)>(lookup(#name));
    EDGEYOLO_DRIVER_CALLS(EDGEYOLO_DRIVER_LOAD)
#undef EDGEYOLO_DRIVER_LOAD

    if (const int code = cuInit(0)) {
        throw DriverError(code, "cuInit: " + text(code) + " (" + library +
                                    "). Check that nvidia-smi lists a GPU, that CUDA_VISIBLE_DEVICES does not hide it, "
                                    "and that the container, if any, was started with GPU access");
    }
    check(cuDriverGetVersion(&version), "cuDriverGetVersion");
    check(cuDeviceGetCount(&device_count), "cuDeviceGetCount");
}

void* Driver::lookup(const char* name, int api_version) const {
    constexpr unsigned long long legacy_stream = 1;  // the functions without per-thread default stream
    void* function = nullptr;
    int status = 0;
    const int code = get_proc_address_(name, &function, api_version, legacy_stream, &status);
    if (code == success && function) return function;
    throw DeviceError("the CUDA driver " + library + " has no " + name + " of CUDA " + version_text(api_version) +
                      " (result " + std::to_string(code) + ", status " + std::to_string(status) +
                      "). Update NVIDIA's driver to 525 or newer");
}

std::string Driver::text(int code) const {
    const char* name = nullptr;
    const char* words = nullptr;
    if (cuGetErrorName(code, &name) != success || !name) return "CUDA error " + std::to_string(code);
    if (cuGetErrorString(code, &words) != success || !words) return name;
    return std::string(name) + ": " + words;
}

void Driver::fail(int code, const char* call, const std::string& detail, int device) const {
    std::string message = call;
    if (!detail.empty()) message += "(" + detail + ")";
    if (device >= 0) message += " on device " + std::to_string(device);
    throw DriverError(code, message + ": " + text(code));
}

bool Driver::forked() const noexcept {
    return getpid() != pid_;
}

const Driver& driver() {
    // Never destroyed: handles that die during process exit still look at it.
    static const Driver& instance = *[] {
        const char* path = std::getenv(library_variable);
        return new Driver(path ? path : "");
    }();
    if (instance.forked())
        throw DeviceError(
            "the GPU is used after fork(): CUDA does not survive it. Load the model in the child process, "
            "and use nothing of the GPU before the fork (or start workers with 'spawn')");
    return instance;
}

}  // namespace edgeyolo::cuda
