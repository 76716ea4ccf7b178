#include "graph_capture.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>

namespace edgeyolo {
namespace {

// A capture that did not work out, for a reason to be told. Never leaves this file.
struct Refused : EngineError {
    using EngineError::EngineError;
};

std::string with_words(std::string text, const FrameProgram& program) {
    const std::string words = program.last_errors();
    return words.empty() ? text : text + ": " + words;
}

cuda::Graph record(const cuda::Stream& stream, FrameProgram& program) {
    bool accepted = false;
    std::exception_ptr error;
    stream.begin_capture();
    try {
        accepted = program.enqueue(stream);
    } catch (...) {
        error = std::current_exception();
    }
    // On every path: a stream left in capture swallows all later work.
    cuda::Stream::Captured captured = stream.end_capture();
    if (error) std::rethrow_exception(error);
    if (!accepted) throw Refused(with_words("the engine refused to be captured", program));
    stream.device()->check(captured.code, "cuStreamEndCapture");
    return std::move(captured.graph);
}

ProgramOutput run_eagerly(const cuda::Stream& stream, FrameProgram& program, unsigned seed) {
    program.prepare_check(stream, seed);
    if (!program.enqueue(stream)) throw Refused(with_words("the engine refused to run in the self-check", program));
    return program.read_check(stream);
}

// Largest difference of two lists of numbers; infinite where only one of them is a number.
double distance(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return HUGE_VAL;
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (std::isnan(a[i]) && std::isnan(b[i])) continue;
        if (a[i] == b[i]) continue;  // infinities too
        const double difference = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
        largest = std::isnan(difference) ? HUGE_VAL : std::max(largest, difference);
    }
    return largest;
}

// A refused enqueue leaves a graph that replays old results without an error, so the replay has to show that it
// computes: two pictures, outputs overwritten first, eager twice and replay once.
std::string self_check(const cuda::Stream& stream, FrameProgram& program, const cuda::GraphExec& exec) {
    std::string note;
    for (const unsigned seed : {1u, 2u}) {
        const ProgramOutput first = run_eagerly(stream, program, seed);
        const ProgramOutput second = run_eagerly(stream, program, seed);
        program.prepare_check(stream, seed);
        exec.launch(stream);
        const ProgramOutput replayed = program.read_check(stream);
        if (first.exact == second.exact) {
            if (replayed.exact != first.exact) throw Refused("the graph's results differ from the engine's");
            continue;
        }
        // Two eager runs span what this engine varies by; a replay of something else is far outside of it.
        constexpr double margin = 8;
        const double spread = distance(first.values, second.values);
        const double replay =
            std::min(distance(first.values, replayed.values), distance(second.values, replayed.values));
        if (!(spread < HUGE_VAL))
            throw Refused("two runs of the engine differ without bound: a replay cannot be checked");
        if (!(replay <= margin * spread))
            throw Refused("the graph's results differ from the engine's by " + std::to_string(replay) +
                          ", two runs of the engine by " + std::to_string(spread));
        note = "nondeterministic engine: two runs differ by up to " + std::to_string(spread);
    }
    return note;
}

CapturedGraph capture(const cuda::Stream& stream, FrameProgram& program) {
    // Twice: the first run after a change of shape allocates and chooses, and some engines do so in the second as well.
    for (int i = 0; i < 2; ++i)
        if (!program.enqueue(stream)) throw Refused(with_words("the engine refused to warm up", program));
    stream.synchronize();

    CapturedGraph result;
    const std::size_t free_before = cuda::memory_info(*stream.device()).free;
    const auto start = std::chrono::steady_clock::now();
    {
        const cuda::Graph graph = record(stream, program);
        result.nodes = graph.node_count();
        if (result.nodes == 0) throw Refused("the capture recorded nothing");
        result.exec = graph.instantiate();
    }
    result.exec.upload(stream);
    stream.synchronize();
    result.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    const std::size_t free_after = cuda::memory_info(*stream.device()).free;
    result.device_bytes = free_before > free_after ? free_before - free_after : 0;
    result.note = self_check(stream, program, result.exec);
    return result;
}

}  // namespace

std::mutex& capture_mutex() {
    static std::mutex& mutex = *new std::mutex;  // never destroyed: threads may still be closing down at exit
    return mutex;
}

std::optional<CapturedGraph> capture_graph(const cuda::Stream& stream, FrameProgram& program, std::string& reason) {
    try {
        return capture(stream, program);
    } catch (const cuda::DriverError& error) {
        if (error.fatal()) throw;
        reason = error.what();
    } catch (const Error& error) {
        reason = error.what();
    }
    // What a failed try left on the stream ends before its graph's memory is used for something else; a device that is
    // lost says so here.
    stream.synchronize();
    return std::nullopt;
}

}  // namespace edgeyolo
