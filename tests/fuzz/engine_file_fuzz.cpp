// libFuzzer target of the engine file's header. Ten minutes:
//     clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Icpp \
//         tests/fuzz/engine_file_fuzz.cpp cpp/engine_file.cpp cpp/json_scan.cpp cpp/sha256.cpp -o /tmp/engine_file_fuzz
//     mkdir -p /tmp/corpus && /tmp/engine_file_fuzz -max_total_time=600 -max_len=4096 /tmp/corpus tests/fuzz/corpus
// CI runs it for 20 seconds. A crash leaves its input beside the program: add it to tests/fuzz/corpus with the fix.
#include <cstdlib>
#include "engine_file.hpp"
#include "error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        const auto file = edgeyolo::EngineFile::parse({data, data + size}, "fuzz");
        const std::size_t header = file.header().empty() ? 0 : 4 + file.header().size();
        // What parse() promises; a broken promise is a finding.
        if (file.plan_size() == 0 || header + file.plan_size() != size) std::abort();
        if (file.plan() != nullptr && file.plan_digest().size() != 64) std::abort();
    } catch (const edgeyolo::EngineError&) {
    }
    return 0;
}
