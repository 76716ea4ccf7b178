// Network output -> one key per anchor (0 where it is no candidate), and the box and class of the candidates.
//
// Each anchor writes its own place, so there is no counter, no atomic and no capacity: whatever the blocks' order, and
// whatever the number of candidates, the result is the same. NMS collects the keys that are not 0.
// End-to-end heads, already suppressed and ordered by the network, go straight to the result buffer.
#include "candidate_math.hpp"

namespace edgeyolo {
namespace {

constexpr unsigned all_lanes = 0xffffffffu;

// The best class so far. A NaN score is never above another, so it counts as none.
struct Best {
    float score;
    int class_id;
    __device__ void see(float other_score, int other_class) {
        if (other_score > score) {
            score = other_score;
            class_id = other_class;
        }
    }
};
__device__ Best no_class() {
    return {-INFINITY, 0};
}

template <class T>
struct DecodeArgs {
    const FrameBlock* block;
    const T* head;
    int anchors;
    int classes;
    std::uint64_t* keys;        // (anchors)
    Box* boxes;                 // (anchors), input pixels; written for candidates only
    std::int32_t* classes_out;  // (anchors), alike
};

// box_stride: elements between the four numbers of the box.
template <class T>
__device__ void write_anchor(const DecodeArgs<T>& args, int anchor, const Best& best, const T* box_data,
                             std::int64_t box_stride) {
    std::uint64_t key = 0;
    if (is_candidate(best.score, args.block->conf) && class_allowed(*args.block, best.class_id)) {
        const Box box = corners(load_float(box_data), load_float(box_data + box_stride),
                                load_float(box_data + 2 * box_stride), load_float(box_data + 3 * box_stride));
        if (is_box(box)) {
            key = candidate_key(best.score, anchor);
            args.boxes[anchor] = box;
            args.classes_out[anchor] = best.class_id;
        }
    }
    args.keys[anchor] = key;
}

// Raw head (4 + classes, anchors): a block takes 32 anchors, and each of its 8 warps a slice of the classes, so that
// 8400 anchors fill the chip. Loads go 16 classes at a time to have them in flight together.
constexpr int slices = 8;
constexpr int in_flight = 16;

template <class T>
__device__ void decode_columns(const DecodeArgs<T>& args) {
    __shared__ Best found[slices][32];
    const int lane = static_cast<int>(threadIdx.x);
    const int slice = static_cast<int>(threadIdx.y);
    const int anchor = static_cast<int>(blockIdx.x) * 32 + lane;
    const std::int64_t stride = args.anchors;
    const int per_slice = (args.classes + slices - 1) / slices;
    const int begin = slice * per_slice;
    const int end = begin + per_slice < args.classes ? begin + per_slice : args.classes;
    Best best = no_class();
    if (anchor < args.anchors) {
        const T* scores = args.head + 4 * stride + anchor;
        for (int first = begin; first < end; first += in_flight) {
            float batch[in_flight];
#pragma unroll
            for (int i = 0; i < in_flight; ++i)
                batch[i] = first + i < end ? load_float(scores + (first + i) * stride) : -INFINITY;
#pragma unroll
            for (int i = 0; i < in_flight; ++i) best.see(batch[i], first + i);
        }
    }
    found[slice][lane] = best;
    __syncthreads();
    if (slice != 0 || anchor >= args.anchors) return;
    // In the order of the classes, so that the lowest of equal ones wins.
#pragma unroll
    for (int i = 1; i < slices; ++i) best.see(found[i][lane].score, found[i][lane].class_id);
    write_anchor(args, anchor, best, args.head + anchor, stride);
}

// Heads with one row per anchor, (anchors, 4 + classes) or with objectness (anchors, 5 + classes): one warp per anchor.
constexpr int warps = 8;

template <class T>
__device__ void decode_rows(const DecodeArgs<T>& args, bool objectness) {
    const int lane = static_cast<int>(threadIdx.x);
    const int anchor = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.y);
    if (anchor >= args.anchors) return;  // whole warps
    const int before = objectness ? 5 : 4;
    const T* row = args.head + static_cast<std::int64_t>(anchor) * (before + args.classes);
    const float factor = objectness ? load_float(row + 4) : 1.f;
    Best best = no_class();
    // An anchor whose objectness is not above conf is no candidate, as on the CPU, even if a class score is above 1.
    if (!objectness || factor > args.block->conf) {
#pragma unroll 4
        for (int c = lane; c < args.classes; c += 32) best.see(factor * load_float(row + before + c), c);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
        const float score = __shfl_xor_sync(all_lanes, best.score, distance);
        const int class_id = __shfl_xor_sync(all_lanes, best.class_id, distance);
        if (score > best.score || (score == best.score && class_id < best.class_id)) best = {score, class_id};
    }
    if (lane == 0) write_anchor(args, anchor, best, row, 1);
}

// One row of an end-to-end head; its key is 0 when it does not pass.
struct EndRow {
    std::uint64_t key = 0;
    Box box{};
    int class_id = 0;
};

template <class T>
__device__ EndRow end_row(const FrameBlock& block, const T* head, int rows_in, int classes, int index) {
    EndRow found;
    if (index >= rows_in) return found;
    const T* row = head + static_cast<std::int64_t>(index) * 6;
    found.box = {load_float(row), load_float(row + 1), load_float(row + 2), load_float(row + 3)};
    const float score = load_float(row + 4);
    const float class_value = load_float(row + 5);
    if (!is_candidate(score, block.conf) || !is_class_id(class_value, classes) || !is_box(found.box)) return found;
    found.class_id = static_cast<int>(class_value);
    if (class_allowed(block, found.class_id)) found.key = candidate_key(score, index);
    return found;
}

// End-to-end head (rows_in, 6): one block, 1024 rows at a time, best first. A row's place is the number of rows with a
// higher key: networks give a few hundred rows, for which counting is faster than sorting.
template <class T>
__device__ void end2end(const FrameBlock* block, const T* head, int rows_in, int classes, void* result, int rows) {
    if (rows == 0) return;  // the empty launch that loads the kernel
    __shared__ std::uint64_t keys[1024];
    __shared__ int warp_counts[32];
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const ResultView out = result_view(result, rows);
    const int limit = result_limit(*block, rows);
    int found = 0;
    for (int own = 0; own < rows_in; own += 1024) {
        const EndRow row = end_row(*block, head, rows_in, classes, own + thread);
        const unsigned passing = __ballot_sync(all_lanes, row.key != 0);
        if (lane == 0) warp_counts[warp] = __popc(passing);
        int place = 0;
        for (int other = 0; other < rows_in; other += 1024) {
            keys[thread] = other == own ? row.key : end_row(*block, head, rows_in, classes, other + thread).key;
            __syncthreads();
            const int count = rows_in - other < 1024 ? rows_in - other : 1024;
            for (int i = 0; i < count; ++i) place += keys[i] > row.key ? 1 : 0;
            __syncthreads();  // keys are read before the next rows are written
        }
        for (int i = 0; i < 32; ++i) found += warp_counts[i];
        __syncthreads();  // so are warp_counts
        if (row.key != 0 && place < limit) {
            out.boxes[place] = source_box(*block, row.box);
            out.scores[place] = key_score(row.key);
            out.class_ids[place] = row.class_id;
        }
    }
    const int count = found < limit ? found : limit;
    for (int i = count + thread; i < rows; i += 1024) {
        out.boxes[i] = Box{0.f, 0.f, 0.f, 0.f};
        out.scores[i] = 0.f;
        out.class_ids[i] = 0;
    }
    if (thread == 0) *out.header = {count, found, {0, 0}};
}

}  // namespace
}  // namespace edgeyolo

