// Which instruction set the CPU kernels use. Chosen once, at run time, by function pointer: an ifunc (target_clones)
// would crash under ThreadSanitizer, and -march flags would make a wheel that some machines cannot run.
#pragma once
#include <vector>

namespace edgeyolo {

enum class Isa {
    scalar,
    avx2,
    neon
};

// The best instruction set of this machine.
Isa best_isa();
// All that this machine can run, scalar first: tests compare each with the scalar reference.
std::vector<Isa> available_isas();
const char* name(Isa isa);

}  // namespace edgeyolo
