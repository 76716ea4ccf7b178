// The plan format of the test TensorRT: lines of text, one key each. Written by make_plan.py.
//     edgeyolo toy plan 1                    the first line
//     name toy
//     tensorrt 10                            the major that "built" it; absent: any
//     input images float32 1 3 640 640      -1 for a dynamic dimension; the input has 3 channels
//     profile 1 3 320 320 1 3 640 640 1 3 1280 1280     min, opt, max; one line per profile
//     output output0 float32 raw 80         raw, raw_transposed, yolov5, end2end, dynamic_rows; number of classes
//     strides 8 16 32
//     rows 300                              end2end: rows of the output
//     kernels 1                             launches per run besides the head, each checked by the head
//     busy 300                              microseconds that one more kernel takes
//     warmups 2                             runs after a change of shape that allocate memory
//     aux_streams 1
//     scratch 4096                          bytes of scratch memory per context
//     streamable 1000000                     bytes of weights that can be streamed
//     budget 0                               bytes of them that stay on the device; absent: all
//     option NAME ...                       faults, see known_options
#pragma once
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>
#include "toy_detector.hpp"

namespace edgeyolo::toy {

inline const std::set<std::string> known_options{
    "refuse_load",        "error_load",  // error: it is logged, and the call succeeds all the same
    "refuse_context",     "error_context",     "refuse_enqueue", "error_enqueue",
    "refuse_capture",  // enqueue while the stream captures
    "empty_capture",   // enqueue succeeds while capturing and launches nothing
    "differs_in_capture", "differs_in_warmup", "host_sync",      "allocate",  // inside every enqueue
    "nondeterministic",   "refuse_execute"};

struct Plan {
    struct Profile {
        std::vector<std::int64_t> shapes[3];  // min, opt, max
    };
    std::string name = "toy";
    int major = 0;
    std::string input_name, output_name;
    bool input_half = false, output_half = false;
    std::vector<std::int64_t> input;
    std::vector<Profile> profiles;
    Kind kind = raw;
    int classes = 0;
    int rows = 300;
    std::vector<int> strides{32};
    int kernels = 1;
    int busy = 0;
    int warmups = 0;
    int aux_streams = 0;
    std::int64_t scratch = 4096;
    std::int64_t streamable = 0;
    std::int64_t budget = -1;       // -1: all of it, no streaming
    std::set<std::string> options;  // some of known_options

    bool is(const char* option) const { return options.count(option) != 0; }
    bool dynamic() const {
        for (const auto size : input)
            if (size < 0) return true;
        return false;
    }
    int anchors(std::int64_t height, std::int64_t width) const {
        int sum = 0;
        for (const int stride : strides) sum += anchors_of(static_cast<int>(height), static_cast<int>(width), stride);
        return sum;
    }
};

// The words of one line. Not a std::istringstream: where the compiler links libstdc++ statically, as some images set it up,
// its locales do not work in a library that a process opens late.
class Words {
public:
    explicit Words(const std::string& line) : line_(line) {}

    // Empty at the end of the line.
    std::string next() {
        at_ = std::min(line_.find_first_not_of(" \t\r", at_), line_.size());
        const std::size_t end = std::min(line_.find_first_of(" \t\r", at_), line_.size());
        const std::string word = line_.substr(at_, end - at_);
        at_ = end;
        return word;
    }
    template <class Number = int>
    Number number() {
        const std::string word = next();
        Number value{};
        const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
        if (word.empty() || error != std::errc{} || end != word.data() + word.size())
            throw std::runtime_error("cannot read: " + line_);
        return value;
    }
    std::vector<std::int64_t> numbers() {
        std::vector<std::int64_t> values;
        while (line_.find_first_not_of(" \t\r", at_) != std::string::npos) values.push_back(number<std::int64_t>());
        return values;
    }

private:
    const std::string& line_;
    std::size_t at_ = 0;
};

// Throws std::runtime_error.
inline Plan parse_plan(const std::string& text) {
    Plan plan;
    bool first = true;
    for (std::size_t begin = 0; begin < text.size() || first;) {
        const std::size_t end = std::min(text.find('\n', begin), text.size());
        const std::string line = text.substr(begin, end - begin);
        begin = end + 1;
        if (std::exchange(first, false)) {
            if (line != "edgeyolo toy plan 1") throw std::runtime_error("the magic tag does not match");
            continue;
        }
        Words words(line);
        const std::string key = words.next();
        const auto half = [&] {
            const std::string word = words.next();
            if (word != "float32" && word != "float16") throw std::runtime_error("bad data type in: " + line);
            return word == "float16";
        };
        if (key.empty()) continue;
        if (key == "name")
            plan.name = words.next();
        else if (key == "tensorrt")
            plan.major = words.number();
        else if (key == "input") {
            plan.input_name = words.next();
            plan.input_half = half();
            plan.input = words.numbers();
            if (plan.input.size() != 4 || plan.input[1] != 3) throw std::runtime_error("bad shape in: " + line);
        } else if (key == "profile") {
            const auto values = words.numbers();
            if (values.size() != 12) throw std::runtime_error("12 numbers expected in: " + line);
            Plan::Profile profile;
            for (std::size_t i = 0; i < 12; ++i) profile.shapes[i / 4].push_back(values[i]);
            plan.profiles.push_back(profile);
        } else if (key == "output") {
            plan.output_name = words.next();
            plan.output_half = half();
            const std::vector<std::string> kinds{"raw", "raw_transposed", "yolov5", "end2end", "dynamic_rows"};
            const auto kind = std::find(kinds.begin(), kinds.end(), words.next());
            if (kind == kinds.end()) throw std::runtime_error("bad head in: " + line);
            plan.kind = static_cast<Kind>(kind - kinds.begin());
            plan.classes = words.number();
        } else if (key == "strides") {
            plan.strides.clear();
            for (const auto value : words.numbers()) plan.strides.push_back(static_cast<int>(value));
            if (plan.strides.empty() || plan.strides.size() > 3) throw std::runtime_error("bad strides: " + line);
        } else if (key == "rows")
            plan.rows = words.number();
        else if (key == "kernels")
            plan.kernels = words.number();
        else if (key == "busy")
            plan.busy = words.number();
        else if (key == "warmups")
            plan.warmups = words.number();
        else if (key == "aux_streams")
            plan.aux_streams = words.number();
        else if (key == "scratch")
            plan.scratch = words.number<std::int64_t>();
        else if (key == "streamable")
            plan.streamable = words.number<std::int64_t>();
        else if (key == "budget")
            plan.budget = words.number<std::int64_t>();
        else if (key == "option")
            for (std::string word = words.next(); !word.empty(); word = words.next()) {
                if (!known_options.count(word)) throw std::runtime_error("unknown option in: " + line);
                plan.options.insert(word);
            }
        else
            throw std::runtime_error("unknown key in: " + line);
    }
    if (plan.input.empty() || plan.output_name.empty() || plan.classes < 1)
        throw std::runtime_error("the plan is incomplete");
    if (plan.dynamic() && plan.profiles.empty()) throw std::runtime_error("a dynamic input needs a profile");
    if (!plan.dynamic()) plan.profiles = {{{plan.input, plan.input, plan.input}}};
    return plan;
}

}  // namespace edgeyolo::toy
