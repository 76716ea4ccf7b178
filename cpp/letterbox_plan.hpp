// What the CPU letterbox works out once for a geometry: which source pixels each output column and row takes.
#pragma once
#include <vector>
#include "letterbox_kernels.hpp"
#include "letterbox_math.hpp"

namespace edgeyolo {

// How the pixels of a geometry are made; each gives what OpenCV gives.
enum class Method {
    pick,  // every weight is all or nothing: the same size, 3:1, 5:1, ...
    mean,  // exactly 2:1 on both axes
    blend
};

struct Plan {
    Size source;
    Size resized;
    int pixel_bytes = 0;
    Method method = Method::blend;
    std::vector<std::int32_t> offsets;  // see letterbox_kernels::Columns
    std::vector<std::int16_t> weights;
    int roomy = 0;
    std::vector<Taps> rows;

    letterbox_kernels::Columns columns() const {
        return {offsets.data(), weights.data(), resized.width, static_cast<int>(offsets.size()), roomy};
    }
    bool serves(Size from, Size to, int bytes) const { return source == from && resized == to && pixel_bytes == bytes; }
};

// `memory`: an older plan, whose vectors are used again.
Plan make_plan(Plan memory, Size source, Size resized, int pixel_bytes);

}  // namespace edgeyolo
