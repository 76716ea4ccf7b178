// Set-up, faults and observation of the simulated driver (driver.hpp), and its objects' table.
#include <unistd.h>
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "driver.hpp"
#include "driver_state.hpp"

namespace edgeyolo::fake {
namespace {

const pid_t loading_process = getpid();

unsigned long number(const char* variable, unsigned long fallback) {
    const char* text = std::getenv(variable);
    return text && *text ? std::strtoul(text, nullptr, 10) : fallback;
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
    return parts;
}

int mode_of(State& s, const std::string& text) {
    if (text == "once") return edgeyolo_fake_once;
    if (text == "always") return edgeyolo_fake_always;
    if (text == "lost") return edgeyolo_fake_lost;
    s.violations.push_back("a fault in the environment has the mode '" + text + "': expected once, always or lost");
    return edgeyolo_fake_once;
}

CaptureFault capture_fault(State& s, const char* variable) {
    const char* text = std::getenv(variable);
    if (!text) return {};
    const auto parts = split(text, ':');
    if (parts.size() != 2) {
        s.violations.push_back(std::string(variable) + ": expected nth:mode, found '" + text + "'");
        return {};
    }
    return {std::atol(parts[0].c_str()), mode_of(s, parts[1])};
}

long live_objects(const char* kind) {
    long count = 0;
    const State& s = state();
    const auto wanted = [&](const char* name) { return !kind || std::strcmp(kind, name) == 0; };
    for (const auto& [id, object] : s.objects) {
        const char* name = dynamic_cast<const Context*>(object.get())  ? "context"
                           : dynamic_cast<const Stream*>(object.get()) ? "stream"
                           : dynamic_cast<const Event*>(object.get())  ? "event"
                           : dynamic_cast<const Module*>(object.get()) ? "module"
                           : dynamic_cast<const Graph*>(object.get())  ? "graph"
                           : dynamic_cast<const Exec*>(object.get())   ? "exec"
                                                                       : nullptr;  // functions live with their module
        if (name && wanted(name)) ++count;
    }
    if (wanted("device_memory"))
        for (const auto& [address, allocation] : s.memory)
            if (!allocation->freed && !allocation->pinned) ++count;
    if (wanted("pinned_memory")) count += static_cast<long>(s.pinned.size());
    return count;
}

}  // namespace

State& state() {
    // Never destroyed: worker threads and the program's own handles may outlive main().
    static State& s = *[] {
        auto* made = new State;
        read_environment(*made);
        return made;
    }();
    return s;
}

std::map<std::string, KernelTwin>& twins() {
    static auto& table = *new std::map<std::string, KernelTwin>;
    return table;
}

bool forked() {
    return getpid() != loading_process;
}

void read_environment(State& s) {
    s.device_count = static_cast<int>(number("EDGEYOLO_FAKE_DEVICES", 2));
    s.integrated = number("EDGEYOLO_FAKE_INTEGRATED", 0) != 0;
    s.device_bytes = number("EDGEYOLO_FAKE_MEMORY_MB", 1024) << 20;
    s.seed = static_cast<unsigned>(number("EDGEYOLO_FAKE_SEED", 1));
    s.delay_us = static_cast<unsigned>(number("EDGEYOLO_FAKE_DELAY_US", 50));
    s.spoil = capture_fault(s, "EDGEYOLO_FAKE_SPOIL");
    s.empty = capture_fault(s, "EDGEYOLO_FAKE_EMPTY");
    s.stale = capture_fault(s, "EDGEYOLO_FAKE_STALE");
    s.faults.clear();
    const char* faults = std::getenv("EDGEYOLO_FAKE_FAULTS");
    for (const std::string& text : split(faults ? faults : "", ',')) {
        const auto parts = split(text, ':');
        if (parts.size() == 4)
            s.faults.push_back(
                {parts[0], std::atol(parts[1].c_str()), std::atoi(parts[2].c_str()), mode_of(s, parts[3])});
        else
            s.violations.push_back("EDGEYOLO_FAKE_FAULTS: expected call:nth:code:mode, found '" + text + "'");
    }
}

bool CaptureFault::hits() {
    if (nth == 0) return false;
    if (nth > 1) {
        --nth;
        return false;
    }
    if (mode == edgeyolo_fake_once) nth = 0;
    ++state().faults_hit;
    return true;
}

void violation(const std::string& text) {
    state().violations.push_back(text);
}

int refuse(int code, const std::string& text) {
    violation(text);
    return code;
}

Device& device(int ordinal) {
    Device& d = state().devices[ordinal];
    if (d.total == 0) d.total = state().device_bytes;
    return d;
}

const char* kind_name(Kind kind) {
    static const char* const names[] = {"?",        "context", "stream", "event", "module",
                                        "function", "graph",   "node",   "exec"};
    return names[static_cast<unsigned>(kind)];
}

std::shared_ptr<Object> find_object(const void* handle, Kind kind, const char* call) {
    const auto value = reinterpret_cast<std::uint64_t>(handle);
    const std::uint64_t id = value & 0xffffffffff;
    const auto found_kind = static_cast<Kind>(value >> 40 & 0xff);
    const std::string who = std::string(call) + ": ";
    if ((value & 0xffff000000000000) != handle_tag || id == 0 || id >= state().next_id) {
        violation(who + "not a handle of this driver");
        return nullptr;
    }
    if (found_kind != kind) {
        violation(who + "expected a " + kind_name(kind) + ", found a " + kind_name(found_kind));
        return nullptr;
    }
    const auto found = state().objects.find(id);
    if (found != state().objects.end()) return found->second;
    violation(who + kind_name(kind) + " " + std::to_string(id) + " is used after it was destroyed");
    return nullptr;
}

void remove_object(const Object& object) {
    state().objects.erase(object.id);
}

void register_twin(const char* name, Twin twin, const std::vector<std::size_t>& param_sizes) {
    const Lock lock(state().mutex);
    twins()[name] = {twin, param_sizes};
}

}  // namespace edgeyolo::fake

