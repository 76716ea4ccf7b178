// Candidates -> kept boxes in source pixels: exact greedy suppression in one launch of one block, whatever their
// number.
//
// 1. Collect the keys that are not 0 (decode.cu), in any order.
// 2. Sort them, highest first: a bitonic network in shared memory; above 2048 keys its long strides go through memory.
//    Keys are unique, so the order of step 1 leaves no trace.
// 3. Walk down the list, 64 candidates a round: strike out those that an already kept box drops; mark which of the 64
//    drop which, a bit for each pair; one warp walks the 64 in order. Stop at max_det.
// 4. Write the result, every row of it.
// Asking kept boxes alone, best first, gives what striking out all later ones gives, and may stop early (nms.cpp).
// One block and not many: at the usual few hundred candidates the steps are short, and a grid-wide barrier between them
// costs more than they do.
#include "candidate_math.hpp"

namespace edgeyolo {
namespace {

constexpr int threads = 1024;
constexpr int tile_keys = 2 * threads;  // a thread compares one pair
constexpr int group = 64;               // candidates per round
constexpr int sharers = threads / group;
constexpr unsigned whole_warp = 0xffffffffu;

// Read and written 16 bytes at a time.
struct alignas(16) StoredBox {
    Box box;
};

struct Shared {
    std::uint64_t tile[tile_keys];
    StoredBox kept_boxes[max_result_rows];
    float kept_areas[max_result_rows];
    std::int32_t kept_classes[max_result_rows];
    StoredBox boxes[group];
    float areas[group];
    std::int32_t classes[group];
    float scores[group];
    unsigned drops[group][2];  // bit j of row i: candidate i drops the later candidate j
    unsigned dropped[2];       // by boxes kept in earlier rounds
    int found;
    int kept;
};
static_assert(sizeof(Shared) <= 48 * 1024, "static shared memory");

// The compare-exchanges of lengths k_first..k_last, strides below the tile's size, on tile[0, size) that stands at
// `offset` of the whole list. Pairs with a stride of 32 or less stay inside the 64 keys of one warp.
__device__ void sort_tile(std::uint64_t* tile, int offset, int size, int k_first, int k_last) {
    const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int k = k_first; k <= k_last; k *= 2) {
#pragma unroll 1
        for (int j = k / 2 < size / 2 ? k / 2 : size / 2; j > 0; j /= 2) {
            if (thread < size / 2) {
                const int low = 2 * thread - (thread & (j - 1));
                const std::uint64_t a = tile[low];
                const std::uint64_t b = tile[low + j];
                const bool descending = ((offset + low) & k) == 0;
                if (descending ? a < b : a > b) {
                    tile[low] = b;
                    tile[low + j] = a;
                }
            }
            if (j > 32 || j == 1) {
                __syncthreads();
            } else {
                __syncwarp();
            }
        }
    }
}

__device__ void sort_tile_of(std::uint64_t* list, std::uint64_t* tile, int offset, int k_first, int k_last) {
    for (int i = static_cast<int>(threadIdx.x); i < tile_keys; i += threads) tile[i] = list[offset + i];
    __syncthreads();
    sort_tile(tile, offset, tile_keys, k_first, k_last);
    for (int i = static_cast<int>(threadIdx.x); i < tile_keys; i += threads) list[offset + i] = tile[i];
    __syncthreads();
}

// list[0, size), size a power of two above tile_keys. Rare, so kept out of the way of the usual code.
__noinline__ __device__ void sort_list(std::uint64_t* list, std::uint64_t* tile, int size) {
    for (int offset = 0; offset < size; offset += tile_keys) sort_tile_of(list, tile, offset, 2, tile_keys);
    for (int k = 2 * tile_keys; k <= size; k *= 2) {
        for (int j = k / 2; j >= tile_keys; j /= 2) {
            for (int pair = static_cast<int>(threadIdx.x); pair < size / 2; pair += threads) {
                const int low = 2 * pair - (pair & (j - 1));
                const std::uint64_t a = list[low];
                const std::uint64_t b = list[low + j];
                const bool descending = (low & k) == 0;
                if (descending ? a < b : a > b) {
                    list[low] = b;
                    list[low + j] = a;
                }
            }
            __syncthreads();
        }
        for (int offset = 0; offset < size; offset += tile_keys) sort_tile_of(list, tile, offset, k, k);
    }
}

// Keys that are not 0 into the tile, those beyond its size into the same places of `list`. Returns their number.
__device__ int collect(Shared& shared, const std::uint64_t* keys, int anchors, std::uint64_t* list) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    if (thread == 0) shared.found = 0;
    __syncthreads();
#pragma unroll 4
    for (int first = 0; first < anchors; first += threads) {
        const std::uint64_t key = first + thread < anchors ? keys[first + thread] : 0;
        const unsigned present = __ballot_sync(whole_warp, key != 0);
        if (present == 0) continue;
        int base = 0;
        if (lane == 0) base = atomicAdd(&shared.found, __popc(present));
        base = __shfl_sync(whole_warp, base, 0);
        if (key == 0) continue;
        const int place = base + __popc(present & ((1u << lane) - 1u));
        (place < tile_keys ? shared.tile : list)[place] = key;
    }
    __syncthreads();
    return shared.found;
}

