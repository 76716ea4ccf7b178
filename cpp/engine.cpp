#include "engine.hpp"

namespace edgeyolo {

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::float32: return "float32";
        case DType::float16: return "float16";
        case DType::bfloat16: return "bfloat16";
        case DType::int8: return "int8";
        case DType::uint8: return "uint8";
        case DType::int32: return "int32";
        case DType::int64: return "int64";
        case DType::boolean: return "bool";
        case DType::other: break;
    }
    return "other";
}

std::string shape_text(const Shape& shape) {
    std::string text = "(";
    for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace edgeyolo
