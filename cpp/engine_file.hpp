// An engine file: a TensorRT plan, usually behind the header that Ultralytics writes:
//     4 bytes   length n of the text, little-endian, signed
//     n bytes   a JSON object in UTF-8; ours under the key "edgeyolo"
//     the rest  the plan
// n counts bytes. A bare plan loads too. How the two are told apart:
//     n is 1 ... size - 4, the text is a JSON object     header
//     n is 1 ... size - 4, the text is other JSON        EngineError
//     the fifth byte is '{' and anything else is wrong   EngineError: a damaged header (n <= 0, n beyond the file,
//                                                        broken JSON)
//     all else                                           a bare plan; it starts with letters, a length beyond the file
// The core does not read the object: it proves that there is one and hands the text on.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace edgeyolo {

class EngineFile {
public:
    // The file is read, not mapped: a file that is cut while it is mapped ends the process by SIGBUS, and the digest
    // must be that of the bytes that are loaded. Throws EngineError.
    static EngineFile read(const std::string& path);
    // `path` only names the file in messages.
    static EngineFile parse(std::vector<std::uint8_t> bytes, std::string path);

    const std::string& path() const { return path_; }
    // The JSON text; empty when the file is a bare plan.
    std::string_view header() const;
    const std::uint8_t* plan() const { return bytes_.data() + plan_at_; }
    std::size_t plan_size() const { return bytes_.size() - plan_at_; }  // never 0
    // SHA-256 of the plan alone, so that it stays when the header is rewritten.
    std::string plan_digest() const;

private:
    EngineFile() = default;

    std::string path_;
    std::vector<std::uint8_t> bytes_;
    std::size_t plan_at_ = 0;
};

}  // namespace edgeyolo
