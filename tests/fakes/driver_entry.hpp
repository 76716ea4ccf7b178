// The front of every function of the simulated driver: the lock, the count, faults, the current context. Internal.
#pragma once
#include <cstring>

#include "driver.hpp"
#include "driver_state.hpp"

namespace edgeyolo::fake {

using cuda::ContextHandle;
using cuda::EventHandle;
using cuda::FunctionHandle;
using cuda::GraphExecHandle;
using cuda::GraphHandle;
using cuda::GraphNodeHandle;
using cuda::ModuleHandle;
using cuda::StreamHandle;
using StreamRef = std::shared_ptr<Stream>;

#define DECLARE(name, ...) int name(__VA_ARGS__);
EDGEYOLO_DRIVER_CALLS(DECLARE)
#undef DECLARE
// Beyond the core's table, for tests: what other code in the process may do.
int cuCtxSetCurrent(ContextHandle context);
int cuCtxSynchronize();

// The contexts that this thread has pushed. Not thread_local: ThreadSanitizer mistakes how the storage of a library
// that was opened late is freed.
std::vector<std::uint64_t>& pushed();
std::shared_ptr<Context> current_context();

enum class Effect {
    starts,
    ends
};

struct Entry {
    explicit Entry(const char* name, Effect effect = Effect::starts);
    // The ordinal of the current context. Non-zero is the answer to give.
    int context(int& ordinal) const;
    // What a call that has done its work answers: an injected fault, or the loss of the device, comes first.
    int done(int ordinal, int result = ok) const;
    int stream(StreamHandle handle, int ordinal, StreamRef& found) const;
    int same_device(const Object& object, Kind kind, int ordinal) const;

    const char* call;
    Lock lock;
    int code = ok;  // to be returned at once
    int late = ok;  // to be returned after the work, by calls that end something
};

// The first lines of most calls: leave with the entry's code; the current device; the stream argument; what a capture
// forbids. Calls that end something go on when the device is lost.
#define BEGIN(name)     \
    Entry entry(#name); \
    if (entry.code) return entry.code
#define BEGIN_ENDING(name)            \
    Entry entry(#name, Effect::ends); \
    if (entry.code) return entry.code
#define CURRENT(ordinal) \
    int ordinal = 0;     \
    if (const int refused = entry.context(ordinal)) return refused
#define CURRENT_OR_LOST(ordinal) \
    int ordinal = 0;             \
    if (entry.context(ordinal) == invalid_context) return invalid_context
#define STREAM(found, handle, ordinal) \
    StreamRef found;                   \
    if (const int refused = entry.stream(handle, ordinal, found)) return refused
#define SAFE_IN_CAPTURE() \
    if (const int refused = unsafe_during_capture()) return refused

}  // namespace edgeyolo::fake
