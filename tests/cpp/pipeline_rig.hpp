// What the pipeline's tests share: engines from a plan's text, pictures, and what the CPU's code makes of them. The toy
// network is computed on the host (toy_detector.hpp), letterbox and postprocessing by the CPU's kernels.
#pragma once
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>
#include "half_math.hpp"
#include "letterbox.hpp"
#include "pipeline.hpp"
#include "postprocess.hpp"
#include "toy_detector.hpp"
#include "toy_plan.hpp"
#include "trt_test.hpp"

namespace edgeyolo::test {

struct PlanText {
    std::string batch = "1";
    std::string size = "64 96";  // height, width
    std::string head = "raw";
    int classes = 3;
    std::string input = "float32";
    std::string output = "float32";
    std::string more;  // further lines

    std::string text() const {
        return "edgeyolo toy plan 1\nname net\ninput images " + input + " " + batch + " 3 " + size +
               "\noutput output0 " + output + " " + head + " " + std::to_string(classes) + "\nstrides 8\nrows 40\n" +
               more;
    }
};

inline const std::string dynamic_lines = "profile 1 3 32 32 1 3 64 64 1 3 416 416\n";
inline PlanText dynamic_text() {
    PlanText plan;
    plan.size = "-1 -1";
    plan.more = dynamic_lines;
    return plan;
}

inline EngineFile file_of(const std::string& plan) {
    return EngineFile::parse({plan.begin(), plan.end()}, "toy.engine");
}
inline std::shared_ptr<LoadedEngine> load(const PlanText& plan, int ordinal = 0) {
    return LoadedEngine::open(file_of(plan.text()), ordinal, options());
}

inline HeadKind head_kind(const std::string& name) {
    if (name == "raw_transposed") return HeadKind::raw_transposed;
    if (name == "yolov5") return HeadKind::yolov5;
    return name == "raw" ? HeadKind::raw : HeadKind::end2end;
}

inline PipelineOptions options_for(const PlanText& plan) {
    PipelineOptions result;
    result.head = head_kind(plan.head);
    result.classes = plan.classes;
    result.thresholds.conf = 0.3f;
    result.thresholds.iou = 0.5;
    result.thresholds.max_det = 50;
    return result;
}

// A picture that owns its pixels, of smooth blobs and noise: enough objects, not all of them overlapping.
struct Picture {
    std::vector<std::uint8_t> pixels;
    Size size;
    PixelFormat format = PixelFormat::bgr;
    ImageView view() const {
        const std::ptrdiff_t pixel = channels(format);
        return {pixels.data(), size, pixel * size.width, pixel, 1, format};
    }
};

inline Picture picture(Size size, unsigned seed, PixelFormat format = PixelFormat::bgr) {
    Picture result{{}, size, format};
    std::mt19937 random(seed * 2654435761u + 12345u);
    const std::uint8_t base[] = {static_cast<std::uint8_t>(random() >> 24), static_cast<std::uint8_t>(random() >> 24),
                                 static_cast<std::uint8_t>(random() >> 24), 255};
    const int count = channels(format);
    for (int y = 0; y < size.height; ++y)
        for (int x = 0; x < size.width; ++x)
            for (int c = 0; c < count; ++c)
                result.pixels.push_back(
                    static_cast<std::uint8_t>(base[c] + x * (c + 1) + y * (3 - c) + (random() >> 29)));
    return result;
}

template <class In, class Out>
std::vector<float> toy_output(const toy::HeadArgs& args, const std::vector<float>& planes, std::size_t elements) {
    std::vector<In> input(planes.size());
    for (std::size_t i = 0; i < planes.size(); ++i) store_float(&input[i], planes[i]);
    std::vector<Out> output(elements);
    std::vector<std::uint32_t> scratch(toy::scratch_words);
    scratch[toy::step_count] = static_cast<std::uint32_t>(args.steps);
    if (args.kind == toy::dynamic_rows) {  // as many rows as there are anchors above the network's threshold
        output.clear();
        for (int i = 0; i < args.anchors; ++i) {
            const toy::Anchor anchor = toy::anchor(input.data(), args, 0.f, true, i);
            if (!(anchor.score > toy::row_threshold)) continue;
            output.resize(output.size() + 6);
            toy::write_row(&output[output.size() - 6], anchor);
        }
    }
    const int threads = args.kind == toy::dynamic_rows ? 0 : std::max(args.anchors, args.rows);
    for (int i = 0; i < threads; ++i) toy::head_thread(input.data(), output.data(), scratch.data(), args, 0, i);
    std::vector<float> values;
    for (const Out& value : output) values.push_back(load_float(&value));
    return values;
}

// What the CPU's code finds in this picture.
inline Results expected(const PlanText& text, const ImageView& image, const PipelineOptions& wanted,
                        Size target = Size{96, 64}) {
    const toy::Plan plan = toy::parse_plan(text.text());
    const Letterbox geometry = fit(image.size, target);
    std::vector<float> planes(3 * static_cast<std::size_t>(target.width) * static_cast<std::size_t>(target.height));
    LetterboxWorkspace workspace;
    letterbox(image, geometry, planes.data(), workspace, Isa::scalar);

    toy::HeadArgs args{};
    args.batch = 1;
    args.height = target.height;
    args.width = target.width;
    args.kind = plan.kind;
    args.classes = plan.classes;
    for (std::size_t i = 0; i < plan.strides.size(); ++i) args.strides[i] = plan.strides[i];
    args.anchors = plan.anchors(target.height, target.width);
    args.rows = plan.rows;
    args.steps = plan.kernels;
    Head head{wanted.head, args.anchors, plan.classes};
    if (plan.kind == toy::end2end) head.rows = plan.rows;
    const std::size_t elements = element_count(head);
    std::vector<float> output = plan.input_half ? plan.output_half
                                                      ? toy_output<std::uint16_t, std::uint16_t>(args, planes, elements)
                                                      : toy_output<std::uint16_t, float>(args, planes, elements)
                                : plan.output_half ? toy_output<float, std::uint16_t>(args, planes, elements)
                                                   : toy_output<float, float>(args, planes, elements);
    if (plan.kind == toy::dynamic_rows) head.rows = static_cast<int>(output.size() / 6);
    Postprocessor postprocessor(wanted.thresholds);
    return postprocessor.run(output.data(), head, geometry, Isa::scalar)->results;
}

inline void expect_same(const Results& found, const Results& wanted, const std::string& what) {
    EXPECT_EQ(found.scores, wanted.scores) << what;
    EXPECT_EQ(found.class_ids, wanted.class_ids) << what;
    ASSERT_EQ(found.boxes.size(), wanted.boxes.size()) << what;
    if (found.boxes.empty()) return;
    EXPECT_EQ(std::memcmp(found.boxes.data(), wanted.boxes.data(), found.boxes.size() * sizeof(float)), 0) << what;
}

inline Results run(Pipeline& pipeline, const Frame& frame, const SubmitOptions& how = {}) {
    return pipeline.wait(pipeline.submit({frame}, how)).value().at(0);
}

}  // namespace edgeyolo::test