extern "C" {

__global__ void __launch_bounds__(256)
    edgeyolo_decode_columns_f32(const edgeyolo::FrameBlock* block, const float* head, int anchors, int classes,
                                std::uint64_t* keys, edgeyolo::Box* boxes, std::int32_t* class_ids) {
    edgeyolo::decode_columns<float>({block, head, anchors, classes, keys, boxes, class_ids});
}
__global__ void __launch_bounds__(256)
    edgeyolo_decode_columns_f16(const edgeyolo::FrameBlock* block, const std::uint16_t* head, int anchors, int classes,
                                std::uint64_t* keys, edgeyolo::Box* boxes, std::int32_t* class_ids) {
    edgeyolo::decode_columns<std::uint16_t>({block, head, anchors, classes, keys, boxes, class_ids});
}
__global__ void __launch_bounds__(256)
    edgeyolo_decode_rows_f32(const edgeyolo::FrameBlock* block, const float* head, int anchors, int classes,
                             int objectness, std::uint64_t* keys, edgeyolo::Box* boxes, std::int32_t* class_ids) {
    edgeyolo::decode_rows<float>({block, head, anchors, classes, keys, boxes, class_ids}, objectness != 0);
}
__global__ void __launch_bounds__(256)
    edgeyolo_decode_rows_f16(const edgeyolo::FrameBlock* block, const std::uint16_t* head, int anchors, int classes,
                             int objectness, std::uint64_t* keys, edgeyolo::Box* boxes, std::int32_t* class_ids) {
    edgeyolo::decode_rows<std::uint16_t>({block, head, anchors, classes, keys, boxes, class_ids}, objectness != 0);
}
__global__ void __launch_bounds__(1024) edgeyolo_end2end_f32(const edgeyolo::FrameBlock* block, const float* head,
                                                             int rows_in, int classes, void* result, int rows) {
    edgeyolo::end2end(block, head, rows_in, classes, result, rows);
}
__global__ void __launch_bounds__(1024)
    edgeyolo_end2end_f16(const edgeyolo::FrameBlock* block, const std::uint16_t* head, int rows_in, int classes,
                         void* result, int rows) {
    edgeyolo::end2end(block, head, rows_in, classes, result, rows);
}
}
