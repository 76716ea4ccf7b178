#include "decode.hpp"

#include <algorithm>
#include <array>
#include <string>
#include "decode_kernels.hpp"
#include "error.hpp"

namespace edgeyolo {
namespace {

// Anchors per pass over the class rows of a raw head: 80 classes of a block are 160 KiB, so the survivors' class
// look-up finds them in the second-level cache.
constexpr int block_size = 512;

struct Sink {
    const DecodeParams& params;
    Candidates& out;

    void add(const Box& box, float score, int class_id, int row) const {
        if (params.allowed && !params.allowed[class_id]) return;
        if (is_box(box)) out.push(box, score, class_id, row);
    }
};

// The lowest class whose score, times `factor`, is `best`. One has it: `best` was computed from them.
int class_of(const float* scores, std::size_t stride, float factor, float best) {
    int c = 0;
    while (scores[static_cast<std::size_t>(c) * stride] * factor != best) ++c;
    return c;
}

void decode_raw(const float* data, const Head& head, const Sink& sink, const DecodeKernels& kernels) {
    const auto stride = static_cast<std::size_t>(head.rows);
    const float* scores = data + 4 * stride;
    std::array<float, block_size> best;
    for (int first = 0; first < head.rows; first += block_size) {
        const int count = std::min(block_size, head.rows - first);
        kernels.column_max(scores + first, stride, head.classes, count, best.data());
        for (int i = 0; i < count; ++i) {
            const float score = best[static_cast<std::size_t>(i)];
            if (!is_candidate(score, sink.params.conf)) continue;
            const int row = first + i;
            const float* box = data + row;
            sink.add(corners(box[0], box[stride], box[2 * stride], box[3 * stride]), score,
                     class_of(scores + row, stride, 1.f, score), row);
        }
    }
}

void decode_transposed(const float* data, const Head& head, const Sink& sink, const DecodeKernels& kernels) {
    for (int row = 0; row < head.rows; ++row, data += 4 + head.classes) {
        const float* scores = data + 4;
        const float score = kernels.row_max(scores, head.classes);
        if (!is_candidate(score, sink.params.conf)) continue;
        sink.add(corners(data[0], data[1], data[2], data[3]), score, class_of(scores, 1, 1.f, score), row);
    }
}

// The product of a positive factor and the highest class is the highest product: rounding keeps the order.
void decode_yolov5(const float* data, const Head& head, const Sink& sink, const DecodeKernels& kernels) {
    for (int row = 0; row < head.rows; ++row, data += 5 + head.classes) {
        const float objectness = data[4];
        if (!(objectness > sink.params.conf)) continue;
        const float* scores = data + 5;
        const float score = objectness * kernels.row_max(scores, head.classes);
        if (!is_candidate(score, sink.params.conf)) continue;
        sink.add(corners(data[0], data[1], data[2], data[3]), score, class_of(scores, 1, objectness, score), row);
    }
}

void decode_end2end(const float* data, const Head& head, const Sink& sink) {
    for (int row = 0; row < head.rows; ++row, data += 6) {
        if (!is_candidate(data[4], sink.params.conf) || !is_class_id(data[5], head.classes)) continue;
        sink.add({data[0], data[1], data[2], data[3]}, data[4], static_cast<int>(data[5]), row);
    }
}

}  // namespace

std::size_t element_count(const Head& head) {
    if (head.rows < 0 || head.classes < 1)
        throw InvalidInput("a head needs 0 or more rows and at least one class, found " + std::to_string(head.rows) +
                           " rows and " + std::to_string(head.classes) + " classes");
    const auto rows = static_cast<std::size_t>(head.rows);
    const auto classes = static_cast<std::size_t>(head.classes);
    switch (head.kind) {
        case HeadKind::raw:
        case HeadKind::raw_transposed: return rows * (4 + classes);
        case HeadKind::yolov5: return rows * (5 + classes);
        case HeadKind::end2end: break;
    }
    return rows * 6;
}

void Candidates::clear() {
    for (auto* column : {&x1, &y1, &x2, &y2, &score}) column->clear();
    class_id.clear();
    index.clear();
}

void Candidates::push(const Box& box, float confidence, std::int32_t cls, std::int32_t row) {
    x1.push_back(box.x1);
    y1.push_back(box.y1);
    x2.push_back(box.x2);
    y2.push_back(box.y2);
    score.push_back(confidence);
    class_id.push_back(cls);
    index.push_back(row);
}

void decode(const float* data, const Head& head, const DecodeParams& params, Candidates& out, Isa isa) {
    element_count(head);  // refuses a bad head
    const DecodeKernels& kernels = decode_kernels(isa);
    out.clear();
    const Sink sink{params, out};
    switch (head.kind) {
        case HeadKind::raw: return decode_raw(data, head, sink, kernels);
        case HeadKind::raw_transposed: return decode_transposed(data, head, sink, kernels);
        case HeadKind::yolov5: return decode_yolov5(data, head, sink, kernels);
        case HeadKind::end2end: return decode_end2end(data, head, sink);
    }
}

}  // namespace edgeyolo
