#include "driver_entry.hpp"

namespace edgeyolo::fake {
namespace {

int next_fault(const char* call) {
    auto& faults = state().faults;
    for (auto fault = faults.begin(); fault != faults.end(); ++fault) {
        if (fault->call != call || (fault->nth > 1 && fault->nth-- > 1)) continue;
        ++state().faults_hit;
        const Fault hit = *fault;
        if (hit.mode != edgeyolo_fake_always) faults.erase(fault);
        if (hit.mode == edgeyolo_fake_lost) {
            const auto current = current_context();
            device(current ? current->device : 0).lost = hit.code;
        }
        return hit.code;
    }
    return ok;
}

struct CodeText {
    int code;
    const char* name;
    const char* text;
};
const CodeText* find_text(int code) {
    static const CodeText texts[] = {
        {0, "CUDA_SUCCESS", "no error"},
        {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
        {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
        {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
        {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
        {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
        {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
        {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
        {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
        {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
        {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
        {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
        {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
        {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
        {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
        {600, "CUDA_ERROR_NOT_READY", "device not ready"},
        {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
        {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
        {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
        {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
        {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
        {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
        {903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
        {904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
        {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
        {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capture"},
        {907, "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"},
        {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a capture from another thread"},
        {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
    };
    for (const CodeText& entry : texts)
        if (entry.code == code) return &entry;
    return nullptr;
}

}  // namespace

std::vector<std::uint64_t>& pushed() {
    return state().pushed[std::this_thread::get_id()];
}

std::shared_ptr<Context> current_context() {
    if (pushed().empty()) return nullptr;
    const auto found = state().objects.find(pushed().back());
    return found == state().objects.end() ? nullptr : std::static_pointer_cast<Context>(found->second);
}

Entry::Entry(const char* name, Effect effect) : call(name) {
    if (forked()) {
        // Other threads do not exist here, so the lock may never come free.
        code = not_initialized;
        return;
    }
    lock = Lock(state().mutex);
    ++state().calls[name];
    if (!state().initialized && std::strcmp(name, "cuInit") != 0) {
        code = not_initialized;
        return;
    }
    (effect == Effect::starts ? code : late) = next_fault(name);
}

int Entry::context(int& ordinal) const {
    const auto current = current_context();
    if (!current) return refuse(invalid_context, std::string(call) + ": no context is current");
    ordinal = current->device;
    return late ? int{ok} : device(ordinal).lost;
}

int Entry::done(int ordinal, int result) const {
    if (late) return late;
    return device(ordinal).lost ? device(ordinal).lost : result;
}

int Entry::stream(StreamHandle handle, int ordinal, StreamRef& found) const {
    if (reinterpret_cast<std::uintptr_t>(handle) <= 2)
        return refuse(invalid_handle, std::string(call) + ": the default stream is used");
    found = find<Stream>(handle, call);
    if (!found) return invalid_handle;
    return same_device(*found, Kind::stream, ordinal);
}

int Entry::same_device(const Object& object, Kind kind, int ordinal) const {
    if (object.device == ordinal) return ok;
    return refuse(invalid_handle, std::string(call) + ": wrong context: a " + kind_name(kind) + " of device " +
                                      std::to_string(object.device) + " while device " + std::to_string(ordinal) +
                                      " is current");
}

// These two take no part in faults: they only word them.
int cuGetErrorName(int code, const char** text) {
    const CodeText* found = find_text(code);
    *text = found ? found->name : nullptr;
    return found ? ok : int{invalid_value};
}

int cuGetErrorString(int code, const char** text) {
    const CodeText* found = find_text(code);
    *text = found ? found->text : nullptr;
    return found ? ok : int{invalid_value};
}

}  // namespace edgeyolo::fake