using namespace edgeyolo::fake;

extern "C" {

void edgeyolo_fake_register_twin(const char* name, Twin twin, const std::size_t* param_sizes, std::size_t param_count) {
    register_twin(name, twin, std::vector<std::size_t>(param_sizes, param_sizes + param_count));
}

long edgeyolo_fake_reset(void) {
    State& s = state();
    Lock lock(s.mutex);
    for (const auto& [id, object] : s.objects)
        if (auto stream = std::dynamic_pointer_cast<Stream>(object)) stream->stop = true;
    s.changed.notify_all();
    s.changed.wait(lock, [&] {
        return std::all_of(s.objects.begin(), s.objects.end(), [](const auto& entry) {
            const auto* stream = dynamic_cast<const Stream*>(entry.second.get());
            return !stream || idle(*stream);
        });
    });
    const long leaked = live_objects(nullptr);
    for (auto& [ordinal, d] : s.devices) d = Device{0, 0, 0, 0, 0, 0, 0, d.arena, d.next};
    s.objects.clear();
    s.memory.clear();
    s.pinned.clear();
    s.captures.clear();
    s.calls.clear();
    s.violations.clear();
    s.faults_hit = 0;
    s.pushed.clear();
    s.modes.clear();
    read_environment(s);
    return leaked;
}

void edgeyolo_fake_set_devices(int count, int integrated, unsigned long long bytes_each) {
    const Lock lock(state().mutex);
    state().device_count = count;
    state().integrated = integrated != 0;
    state().device_bytes = bytes_each;
    for (auto& [ordinal, d] : state().devices) d.total = bytes_each;
}

void edgeyolo_fake_set_delay(unsigned seed, unsigned delay_us) {
    const Lock lock(state().mutex);
    state().seed = seed;
    state().delay_us = delay_us;
}

void edgeyolo_fake_fault(const char* call, long nth, int code, int mode) {
    const Lock lock(state().mutex);
    state().faults.push_back({call, nth, code, mode});
}

void edgeyolo_fake_spoil_capture(long nth, int mode) {
    const Lock lock(state().mutex);
    state().spoil = {nth, mode};
}

void edgeyolo_fake_empty_graph(long nth, int mode) {
    const Lock lock(state().mutex);
    state().empty = {nth, mode};
}

void edgeyolo_fake_stale_graph(long nth, int mode) {
    const Lock lock(state().mutex);
    state().stale = {nth, mode};
}

void edgeyolo_fake_lose_device(int ordinal, int code) {
    const Lock lock(state().mutex);
    device(ordinal).lost = code;
}

void edgeyolo_fake_clear_faults(void) {
    const Lock lock(state().mutex);
    state().faults.clear();
    state().spoil = state().empty = state().stale = {};
}

long edgeyolo_fake_calls(const char* call) {
    const Lock lock(state().mutex);
    long count = 0;
    for (const auto& [name, calls] : state().calls)
        if (!call || name == call) count += calls;
    return count;
}

long edgeyolo_fake_faults_hit(void) {
    const Lock lock(state().mutex);
    return state().faults_hit;
}

long edgeyolo_fake_live(const char* kind) {
    const Lock lock(state().mutex);
    return live_objects(kind);
}

unsigned long long edgeyolo_fake_memory(int ordinal) {
    const Lock lock(state().mutex);
    return device(ordinal).used;
}

unsigned long long edgeyolo_fake_peak_memory(int ordinal) {
    const Lock lock(state().mutex);
    return device(ordinal).peak;
}

long edgeyolo_fake_operations(int ordinal) {
    const Lock lock(state().mutex);
    return device(ordinal).operations;
}

long edgeyolo_fake_violations(void) {
    const Lock lock(state().mutex);
    return static_cast<long>(state().violations.size());
}

long edgeyolo_fake_violation_text(char* text, long size) {
    const Lock lock(state().mutex);
    std::string all;
    for (const std::string& line : state().violations) all += line + "\n";
    if (size > 0) {
        const std::size_t length = std::min(all.size(), static_cast<std::size_t>(size) - 1);
        std::memcpy(text, all.data(), length);
        text[length] = 0;
    }
    return static_cast<long>(all.size());
}

void edgeyolo_fake_clear_violations(void) {
    const Lock lock(state().mutex);
    state().violations.clear();
}
}