// The sorted keys: in the tile, or in `list` when they do not fit there.
__device__ const std::uint64_t* sort(Shared& shared, std::uint64_t* list, int count) {
    const int thread = static_cast<int>(threadIdx.x);
    int size = 2;
    while (size < count) size *= 2;
    const bool fits = size <= tile_keys;
    if (!fits) {
        for (int i = thread; i < tile_keys; i += threads) list[i] = shared.tile[i];
    }
    std::uint64_t* sorted = fits ? shared.tile : list;
    for (int i = count + thread; i < size; i += threads) sorted[i] = 0;  // 0 sorts behind every key
    __syncthreads();
    if (fits) {
        sort_tile(shared.tile, 0, size, 2, size);
    } else {
        sort_list(list, shared.tile, size);
    }
    return sorted;
}

// The first warp decides the round's candidates in order. Every lane works out the same two words.
__device__ void decide(Shared& shared, const ResultView& out, int members, int limit) {
    const int lane = static_cast<int>(threadIdx.x);
    const unsigned drops_low = shared.drops[lane][0];  // rows 0..31
    const unsigned drops_mid = shared.drops[lane][1];
    const unsigned drops_high = shared.drops[lane + 32][1];  // rows 32..63 drop none of the first 32
    unsigned low = ~shared.dropped[0] & (members >= 32 ? whole_warp : (1u << members) - 1u);
    unsigned high = ~shared.dropped[1] & (members >= 64   ? whole_warp
                                          : members <= 32 ? 0u
                                                          : (1u << (members - 32)) - 1u);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const unsigned to_low = __shfl_sync(whole_warp, drops_low, i);
        const unsigned to_high = __shfl_sync(whole_warp, drops_mid, i);
        if (low >> i & 1u) {
            low &= ~to_low;
            high &= ~to_high;
        }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const unsigned to_high = __shfl_sync(whole_warp, drops_high, i);
        if (high >> i & 1u) high &= ~to_high;
    }
    const int before = shared.kept;
    const unsigned lanes_below = (1u << lane) - 1u;
    const auto keep = [&](int from, int to) {
        if (to >= limit) return;
        shared.kept_boxes[to] = shared.boxes[from];
        shared.kept_areas[to] = shared.areas[from];
        shared.kept_classes[to] = shared.classes[from];
        out.scores[to] = shared.scores[from];
    };
    if (low >> lane & 1u) keep(lane, before + __popc(low & lanes_below));
    if (high >> lane & 1u) keep(lane + 32, before + __popc(low) + __popc(high & lanes_below));
    const int after = before + __popc(low) + __popc(high);
    __syncwarp();  // every lane has read shared.kept
    if (lane == 0) shared.kept = after < limit ? after : limit;
}

