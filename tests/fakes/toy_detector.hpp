// The network of the test TensorRT: a detector whose boxes are computed from the pixels, so that a result proves which
// picture was processed. The same formulas make the kernels (nvinfer_kernels.cu) and their twins (nvinfer_twins.cpp).
#pragma once
#include "half_math.hpp"

namespace edgeyolo::toy {

enum Kind : std::int32_t {
    raw = 0,
    raw_transposed = 1,
    yolov5 = 2,
    end2end = 3,
    dynamic_rows = 4
};

constexpr float row_threshold = 0.25f;  // dynamic_rows keeps the anchors above it

// Passed by value to every kernel.
struct HeadArgs {
    std::int32_t batch, height, width;
    std::int32_t input_half, output_half;
    std::int32_t kind, classes;
    std::int32_t strides[3];  // 0 ends the list
    std::int32_t anchors;     // of all strides together
    std::int32_t rows;        // end2end
    std::int32_t steps;       // that must have run before the head, else every score is 0
    float noise;              // times the number of earlier runs, added to every box
    float bias;               // added to every box
};

// Words of a context's scratch memory.
enum Scratch {
    step_count = 0,
    run_count = 1,
    row_count = 2,
    aux_count = 3,
    scratch_words = 64
};

struct Anchor {
    float cx, cy, w, h, score;  // pixels of the input; score 0..1
    int best;                   // class
};

EDGEYOLO_HD inline int anchors_of(int height, int width, int stride) {
    return (height / stride) * (width / stride);
}

template <class In>
EDGEYOLO_HD inline Anchor anchor(const In* image, const HeadArgs& args, float shift, bool complete, int index) {
    int stride = args.strides[0];
    int rest = index;
    for (int level = 0; level + 1 < 3 && rest >= anchors_of(args.height, args.width, stride); ++level) {
        rest -= anchors_of(args.height, args.width, stride);
        stride = args.strides[level + 1];
    }
    const int columns = args.width / stride;
    const int x = rest % columns * stride + stride / 2;
    const int y = rest / columns * stride + stride / 2;
    const int plane = args.height * args.width;
    const In* pixel = image + y * args.width + x;
    const float r = load_float(pixel);
    const float g = load_float(pixel + plane);
    const float b = load_float(pixel + 2 * plane);

    const float high = r > g ? (r > b ? r : b) : (g > b ? g : b);
    const float low = r < g ? (r < b ? r : b) : (g < b ? g : b);
    const auto size = static_cast<float>(stride);
    Anchor a;
    a.cx = static_cast<float>(x) + (r - 0.5f) * size + shift;
    a.cy = static_cast<float>(y) + (g - 0.5f) * size;
    a.w = size * (1.0f + 3.0f * b);
    a.h = size * (1.0f + 3.0f * r);
    a.score = complete ? high - low : 0.0f;  // grey, padding too, is no object
    a.best = (static_cast<int>(r * 7.99f) + 8 * static_cast<int>(g * 7.99f) + 64 * static_cast<int>(b * 7.99f)) %
             args.classes;
    return a;
}

// A class that is not the best one gets a third of the best score or nothing.
EDGEYOLO_HD inline float class_score(const Anchor& a, int index, int cls) {
    return cls == a.best ? a.score : (cls + index) % 3 == 0 ? a.score * 0.25f : 0.0f;
}

template <class Out>
EDGEYOLO_HD inline void write_row(Out* row, const Anchor& a) {
    store_float(row + 0, a.cx - a.w * 0.5f);
    store_float(row + 1, a.cy - a.h * 0.5f);
    store_float(row + 2, a.cx + a.w * 0.5f);
    store_float(row + 3, a.cy + a.h * 0.5f);
    store_float(row + 4, a.score);
    store_float(row + 5, static_cast<float>(a.best));
}

// What thread `index` of picture `image_index` writes. It covers max(anchors, rows) threads per picture.
template <class In, class Out>
EDGEYOLO_HD inline void head_thread(const In* input, Out* output, const std::uint32_t* scratch, const HeadArgs& args,
                                    int image_index, int index) {
    const In* image = input + static_cast<std::int64_t>(image_index) * 3 * args.height * args.width;
    const bool complete = scratch[step_count] == static_cast<std::uint32_t>(args.steps);
    const float shift = args.bias + args.noise * static_cast<float>(scratch[run_count]);

    if (args.kind == end2end || args.kind == dynamic_rows) {
        const bool fixed = args.kind == end2end;
        Out* rows = output + static_cast<std::int64_t>(image_index) * args.rows * 6;
        if (fixed && index >= args.anchors && index < args.rows)
            for (int i = 0; i < 6; ++i) store_float(rows + index * 6 + i, 0.0f);
        if (index >= args.anchors) return;
        const Anchor a = anchor(image, args, shift, complete, index);
        if (!fixed && !(a.score > row_threshold)) return;
        // Best first, or in the order of the anchors: the place is counted, so that no order of threads matters.
        int place = 0;
        for (int other = 0; other < args.anchors; ++other) {
            const float score = anchor(image, args, shift, complete, other).score;
            if (fixed ? score > a.score || (score == a.score && other < index) : score > row_threshold && other < index)
                ++place;
        }
        if (!fixed || place < args.rows) write_row(rows + place * 6, a);
        return;
    }

    if (index >= args.anchors) return;
    const Anchor a = anchor(image, args, shift, complete, index);
    const int first = args.kind == yolov5 ? 5 : 4;
    const int channels = first + args.classes;
    Out* picture = output + static_cast<std::int64_t>(image_index) * channels * args.anchors;
    Out* place = args.kind == raw ? picture + index : picture + static_cast<std::int64_t>(index) * channels;
    const int step = args.kind == raw ? args.anchors : 1;
    store_float(place, a.cx);
    store_float(place + step, a.cy);
    store_float(place + 2 * step, a.w);
    store_float(place + 3 * step, a.h);
    if (args.kind == yolov5) store_float(place + 4 * step, 0.875f);
    for (int cls = 0; cls < args.classes; ++cls) store_float(place + (first + cls) * step, class_score(a, index, cls));
}

}  // namespace edgeyolo::toy
