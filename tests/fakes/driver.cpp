// The simulated CUDA driver: a libcuda in host memory, for tests without a GPU. It checks what a real driver only
// punishes by chance: the right context, lifetimes, what a capture allows. driver.hpp steers and observes it.
// Here: devices, contexts, memory. driver_work.cpp: copies, streams, events. driver_graphs.cpp: kernels, graphs.
#include "driver_entry.hpp"

namespace edgeyolo::fake {

static int check_ordinal(int ordinal) {
    return ordinal >= 0 && ordinal < state().device_count ? ok : int{invalid_device};
}

int cuInit(unsigned flags) {
    BEGIN(cuInit);
    if (flags != 0) return invalid_value;
    if (state().device_count == 0) return no_device;
    state().initialized = true;
    return ok;
}

int cuDriverGetVersion(int* version) {
    BEGIN(cuDriverGetVersion);
    *version = 13000;
    return ok;
}

int cuDeviceGetCount(int* count) {
    BEGIN(cuDeviceGetCount);
    *count = state().device_count;
    return ok;
}

int cuDeviceGet(int* handle, int ordinal) {
    BEGIN(cuDeviceGet);
    *handle = ordinal;
    return check_ordinal(ordinal);
}

int cuDeviceGetName(char* name, int size, int handle) {
    BEGIN(cuDeviceGetName);
    if (const int refused = check_ordinal(handle)) return refused;
    if (size < 1) return invalid_value;
    std::strncpy(name, "edgeyolo simulated GPU", static_cast<std::size_t>(size) - 1);
    name[size - 1] = 0;
    return ok;
}

int cuDeviceGetAttribute(int* value, int attribute, int handle) {
    BEGIN(cuDeviceGetAttribute);
    if (const int refused = check_ordinal(handle)) return refused;
    switch (attribute) {
        case 16: *value = 8; return ok;                           // MULTIPROCESSOR_COUNT
        case 18: *value = state().integrated; return ok;          // INTEGRATED
        case 19: *value = 1; return ok;                           // CAN_MAP_HOST_MEMORY
        case 75: *value = state().integrated ? 8 : 9; return ok;  // COMPUTE_CAPABILITY_MAJOR
        case 76: *value = state().integrated ? 7 : 0; return ok;  // COMPUTE_CAPABILITY_MINOR
        default:
            return refuse(invalid_value, "cuDeviceGetAttribute: the simulated driver does not know attribute " +
                                             std::to_string(attribute));
    }
}

int cuDeviceTotalMem(std::size_t* bytes, int handle) {
    BEGIN(cuDeviceTotalMem);
    if (const int refused = check_ordinal(handle)) return refused;
    *bytes = device(handle).total;
    return ok;
}

int cuDevicePrimaryCtxRetain(ContextHandle* context, int handle) {
    BEGIN(cuDevicePrimaryCtxRetain);
    if (const int refused = check_ordinal(handle)) return refused;
    Device& d = device(handle);
    if (d.lost) return d.lost;
    if (d.retained++ == 0) {
        auto made = std::make_shared<Context>();
        add_object(made, handle);
        d.context = made->id;
    }
    give_handle(std::static_pointer_cast<Context>(state().objects.at(d.context)), context);
    return ok;
}

int cuDevicePrimaryCtxRelease(int handle) {
    BEGIN_ENDING(cuDevicePrimaryCtxRelease);
    if (const int refused = check_ordinal(handle)) return refused;
    Device& d = device(handle);
    if (d.retained == 0) return refuse(invalid_context, "cuDevicePrimaryCtxRelease: the context is not retained");
    if (--d.retained == 0) {
        remove_object(*state().objects.at(d.context));
        d.context = 0;
        long left = 0;
        for (const auto& [id, object] : state().objects)
            if (object->device == handle && !dynamic_cast<Function*>(object.get())) ++left;
        for (const auto& [address, allocation] : state().memory)
            if (allocation->device == handle && !allocation->freed) ++left;
        if (left)
            violation("the primary context of device " + std::to_string(handle) + " ends with " + std::to_string(left) +
                      " live handles or allocations");
    }
    return entry.done(handle);
}

static int push_or_set(const Entry& entry, ContextHandle handle) {
    const auto context = find<Context>(handle, entry.call);
    if (!context) return invalid_context;
    pushed().push_back(context->id);
    return ok;
}

int cuCtxPushCurrent(ContextHandle context) {
    BEGIN(cuCtxPushCurrent);
    return push_or_set(entry, context);
}

int cuCtxPopCurrent(ContextHandle* context) {
    BEGIN_ENDING(cuCtxPopCurrent);
    if (pushed().empty()) return refuse(invalid_context, "cuCtxPopCurrent: no context is current");
    const auto current = current_context();
    if (context) *context = nullptr;
    if (context && current) give_handle(current, context);
    pushed().pop_back();
    return entry.late;
}

// Replaces the current context, as the CUDA runtime's cudaSetDevice does.
int cuCtxSetCurrent(ContextHandle context) {
    BEGIN(cuCtxSetCurrent);
    if (!pushed().empty()) pushed().pop_back();
    return context ? push_or_set(entry, context) : int{ok};
}

int cuCtxGetCurrent(ContextHandle* context) {
    BEGIN(cuCtxGetCurrent);
    *context = nullptr;
    if (const auto current = current_context()) give_handle(current, context);
    return ok;
}

int cuCtxSynchronize() {
    BEGIN(cuCtxSynchronize);
    CURRENT(ordinal);
    // From any thread, whatever the mode: the fact behind the retries of a capture.
    int spoilt = ok;
    for (const auto& capture : state().captures)
        if (capture->origin->device == ordinal) spoilt = invalidate(*capture);
    if (spoilt) return spoilt;
    std::vector<StreamRef> streams;
    for (const auto& [id, object] : state().objects)
        if (auto stream = std::dynamic_pointer_cast<Stream>(object); stream && stream->device == ordinal)
            streams.push_back(stream);
    for (const StreamRef& stream : streams) drain(entry.lock, *stream);
    return device(ordinal).lost;
}

int cuMemGetInfo(std::size_t* free, std::size_t* total) {
    BEGIN(cuMemGetInfo);
    CURRENT(ordinal);
    *total = device(ordinal).total;
    *free = *total - device(ordinal).used;
    return ok;
}

int cuMemAlloc(DevicePtr* pointer, std::size_t bytes) {
    BEGIN(cuMemAlloc);
    CURRENT(ordinal);
    SAFE_IN_CAPTURE();
    return allocate_device(ordinal, bytes, pointer);
}

int cuMemFree(DevicePtr pointer) {
    BEGIN_ENDING(cuMemFree);
    CURRENT_OR_LOST(ordinal);
    SAFE_IN_CAPTURE();
    if (pointer == 0) return ok;
    return entry.done(ordinal, free_device(ordinal, pointer));
}

int cuMemHostAlloc(void** pointer, std::size_t bytes, unsigned flags) {
    BEGIN(cuMemHostAlloc);
    CURRENT(ordinal);
    SAFE_IN_CAPTURE();
    constexpr unsigned device_map = 2;
    return allocate_pinned(ordinal, bytes, (flags & device_map) != 0, pointer);
}

int cuMemFreeHost(void* pointer) {
    BEGIN_ENDING(cuMemFreeHost);
    CURRENT_OR_LOST(ordinal);
    SAFE_IN_CAPTURE();
    return entry.done(ordinal, free_pinned(pointer));
}

int cuMemHostGetDevicePointer(DevicePtr* mapped, void* host, unsigned flags) {
    BEGIN(cuMemHostGetDevicePointer);
    CURRENT(ordinal);
    const AllocationRef allocation = find_pinned(host);
    if (flags != 0 || !allocation || allocation->address == 0)
        return refuse(invalid_value, "cuMemHostGetDevicePointer of memory that is not mapped");
    *mapped = allocation->address + (static_cast<std::uint8_t*>(host) - allocation->storage.get());
    return ok;
}

static void* find_function(const char* name) {
#define ENTRY(call, ...) \
    if (std::strcmp(name, #call) == 0) return reinterpret_cast<void*>(&call);
    EDGEYOLO_DRIVER_CALLS(ENTRY)
#undef ENTRY
    if (std::strcmp(name, "cuCtxSynchronize") == 0) return reinterpret_cast<void*>(&cuCtxSynchronize);
    if (std::strcmp(name, "cuCtxSetCurrent") == 0) return reinterpret_cast<void*>(&cuCtxSetCurrent);
    return nullptr;
}

}  // namespace edgeyolo::fake

// The one function that is exported under its own name: every other has to be asked for, at the version of the table.
extern "C" __attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* name, void** function,
                                                                          int version, unsigned long long flags,
                                                                          int* status) {
    using namespace edgeyolo::fake;
    constexpr int symbol_not_found = 1;
    constexpr int version_not_sufficient = 2;
    constexpr unsigned long long legacy_stream = 1;
    *function = nullptr;
    if (forked()) return not_initialized;
    const Lock lock(state().mutex);
    if (version < edgeyolo::cuda::driver_api_version) {
        *status = version_not_sufficient;
        return not_found;
    }
    if (version != edgeyolo::cuda::driver_api_version || flags != legacy_stream)
        violation(std::string("cuGetProcAddress of ") + name + " at version " + std::to_string(version) + ", flags " +
                  std::to_string(flags) + ": expected 12000, 1");
    *function = find_function(name);
    *status = *function ? 0 : symbol_not_found;
    return *function ? ok : int{not_found};
}