__device__ void nms(const FrameBlock* block, const std::uint64_t* keys, const StoredBox* boxes,
                    const std::int32_t* class_ids, int anchors, std::uint64_t* list, void* result, int rows) {
    if (rows == 0) return;  // the empty launch that loads the kernel
    __shared__ Shared shared;
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const ResultView out = result_view(result, rows);
    const int limit = result_limit(*block, rows);
    const float threshold = block->iou;
    const bool agnostic = block->agnostic != 0;

    const int count = collect(shared, keys, anchors, list);
    const std::uint64_t* sorted = sort(shared, list, count);

    const int member = thread % group;  // of this round
    const int share = thread / group;
    if (thread == 0) shared.kept = 0;
    std::uint64_t key = 0;
    StoredBox box{};
    int class_id = 0;
    // Candidates are fetched one round ahead.
    const auto fetch = [&](int first) {
        if (thread >= group || first + thread >= count) return;
        key = sorted[first + thread];
        const int anchor = key_anchor(key);
        box = boxes[anchor];
        class_id = class_ids[anchor];
    };
    fetch(0);
    for (int first = 0; first < count; first += group) {
        const int members = count - first < group ? count - first : group;
        if (thread < members) {
            shared.boxes[thread] = box;
            shared.areas[thread] = area(box.box);
            shared.classes[thread] = class_id;
            shared.scores[thread] = key_score(key);
        }
        if (thread < 2) shared.dropped[thread] = 0;
        __syncthreads();
        const int kept = shared.kept;
        if (kept >= limit) break;
        fetch(first + group);

        const bool present = member < members;
        const Box mine = shared.boxes[member].box;
        const float my_area = shared.areas[member];
        const int my_class = shared.classes[member];
        bool is_dropped = false;
#pragma unroll 2
        for (int i = share; i < kept; i += sharers) {
            const bool rival = agnostic || shared.kept_classes[i] == my_class;
            is_dropped |= rival && drops(shared.kept_boxes[i].box, shared.kept_areas[i], mine, my_area, threshold);
        }
        const unsigned dropped = __ballot_sync(whole_warp, present && is_dropped);
        if (lane == 0 && dropped != 0) atomicOr(&shared.dropped[member / 32], dropped);
#pragma unroll 1
        for (int i = share; i < group; i += sharers) {
            const bool rival = i < member && present && (agnostic || shared.classes[i] == my_class);
            const unsigned row = __ballot_sync(
                whole_warp, rival && drops(shared.boxes[i].box, shared.areas[i], mine, my_area, threshold));
            if (lane == 0) shared.drops[i][member / 32] = row;
        }
        __syncthreads();
        if (thread < 32) decide(shared, out, members, limit);
        __syncthreads();
    }
    __syncthreads();
    const int kept = shared.kept;
#pragma unroll 1
    for (int i = thread; i < rows; i += threads) {
        const bool valid = i < kept;
        out.boxes[i] = valid ? source_box(*block, shared.kept_boxes[i].box) : Box{0.f, 0.f, 0.f, 0.f};
        out.class_ids[i] = valid ? shared.kept_classes[i] : 0;
        if (!valid) out.scores[i] = 0.f;
    }
    if (thread == 0) *out.header = {kept, count, {0, 0}};
}

}  // namespace
}  // namespace edgeyolo

extern "C" __global__ void __launch_bounds__(1024)
    edgeyolo_nms(const edgeyolo::FrameBlock* block, const std::uint64_t* keys, const edgeyolo::Box* boxes,
                 const std::int32_t* class_ids, int anchors, std::uint64_t* list, void* result, int rows) {
    edgeyolo::nms(block, keys, reinterpret_cast<const edgeyolo::StoredBox*>(boxes), class_ids, anchors, list, result,
                  rows);
}
