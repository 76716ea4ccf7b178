// Inside of the simulated driver: its objects and the one lock over all of them. Not for tests: see driver.hpp.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>
#include "cuda_driver.hpp"
#include "twins.hpp"

namespace edgeyolo::fake {

using cuda::DevicePtr;
using Lock = std::unique_lock<std::mutex>;

// Results that this driver gives (CUresult).
enum Code : int {
    ok = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    invalid_handle = 400,
    illegal_state = 401,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    capture_unsupported = 900,
    capture_invalidated = 901,
    capture_unmatched = 903,
    capture_unjoined = 904,
    capture_isolation = 905,
    capture_implicit = 906,
    captured_event = 907,
    capture_wrong_thread = 908
};

struct Allocation {
    DevicePtr address = 0;  // simulated device address; 0 for pinned memory that is not mapped
    std::size_t bytes = 0;
    int device = 0;
    bool pinned = false;
    bool freed = false;
    std::unique_ptr<std::uint8_t[]> storage;
};
using AllocationRef = std::shared_ptr<Allocation>;

struct Device {
    std::size_t total = 0;
    std::size_t used = 0;
    std::size_t peak = 0;
    long operations = 0;
    int lost = 0;               // result of every call from now on
    std::uint64_t context = 0;  // id of the primary context while it is retained
    long retained = 0;
    DevicePtr arena = 0;  // reserved addresses without access: reading one on the host faults
    DevicePtr next = 0;
};

// A driver object. Handles carry its kind and a number that is never given twice, at an address that cannot be read.
struct Object {
    virtual ~Object() = default;
    std::uint64_t id = 0;
    int device = 0;
};
enum class Kind : unsigned {
    context = 1,
    stream,
    event,
    module,
    function,
    graph,
    node,
    exec
};
const char* kind_name(Kind kind);

struct Context : Object {
    static constexpr Kind kind = Kind::context;
};

struct Module : Object {
    static constexpr Kind kind = Kind::module;
    std::set<std::string> names;  // empty: a real fatbin, whose names cannot be listed here
    bool unloaded = false;
};
struct KernelTwin {
    Twin twin = nullptr;
    std::vector<std::size_t> param_sizes;
};
struct Function : Object {
    static constexpr Kind kind = Kind::function;
    std::string name;
    KernelTwin twin;
    std::shared_ptr<Module> module;
};

// Device memory as one running operation sees it; keeps what it touches from going away meanwhile.
class Access final : public Memory {
public:
    Access(int device, const std::string& what) : device_(device), what_(what) {}
    void* host(DevicePtr pointer, std::size_t bytes) const override;
    // The same for host memory handed to an asynchronous copy.
    void keep(AllocationRef allocation) const { kept_.push_back(std::move(allocation)); }
    // After the operation: memory that was freed while it ran.
    bool torn() const;

private:
    int device_;
    const std::string& what_;
    mutable std::vector<AllocationRef> kept_;
};
struct IllegalAddress {};

// One step on a stream, or one node of a graph.
struct Work {
    std::string what;
    std::function<void(const Access&)> run;
};
inline std::shared_ptr<Work> make_work(std::string what, std::function<void(const Access&)> run) {
    return std::make_shared<Work>(Work{std::move(what), std::move(run)});
}

// CUstreamCaptureMode: of a capture, and of a thread.
enum CaptureMode : int {
    global = 0,
    thread_local_only = 1,
    relaxed = 2
};

struct Stream;
struct Capture {
    int mode = global;
    std::thread::id thread;
    Stream* origin = nullptr;
    bool invalid = false;
    bool spoilt = false;  // the next recorded step invalidates it
    bool empty = false;
    bool stale = false;
    struct Node {
        std::shared_ptr<Work> work;
        std::vector<std::size_t> after;
    };
    std::vector<Node> nodes;
    std::set<Stream*> streams;
};

struct Operation {
    std::function<bool()> ready;  // under the lock; empty: at once
    std::function<void()> run;    // without the lock
};

struct Stream : Object {
    static constexpr Kind kind = Kind::stream;
    std::deque<Operation> queue;
    bool busy = false;
    bool stop = false;
    std::mt19937 random;
    std::shared_ptr<Capture> capture;
    std::vector<std::size_t> tail;  // nodes that the next recorded step comes after
};

struct Event : Object {
    static constexpr Kind kind = Kind::event;
    bool timing = false;
    long recorded = 0;
    long completed = 0;
    std::chrono::steady_clock::time_point time;
    std::shared_ptr<Capture> capture;  // of the latest record; set also when that capture has ended
    std::vector<std::size_t> nodes;
};

struct Graph : Object {
    static constexpr Kind kind = Kind::graph;
    std::vector<std::shared_ptr<Work>> work;
    bool stale = false;
};
struct Exec : Object {
    static constexpr Kind kind = Kind::exec;
    std::vector<std::shared_ptr<Work>> work;
    bool stale = false;
    std::mutex running;  // launches of one exec do not overlap
};

struct Fault {
    std::string call;
    long nth = 1;
    int code = 0;
    int mode = 0;
};
struct CaptureFault {
    long nth = 0;  // 0: none
    int mode = 0;
    bool hits();
};

struct State {
    std::mutex mutex;
    std::condition_variable changed;

