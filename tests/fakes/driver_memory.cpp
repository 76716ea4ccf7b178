// Memory of the simulated devices: addresses that fault on the host, storage elsewhere, bounds and lifetime checked.
#include <sys/mman.h>
#include <cstring>

#include "driver_state.hpp"

namespace edgeyolo::fake {
namespace {

constexpr std::size_t arena_bytes = std::size_t{64} << 30;  // addresses only, never backed
constexpr std::size_t alignment = 512;
constexpr std::size_t gap = 4096;             // between allocations: running over the end is noticed
constexpr std::uint8_t fresh_content = 0xa5;  // uninitialised memory looks the same in every run

std::string hex(std::uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

std::unique_ptr<std::uint8_t[]> make_storage(std::size_t bytes) {
    std::unique_ptr<std::uint8_t[]> storage(new std::uint8_t[bytes]);
    std::memset(storage.get(), fresh_content, bytes);
    return storage;
}

// Addresses are never given twice, so that a stale pointer is always recognised.
DevicePtr take_address(Device& d, std::size_t bytes) {
    if (d.arena == 0) {
        void* range = mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED) return 0;
        d.arena = reinterpret_cast<DevicePtr>(range);
        d.next = d.arena + gap;
    }
    const std::size_t step = (bytes + gap + alignment - 1) / alignment * alignment;
    if (d.next + step > d.arena + arena_bytes) return 0;
    const DevicePtr address = (d.next + alignment - 1) / alignment * alignment;
    d.next = address + step;
    return address;
}

void count(Device& d, std::size_t bytes) {
    d.used += bytes;
    d.peak = std::max(d.peak, d.used);
}

}  // namespace

int allocate_device(int ordinal, std::size_t bytes, DevicePtr* pointer) {
    Device& d = device(ordinal);
    if (bytes == 0) return invalid_value;
    if (d.used + bytes > d.total) return out_of_memory;
    auto allocation = std::make_shared<Allocation>();
    allocation->address = take_address(d, bytes);
    if (allocation->address == 0) return out_of_memory;
    allocation->bytes = bytes;
    allocation->device = ordinal;
    allocation->storage = make_storage(bytes);
    count(d, bytes);
    state().memory[allocation->address] = allocation;
    *pointer = allocation->address;
    return ok;
}

int free_device(int ordinal, DevicePtr pointer) {
    const auto found = state().memory.find(pointer);
    if (found == state().memory.end() || found->second->pinned)
        return refuse(invalid_value, "cuMemFree of " + hex(pointer) + ", which is no allocation's begin");
    Allocation& allocation = *found->second;
    if (allocation.freed) return refuse(invalid_value, "cuMemFree of " + hex(pointer) + " twice");
    if (allocation.device != ordinal)
        violation("wrong context: memory of device " + std::to_string(allocation.device) + " freed while device " +
                  std::to_string(ordinal) + " is current");
    allocation.freed = true;
    device(allocation.device).used -= allocation.bytes;
    // The storage lives until the operations that are using it have ended; the entry stays, to recognise stale
    // pointers.
    auto tombstone = std::make_shared<Allocation>();
    tombstone->address = allocation.address;
    tombstone->bytes = allocation.bytes;
    tombstone->device = allocation.device;
    tombstone->freed = true;
    found->second = tombstone;
    return ok;
}

int allocate_pinned(int ordinal, std::size_t bytes, bool mapped, void** pointer) {
    if (bytes == 0) return invalid_value;
    auto allocation = std::make_shared<Allocation>();
    allocation->bytes = bytes;
    allocation->device = ordinal;
    allocation->pinned = true;
    allocation->storage = make_storage(bytes);
    if (mapped) {
        allocation->address = take_address(device(ordinal), bytes);
        if (allocation->address == 0) return out_of_memory;
        state().memory[allocation->address] = allocation;
    }
    state().pinned[reinterpret_cast<std::uintptr_t>(allocation->storage.get())] = allocation;
    *pointer = allocation->storage.get();
    return ok;
}

int free_pinned(void* pointer) {
    const auto found = state().pinned.find(reinterpret_cast<std::uintptr_t>(pointer));
    if (found == state().pinned.end())
        return refuse(invalid_value, "cuMemFreeHost of memory that is not pinned, or no longer");
    found->second->freed = true;
    if (found->second->address) {
        auto tombstone = std::make_shared<Allocation>();
        tombstone->address = found->second->address;
        tombstone->bytes = found->second->bytes;
        tombstone->device = found->second->device;
        tombstone->pinned = tombstone->freed = true;
        state().memory[tombstone->address] = tombstone;
    }
    state().pinned.erase(found);
    return ok;
}

AllocationRef find_pinned(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    auto next = state().pinned.upper_bound(address);
    if (next == state().pinned.begin()) return nullptr;
    --next;
    return address < next->first + next->second->bytes ? next->second : nullptr;
}

AllocationRef find_device(DevicePtr pointer) {
    auto next = state().memory.upper_bound(pointer);
    if (next == state().memory.begin()) return nullptr;
    --next;
    return pointer < next->first + next->second->bytes ? next->second : nullptr;
}

bool is_device_address(std::uint64_t address) {
    for (const auto& [ordinal, d] : state().devices)
        if (d.arena && address >= d.arena && address < d.arena + arena_bytes) return true;
    return false;
}

void* Access::host(DevicePtr pointer, std::size_t bytes) const {
    const Lock lock(state().mutex);
    const auto fail = [&](const std::string& why) {
        violation(what_ + " on device " + std::to_string(device_) + " touches " + std::to_string(bytes) + " bytes at " +
                  hex(pointer) + ": " + why);
        throw IllegalAddress{};
    };
    const AllocationRef allocation = find_device(pointer);
    if (!allocation) fail(is_device_address(pointer) ? "not allocated" : "not device memory");
    if (allocation->freed) fail("freed memory");
    if (allocation->device != device_) fail("memory of device " + std::to_string(allocation->device));
    const std::size_t offset = pointer - allocation->address;
    if (bytes > allocation->bytes - offset)
        fail("out of bounds of an allocation of " + std::to_string(allocation->bytes) + " bytes");
    keep(allocation);
    return allocation->storage.get() + offset;
}

bool Access::torn() const {
    for (const AllocationRef& allocation : kept_)
        if (allocation->freed) return true;
    return false;
}

}  // namespace edgeyolo::fake
