// Host twins of the GPU kernels, for the simulated driver. A launch runs the twin on a worker thread, when its stream
// gets there.
#pragma once
#include <cstddef>
#include <vector>

namespace edgeyolo::fake {

// What cuModuleLoadData of the simulated driver accepts besides a real fatbin: this text, then one kernel name a line,
// ended by a NUL. The core embeds it when it is built without nvcc; a real driver refuses it.
constexpr char image_magic[] = "EDGEYOLO-SIMULATED-KERNELS\n";

struct Dim {
    unsigned x, y, z;
};

// Simulated device memory, as a running kernel sees it.
class Memory {
public:
    // The host address of `bytes` bytes at device address `pointer`. Memory that is freed, out of bounds, of another
    // device or of the host ends the launch as an illegal address does on a GPU (by an exception: let it pass).
    virtual void* host(unsigned long long pointer, std::size_t bytes) const = 0;
    template <class T>
    T* at(unsigned long long pointer, std::size_t count) const {
        return static_cast<T*>(host(pointer, count * sizeof(T)));
    }

protected:
    ~Memory() = default;
};

// params[i] points at a copy of the i-th parameter, param_sizes[i] bytes. The twin does the work of the whole grid.
using Twin = void (*)(Dim grid, Dim block, unsigned shared, void** params, const Memory& memory);

// Value of a parameter: param<float>(params, 2).
template <class T>
T param(void** params, int index) {
    return *static_cast<T*>(params[index]);
}

// For twins that are linked into the simulated driver.
void register_twin(const char* name, Twin twin, const std::vector<std::size_t>& param_sizes);

}  // namespace edgeyolo::fake

// For twins of another library (the test TensorRT), found by dlsym in the simulated driver. The name is copied.
extern "C" __attribute__((visibility("default"))) void edgeyolo_fake_register_twin(const char* name,
                                                                                   edgeyolo::fake::Twin twin,
                                                                                   const std::size_t* param_sizes,
                                                                                   std::size_t param_count);