    bool initialized = false;
    int device_count = 2;
    bool integrated = false;
    std::size_t device_bytes = std::size_t{1} << 30;
    unsigned seed = 1;
    unsigned delay_us = 50;

    std::map<int, Device> devices;
    std::uint64_t next_id = 1;
    std::map<std::uint64_t, std::shared_ptr<Object>> objects;
    std::map<DevicePtr, AllocationRef> memory;       // by device address, freed ones included
    std::map<std::uintptr_t, AllocationRef> pinned;  // by host address
    std::vector<std::shared_ptr<Capture>> captures;  // those in progress

    std::vector<Fault> faults;
    CaptureFault spoil, empty, stale;
    long faults_hit = 0;
    std::map<std::string, long> calls;
    std::vector<std::string> violations;
    std::map<std::thread::id, std::vector<std::uint64_t>> pushed;  // ids of the contexts, per thread
    std::map<std::thread::id, int> modes;                          // CaptureMode of threads that changed theirs
};
State& state();
std::map<std::string, KernelTwin>& twins();  // under the lock
bool forked();                               // true in a child of the process that loaded the library
void read_environment(State& s);

// All below: under the lock, unless said otherwise.
void violation(const std::string& text);
// Records the violation and returns the code.
int refuse(int code, const std::string& text);
Device& device(int ordinal);
template <class T>
void add_object(const std::shared_ptr<T>& object, int ordinal) {
    object->id = state().next_id++;
    object->device = ordinal;
    state().objects[object->id] = object;
}

constexpr std::uint64_t handle_tag = 0x5afe000000000000;  // not a canonical address
template <class T, class Handle>
void give_handle(const std::shared_ptr<T>& object, Handle* handle) {
    *handle = reinterpret_cast<Handle>(handle_tag | std::uint64_t{static_cast<unsigned>(T::kind)} << 40 | object->id);
}
// The object behind a handle, or null with a violation that tells what is wrong with it.
std::shared_ptr<Object> find_object(const void* handle, Kind kind, const char* call);
template <class T>
std::shared_ptr<T> find(const void* handle, const char* call) {
    return std::static_pointer_cast<T>(find_object(handle, T::kind, call));
}
void remove_object(const Object& object);

// driver_memory.cpp
int allocate_device(int ordinal, std::size_t bytes, DevicePtr* pointer);
int free_device(int ordinal, DevicePtr pointer);
int allocate_pinned(int ordinal, std::size_t bytes, bool mapped, void** pointer);
int free_pinned(void* pointer);
AllocationRef find_pinned(const void* pointer);  // the live one that contains it
AllocationRef find_device(DevicePtr pointer);    // freed ones too
bool is_device_address(std::uint64_t address);   // inside any arena

// driver_streams.cpp
std::shared_ptr<Stream> make_stream(int ordinal);
// Queues the work, or records it while the stream captures.
int submit(const std::shared_ptr<Stream>& stream, std::shared_ptr<Work> work);
void enqueue(const std::shared_ptr<Stream>& stream, Operation operation);
// Without a capture in progress on it. Gives up the lock while it waits.
void drain(Lock& lock, const Stream& stream);
// Runs one piece of work on behalf of a stream. Without the lock.
void run_work(int ordinal, const Work& work);
bool idle(const Stream& stream);
int begin_capture(const std::shared_ptr<Stream>& stream, int mode);
int end_capture(const std::shared_ptr<Stream>& stream, std::shared_ptr<Graph>* graph);
int wait_event(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event);
int record_event(const std::shared_ptr<Stream>& stream, const std::shared_ptr<Event>& event);
// Marks the capture as failed and returns the code.
int invalidate(Capture& capture, int code = capture_unsupported);
// The front of a potentially unsafe call. It is not allowed, and spoils the capture, while this thread captures; nor
// while any thread captures in global mode, unless this thread has left that mode itself.
int unsafe_during_capture();
// Returns the thread's mode so far.
int exchange_capture_mode(int mode);

}  // namespace edgeyolo::fake
