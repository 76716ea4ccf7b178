// SHA-256 (FIPS 180-4), for the digest that ties a manifest to the plan it describes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace edgeyolo {

// 64 lower-case hexadecimal digits.
std::string sha256(const std::uint8_t* data, std::size_t size);

}  // namespace edgeyolo
