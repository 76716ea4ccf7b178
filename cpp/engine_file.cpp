#include "engine_file.hpp"
#include <sys/stat.h>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include "error.hpp"
#include "json_scan.hpp"
#include "sha256.hpp"

namespace edgeyolo {
namespace {

constexpr std::size_t length_bytes = 4;

struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
};

[[noreturn]] void fail(const std::string& path, const std::string& what) {
    throw EngineError("cannot use the engine file '" + path + "': " + what);
}

// Two's complement by hand: the same on every machine, and no shift of a signed number.
std::int64_t signed_length(const std::uint8_t* p) {
    const std::uint32_t raw =
        std::uint32_t{p[0]} | std::uint32_t{p[1]} << 8 | std::uint32_t{p[2]} << 16 | std::uint32_t{p[3]} << 24;
    return raw < 0x80000000u ? std::int64_t{raw} : std::int64_t{raw} - (std::int64_t{1} << 32);
}

// Bytes of the header's text, 0 for a bare plan.
std::size_t header_length(const std::vector<std::uint8_t>& bytes, const std::string& path) {
    if (bytes.size() <= length_bytes)
        fail(path, "expected a TensorRT plan, found " + std::to_string(bytes.size()) + " bytes. Export it again");
    const std::int64_t length = signed_length(bytes.data());
    const std::size_t rest = bytes.size() - length_bytes;
    const bool brace = bytes[length_bytes] == '{';
    if (length <= 0 || static_cast<std::size_t>(length) > rest) {
        if (brace)
            fail(path, "its header claims " + std::to_string(length) + " bytes and " + std::to_string(rest) +
                           " follow: the file is cut short or damaged. Copy or export it again");
        return 0;
    }
    const auto size = static_cast<std::size_t>(length);
    const JsonScan scan = scan_json({reinterpret_cast<const char*>(bytes.data()) + length_bytes, size});
    if (scan.kind == JsonKind::other)
        fail(path, "expected a JSON object as its header, found another kind of JSON. Export it again");
    if (scan.kind == JsonKind::invalid) {
        if (brace)
            fail(path, "its header is no valid JSON, the first mistake is at byte " + std::to_string(scan.error_at) +
                           " of " + std::to_string(size) + ". Export it again");
        return 0;
    }
    if (size == rest) fail(path, "it ends after its header and holds no plan. Copy or export it again");
    return size;
}

}  // namespace

EngineFile EngineFile::read(const std::string& path) {
    const std::unique_ptr<std::FILE, Closer> file(std::fopen(path.c_str(), "rb"));
    if (!file) fail(path, std::strerror(errno));
    struct stat status{};
    if (fstat(fileno(file.get()), &status) != 0) fail(path, std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail(path, "expected a file, found something else (a folder, a pipe, a device)");
    std::vector<std::uint8_t> bytes;
    try {
        bytes.resize(static_cast<std::size_t>(status.st_size));
    } catch (const std::exception&) {  // bad_alloc, or length_error for an absurd size
        fail(path, "no memory for its " + std::to_string(status.st_size) + " bytes");
    }
    const std::size_t got = std::fread(bytes.data(), 1, bytes.size(), file.get());
    if (got != bytes.size())
        fail(path, "expected " + std::to_string(bytes.size()) + " bytes, read " + std::to_string(got) +
                       ". Is it still being written?");
    return parse(std::move(bytes), path);
}

EngineFile EngineFile::parse(std::vector<std::uint8_t> bytes, std::string path) {
    EngineFile file;
    const std::size_t header = header_length(bytes, path);
    file.path_ = std::move(path);
    file.bytes_ = std::move(bytes);
    file.plan_at_ = header ? length_bytes + header : 0;
    return file;
}

std::string_view EngineFile::header() const {
    if (plan_at_ == 0) return {};
    return {reinterpret_cast<const char*>(bytes_.data()) + length_bytes, plan_at_ - length_bytes};
}

std::string EngineFile::plan_digest() const {
    return sha256(plan(), plan_size());
}

}  // namespace edgeyolo
