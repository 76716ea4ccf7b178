// Frame -> network input in one pass: resample, pad, to RGB planes of float32 or float16 in [0, 1].
//
// One thread makes four pixels side by side, so that a plane is written 16 (float16: 8) bytes at a time; a warp writes
// 128 pixels of one row. Planes must be aligned to 16 bytes. The taps of a block's columns and rows are worked out
// once, in shared memory, because they need double precision, which is slow on most GPUs. Source bytes are read
// straight from memory: what neighbours share comes from the first-level cache.
#include "half_math.hpp"
#include "letterbox_sample.hpp"

namespace edgeyolo {
namespace {

constexpr int block_rows = 8;
#ifndef EDGEYOLO_THREAD_PIXELS
#define EDGEYOLO_THREAD_PIXELS 4  // 1 and 2 exist for tests/gpu/kernels_check.cu, which times them
#endif
constexpr int thread_pixels = EDGEYOLO_THREAD_PIXELS;
constexpr int block_columns = 32 * thread_pixels;
constexpr int outside = -1;  // in Taps::first: this column or row is border

template <class T>
struct alignas(thread_pixels * sizeof(T)) Pack {
    T values[thread_pixels];
};

// Writes this thread's pixels of one row. The taps of the row and columns tell what is border.
template <FrameLayout layout, class T>
__device__ void write_pixels(const Picture& picture, const Taps (&columns)[thread_pixels][32], const Taps& row,
                             bool half, T* out, std::int64_t plane, int room) {
    const SourceRow upper = source_row(picture, row.first == outside ? 0 : row.first);
    const SourceRow lower = source_row(picture, row.second);
    Pack<T> red, green, blue;
#pragma unroll
    for (int k = 0; k < thread_pixels; ++k) {
        const Taps column = columns[k][threadIdx.x];
        Rgb pixel{kBorder, kBorder, kBorder};
        if (row.first != outside && column.first != outside)
            pixel = sample<layout>(picture, upper, lower, column, row, half);
        store_float(&red.values[k], unit_value(pixel.red));
        store_float(&green.values[k], unit_value(pixel.green));
        store_float(&blue.values[k], unit_value(pixel.blue));
    }
    if (room == 0) {
        *reinterpret_cast<Pack<T>*>(out) = red;
        *reinterpret_cast<Pack<T>*>(out + plane) = green;
        *reinterpret_cast<Pack<T>*>(out + 2 * plane) = blue;
        return;
    }
#pragma unroll
    for (int k = 0; k < thread_pixels; ++k) {
        if (k >= room) break;
        out[k] = red.values[k];
        out[plane + k] = green.values[k];
        out[2 * plane + k] = blue.values[k];
    }
}

template <class T>
__device__ void letterbox(const FrameBlock* block, T* planes, int width, int height) {
    // Column 4 * i + k stands at [k][i]: a warp reads neighbouring words.
    __shared__ Taps columns[thread_pixels][32];
    __shared__ Taps rows[block_rows];
    const int thread = static_cast<int>(threadIdx.y * 32 + threadIdx.x);
    const int first_x = static_cast<int>(blockIdx.x) * block_columns;
    const int first_y = static_cast<int>(blockIdx.y) * block_rows;
    if (first_x >= width || first_y >= height) return;  // also the empty launch that loads the kernel

    const Size source{block->source_width, block->source_height};
    const Size resized{block->resized_width, block->resized_height};
    if (thread < block_columns) {
        const int x = first_x + thread - block->left;
        const bool inside = x >= 0 && x < resized.width;
        columns[thread % thread_pixels][thread / thread_pixels] =
            inside ? column_taps(x, source.width, block->step_x) : Taps{outside, 0, 0, 0};
    } else if (thread < block_columns + block_rows) {
        const int y = first_y + thread - block_columns - block->top;
        const bool inside = y >= 0 && y < resized.height;
        rows[thread - block_columns] = inside ? row_taps(y, source.height, block->step_y) : Taps{outside, 0, 0, 0};
    }
    __syncthreads();

    const int x = first_x + static_cast<int>(threadIdx.x) * thread_pixels;
    const int y = first_y + static_cast<int>(threadIdx.y);
    if (x >= width || y >= height) return;
    const Picture picture = make_picture(*block, reinterpret_cast<const void*>(block->pixels),
                                         reinterpret_cast<const void*>(block->chroma));
    const bool half = is_half(source, resized);
    const Taps row = rows[threadIdx.y];
    const std::int64_t plane = static_cast<std::int64_t>(width) * height;
    T* out = planes + static_cast<std::int64_t>(y) * width + x;
    // 0: whole packs, aligned as rows are; otherwise how many pixels are left in the row.
    const int room = width % thread_pixels == 0 ? 0 : width - x;
    if (block->layout == FrameLayout::nv12)
        write_pixels<FrameLayout::nv12>(picture, columns, row, half, out, plane, room);
    else
        write_pixels<FrameLayout::packed>(picture, columns, row, half, out, plane, room);
}

}  // namespace
}  // namespace edgeyolo

extern "C" {

__global__ void __launch_bounds__(256)
    edgeyolo_letterbox_f32(const edgeyolo::FrameBlock* block, float* planes, int width, int height) {
    edgeyolo::letterbox(block, planes, width, height);
}
__global__ void __launch_bounds__(256)
    edgeyolo_letterbox_f16(const edgeyolo::FrameBlock* block, std::uint16_t* planes, int width, int height) {
    edgeyolo::letterbox(block, planes, width, height);
}
}
