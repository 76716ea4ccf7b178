#include "simd.hpp"

namespace edgeyolo {

Isa best_isa() {
#if defined(__x86_64__)
    static const Isa isa = __builtin_cpu_supports("avx2") ? Isa::avx2 : Isa::scalar;
    return isa;
#elif defined(__aarch64__)
    return Isa::neon;  // part of every AArch64
#else
    return Isa::scalar;
#endif
}

std::vector<Isa> available_isas() {
    std::vector<Isa> isas{Isa::scalar};
    if (best_isa() != Isa::scalar) isas.push_back(best_isa());
    return isas;
}

const char* name(Isa isa) {
    switch (isa) {
        case Isa::avx2: return "avx2";
        case Isa::neon: return "neon";
        case Isa::scalar: break;
    }
    return "scalar";
}

}  // namespace edgeyolo
