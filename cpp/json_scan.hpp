// Checks JSON (RFC 8259) without building anything: the core carries a header's text, Python reads it.
#pragma once
#include <cstddef>
#include <string_view>

namespace edgeyolo {

enum class JsonKind {
    object,
    other,
    invalid
};

struct JsonScan {
    JsonKind kind = JsonKind::invalid;
    std::size_t error_at = 0;  // byte of the first mistake when invalid
};
// Strict: UTF-8, no NaN, no comments, no trailing comma, nothing after the value, at most 64 levels deep.
JsonScan scan_json(std::string_view text);

}  // namespace edgeyolo
