// The kernels on a GPU with nothing but nvcc: checks each against the CPU code, then times it. tests/gpu/run.sh builds
// and runs it. Exit code 1 when a check fails. With an argument, only what is named: check, small (a short check),
// time. (Longer than most files: it must build alone.)
//
// Times are medians over replays of a graph that holds one kernel 24 times, each on another copy of the data, all
// copies together larger than the L2 cache: time per kernel, the gap between two graph nodes included.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#include "../../cpp/decode.cu"
#include "../../cpp/letterbox.cu"
#include "../../cpp/nms.cu"
#include "../cpp/gpu_cases.hpp"
#include "letterbox.hpp"
#include "nms.hpp"

using namespace edgeyolo;

namespace {

// As in kernels.cpp: a head without rows still gets a block, which does nothing.
unsigned blocks(int items, int per_block) {
    return static_cast<unsigned>(items > 0 ? (items + per_block - 1) / per_block : 1);
}

#define CUDA(call)                                                                                \
    do {                                                                                          \
        const cudaError_t error_ = (call);                                                        \
        if (error_ != cudaSuccess) {                                                              \
            std::printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
            std::exit(2);                                                                         \
        }                                                                                         \
    } while (false)

int failures = 0;
int checks = 0;

template <class T>
struct Buffer {
    T* data = nullptr;
    std::size_t count = 0;
    explicit Buffer(std::size_t n) : count(n) {
        CUDA(cudaMalloc(&data, std::max<std::size_t>(n, 1) * sizeof(T)));
        CUDA(cudaMemset(data, 0xa5, n * sizeof(T)));
    }
    explicit Buffer(const std::vector<T>& values) : Buffer(values.size()) { set(values.data()); }
    Buffer(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept : data(std::exchange(other.data, nullptr)), count(other.count) {}
    ~Buffer() { cudaFree(data); }
    void set(const T* values) { CUDA(cudaMemcpy(data, values, count * sizeof(T), cudaMemcpyHostToDevice)); }
    std::vector<T> get() const {
        std::vector<T> values(count);
        CUDA(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
};

template <class T>
void expect_same(const std::vector<T>& found, const std::vector<T>& expected, const std::string& what) {
    ++checks;
    if (std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0) return;
    std::size_t i = 0;
    while (std::memcmp(&found[i], &expected[i], sizeof(T)) == 0) ++i;
    std::printf("FAIL %s: element %zu\n", what.c_str(), i);
    ++failures;
}

std::vector<std::uint16_t> to_halves(const std::vector<float>& values) {
    std::vector<std::uint16_t> halves(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) halves[i] = float_to_half(values[i]);
    return halves;
}

FrameBlock frame_block(Size source, Size target, int channels, const std::uint8_t* pixels) {
    const Letterbox g = fit(source, target);
    FrameBlock block{};
    block.pixels = reinterpret_cast<std::uint64_t>(pixels);
    block.row_stride = static_cast<std::int64_t>(source.width) * channels;
    block.pixel_stride = channels;
    block.red = channels == 1 ? 0 : 2;
    block.green = channels == 1 ? 0 : 1;
    block.source_width = source.width;
    block.source_height = source.height;
    block.resized_width = g.resized.width;
    block.resized_height = g.resized.height;
    block.left = g.left;
    block.top = g.top;
    block.step_x = axis_step(source.width, g.resized.width);
    block.step_y = axis_step(source.height, g.resized.height);
    block.conf = 0.25f;
    block.iou = iou_threshold(0.7);
    block.max_det = 300;
    return block;
}

void launch_letterbox(cudaStream_t stream, const FrameBlock* block, float* out, Size size) {
    const dim3 grid((size.width + block_columns - 1) / block_columns, (size.height + 7) / 8);
    edgeyolo_letterbox_f32<<<grid, dim3(32, 8), 0, stream>>>(block, out, size.width, size.height);
}
void launch_letterbox(cudaStream_t stream, const FrameBlock* block, std::uint16_t* out, Size size) {
    const dim3 grid((size.width + block_columns - 1) / block_columns, (size.height + 7) / 8);
    edgeyolo_letterbox_f16<<<grid, dim3(32, 8), 0, stream>>>(block, out, size.width, size.height);
}

// What lies between decode and NMS, and the result.
struct Post {
    Head head;
    int rows;
    Buffer<std::uint64_t> keys, list;
    Buffer<Box> boxes;
    Buffer<std::int32_t> ids;
    Buffer<std::uint8_t> result;
    static std::size_t power(int n) {
        std::size_t p = 2;
        while (p < static_cast<std::size_t>(n)) p *= 2;
        return p;
    }
    Post(const Head& h, int r)
        : head(h), rows(r), keys(h.rows), list(power(h.rows)), boxes(h.rows), ids(h.rows), result(result_bytes(r)) {}

    void decode(cudaStream_t s, const FrameBlock* block, const float* data) {
        if (head.kind == HeadKind::raw)
            edgeyolo_decode_columns_f32<<<blocks(head.rows, 32), dim3(32, 8), 0, s>>>(
                block, data, head.rows, head.classes, keys.data, boxes.data, ids.data);
        else
            edgeyolo_decode_rows_f32<<<blocks(head.rows, 8), dim3(32, 8), 0, s>>>(
                block, data, head.rows, head.classes, head.kind == HeadKind::yolov5, keys.data, boxes.data, ids.data);
    }
    void decode(cudaStream_t s, const FrameBlock* block, const std::uint16_t* data) {
        if (head.kind == HeadKind::raw)
            edgeyolo_decode_columns_f16<<<blocks(head.rows, 32), dim3(32, 8), 0, s>>>(
                block, data, head.rows, head.classes, keys.data, boxes.data, ids.data);
        else
            edgeyolo_decode_rows_f16<<<blocks(head.rows, 8), dim3(32, 8), 0, s>>>(
                block, data, head.rows, head.classes, head.kind == HeadKind::yolov5, keys.data, boxes.data, ids.data);
    }
    void nms(cudaStream_t s, const FrameBlock* block) {
        edgeyolo_nms<<<1, 1024, 0, s>>>(block, keys.data, boxes.data, ids.data, head.rows, list.data, result.data,
                                        rows);
    }
    void end2end(cudaStream_t s, const FrameBlock* block, const float* data) {
        edgeyolo_end2end_f32<<<1, 1024, 0, s>>>(block, data, head.rows, head.classes, result.data, rows);
    }
    void end2end(cudaStream_t s, const FrameBlock* block, const std::uint16_t* data) {
        edgeyolo_end2end_f16<<<1, 1024, 0, s>>>(block, data, head.rows, head.classes, result.data, rows);
    }
    template <class T>
    void run(cudaStream_t s, const FrameBlock* block, const T* data) {
        if (head.kind == HeadKind::end2end) return end2end(s, block, data);
        decode(s, block, data);
        nms(s, block);
    }
};

std::vector<std::uint8_t> expected_result(const std::vector<float>& data, const Head& head, const FrameBlock& block,
                                          double iou, const Letterbox& geometry, int rows) {
    Candidates found;
    decode(data.data(), head, {block.conf, nullptr}, found, Isa::scalar);
    std::vector<std::int32_t> kept;
    Nms nms;
    if (head.kind != HeadKind::end2end) {
        kept = nms.run(found, {iou, block.max_det, block.agnostic != 0}, Isa::scalar);
    } else {
        kept = nms.order(found, block.max_det);
    }
    std::vector<std::uint8_t> buffer(result_bytes(rows), 0);
    const ResultView out = result_view(buffer.data(), rows);
    *out.header = {static_cast<std::int32_t>(kept.size()), static_cast<std::int32_t>(found.size()), {0, 0}};
    for (std::size_t row = 0; row < kept.size(); ++row) {
        const auto i = static_cast<std::size_t>(kept[row]);
        out.boxes[row] = found.box(i);
        out.scores[row] = found.score[i];
        out.class_ids[row] = found.class_id[i];
    }
    to_source(geometry, &out.boxes->x1, out.header->count);
    return buffer;
}

// small: what fits the time that a sanitizer takes.
void check_letterbox(bool small) {
    unsigned seed = 0;
    for (const Size source : {Size{1920, 1080}, Size{1280, 720}, Size{640, 640}, Size{641, 479}, Size{1, 1},
                              Size{3, 200}, Size{1280, 1280}, Size{3840, 2160}})
        for (const Size target : {Size{640, 640}, Size{640, 384}, Size{131, 77}}) {
            if (small && (source.width > 1280 || target.width < target.height)) continue;
            const int channels = seed % 3 == 0 ? 3 : seed % 3 == 1 ? 4 : 1;
            const auto pixels = cases::random_bytes(
                static_cast<std::size_t>(source.width) * static_cast<std::size_t>(source.height) * channels, ++seed);
            const ImageView image{
                pixels.data(),
                source,
                static_cast<std::ptrdiff_t>(source.width) * channels,
                channels,
                1,
                channels == 1 ? PixelFormat::gray : channels == 3 ? PixelFormat::bgr : PixelFormat::bgra};
            const std::size_t count = 3 * static_cast<std::size_t>(target.width) * target.height;
            std::vector<float> expected(count);
            LetterboxWorkspace workspace;
            letterbox(image, fit(source, target), expected.data(), workspace, Isa::scalar);
            const Buffer<std::uint8_t> memory(pixels);
            const Buffer<FrameBlock> block(std::vector<FrameBlock>{frame_block(source, target, channels, memory.data)});
            const Buffer<float> out(count);
            const Buffer<std::uint16_t> half_out(count);
            launch_letterbox(nullptr, block.data, out.data, target);
            launch_letterbox(nullptr, block.data, half_out.data, target);
            CUDA(cudaGetLastError());
            CUDA(cudaDeviceSynchronize());
            const std::string what = "letterbox " + std::to_string(source.width) + "x" + std::to_string(source.height);
            expect_same(out.get(), expected, what);
            expect_same(half_out.get(), to_halves(expected), what + " float16");
        }
}

void check_post(bool small) {
    const Letterbox geometry = fit({1280, 720}, {640, 640});
    unsigned seed = 0;
    const auto one = [&](const cases::HeadCase& c, float conf, double iou, int max_det, bool agnostic) {
        FrameBlock host = frame_block({1280, 720}, {640, 640}, 3, nullptr);
        host.conf = conf;
        host.iou = iou_threshold(iou);
        host.max_det = max_det;
        host.agnostic = agnostic;
        const Buffer<FrameBlock> block(std::vector<FrameBlock>{host});
        const auto data = cases::make_head(c);
        const auto halves = to_halves(data);
        std::vector<float> rounded(halves.size());
        for (std::size_t i = 0; i < halves.size(); ++i) rounded[i] = half_to_float(halves[i]);
        const std::string what = "head " + std::to_string(int(c.head.kind)) + " rows " + std::to_string(c.head.rows) +
                                 " trouble " + std::to_string(int(c.trouble)) + " max_det " + std::to_string(max_det) +
                                 " agnostic " + std::to_string(agnostic);
        const int rows = 1000;
        const Buffer<float> input(data);
        const Buffer<std::uint16_t> half_input(halves);
        Post post(c.head, rows);
        for (int repeat = 0; repeat < 2; ++repeat) {
            post.run(nullptr, block.data, input.data);
            CUDA(cudaDeviceSynchronize());
            expect_same(post.result.get(), expected_result(data, c.head, host, iou, geometry, rows), what);
        }
        post.run(nullptr, block.data, half_input.data);
        CUDA(cudaDeviceSynchronize());
        expect_same(post.result.get(), expected_result(rounded, c.head, host, iou, geometry, rows), what + " float16");
    };
    using cases::Trouble;
    for (const HeadKind kind : {HeadKind::raw, HeadKind::raw_transposed, HeadKind::yolov5, HeadKind::end2end})
        for (const Trouble trouble : {Trouble::none, Trouble::crowd, Trouble::ties, Trouble::not_finite})
            for (const int rows : {0, 1, 33, 300, 2047, 2049, 8400}) {
                if (rows > 2049 && (small || kind == HeadKind::end2end)) continue;
                one({{kind, rows, 80}, trouble, 0.05, ++seed}, 0.25f, 0.7, 300, seed % 2 == 0);
            }
    for (const bool agnostic : {false, true}) {
        if (small) break;
        one({{HeadKind::raw, 8400, 80}, Trouble::crowd, 1., 400}, 0.001f, 0.7, 1000, agnostic);
        one({{HeadKind::raw, 8400, 1}, Trouble::none, 1., 401}, 0.001f, 0.9, 1000, agnostic);
        one({{HeadKind::raw, 33600, 3}, Trouble::ties, 1., 402}, 0.001f, 0.5, 300, agnostic);
    }
}

// Microseconds per call of work(stream, copy).
double time_us(const std::function<void(cudaStream_t, int)>& work, int copies) {
    constexpr int calls = 24;
    constexpr int replays = 41;
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    work(stream, 0);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) work(stream, i % copies);
    cudaGraph_t graph;
    CUDA(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < replays; ++i) {
        CUDA(cudaEventRecord(begin, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaEventSynchronize(end));
        float ms;
        CUDA(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms * 1000.f / calls);
    }
    CUDA(cudaGetLastError());
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    std::nth_element(times.begin(), times.begin() + replays / 2, times.end());
    return times[replays / 2];
}

void line(const char* what, double us, double bytes) {
    if (bytes > 0)
        std::printf("%-58s %8.2f us  %7.2f MB  %7.1f GB/s\n", what, us, bytes / 1e6, bytes / us / 1e3);
    else
        std::printf("%-58s %8.2f us\n", what, us);
}

template <class T>
void time_letterbox(const char* what, Size source, int channels, bool nv12) {
    const Size target{640, 640};
    constexpr int copies = 12;
    const std::size_t bytes = static_cast<std::size_t>(source.width) * source.height * (nv12 ? 1 : channels) +
                              (nv12 ? static_cast<std::size_t>(source.width) * source.height / 2 : 0);
    std::vector<Buffer<std::uint8_t>> pixels;
    std::vector<Buffer<FrameBlock>> blocks;
    std::vector<Buffer<T>> outs;
    for (int i = 0; i < copies; ++i) {
        pixels.emplace_back(cases::random_bytes(bytes, i));
        FrameBlock block = frame_block(source, target, channels, pixels.back().data);
        if (nv12) {
            block.layout = FrameLayout::nv12;
            block.row_stride = block.chroma_stride = source.width;
            block.chroma = block.pixels + static_cast<std::uint64_t>(source.width) * source.height;
        }
        blocks.emplace_back(std::vector<FrameBlock>{block});
        outs.emplace_back(3 * 640 * 640);
    }
    const double us =
        time_us([&](cudaStream_t s, int i) { launch_letterbox(s, blocks[i].data, outs[i].data, target); }, copies);
    line(what, us, bytes + outs[0].count * sizeof(T));
}

template <class T>
std::vector<T> as(const std::vector<float>& values);
template <>
std::vector<float> as<float>(const std::vector<float>& values) {
    return values;
}
template <>
std::vector<std::uint16_t> as<std::uint16_t>(const std::vector<float>& values) {
    return to_halves(values);
}

// Decode, NMS and both, of one kind of head.
template <class T>
void time_post(const char* what, const cases::HeadCase& c, float conf, int max_det, bool agnostic) {
    constexpr int copies = 12;
    FrameBlock host = frame_block({1280, 720}, {640, 640}, 3, nullptr);
    host.conf = conf;
    host.max_det = max_det;
    host.agnostic = agnostic;
    const Buffer<FrameBlock> block(std::vector<FrameBlock>{host});
    std::vector<Buffer<T>> inputs;
    std::vector<Post> posts;
    posts.reserve(copies);
    for (int i = 0; i < copies; ++i) {
        cases::HeadCase own = c;
        own.seed = static_cast<unsigned>(i);
        inputs.emplace_back(as<T>(cases::make_head(own)));
        posts.emplace_back(c.head, max_det);
        posts.back().run(nullptr, block.data, inputs.back().data);
    }
    CUDA(cudaDeviceSynchronize());
    auto first = posts[0].result.get();
    const ResultHeader header = *result_view(first.data(), max_det).header;
    std::printf("%s: %d candidates, %d kept\n", what, header.candidates, header.count);
    const double bytes = static_cast<double>(inputs[0].count) * sizeof(T);
    if (c.head.kind == HeadKind::end2end) {
        line("    decode and result",
             time_us([&](cudaStream_t s, int i) { posts[i].run(s, block.data, inputs[i].data); }, copies), bytes);
        return;
    }
    line("    decode", time_us([&](cudaStream_t s, int i) { posts[i].decode(s, block.data, inputs[i].data); }, copies),
         bytes + 8. * c.head.rows);
    line("    nms", time_us([&](cudaStream_t s, int i) { posts[i].nms(s, block.data); }, copies), 0);
    line("    both", time_us([&](cudaStream_t s, int i) { posts[i].run(s, block.data, inputs[i].data); }, copies), 0);
}

// Everything around a network, as the pipeline runs it: block up, letterbox, decode, nms, result down; one graph launch
// per frame, host clock until the result is there.
void time_frame() {
    const Size source{1920, 1080}, target{640, 640};
    const Head head{HeadKind::raw, 8400, 80};
    const Buffer<std::uint8_t> pixels(
        cases::random_bytes(static_cast<std::size_t>(source.width) * source.height * 3, 1));
    const Buffer<FrameBlock> block(1);
    const Buffer<float> planes(3 * 640 * 640);
    const Buffer<float> output(cases::make_head({head, cases::Trouble::none, 0.02, 3}));
    Post post(head, 300);
    FrameBlock* pinned;
    std::uint8_t* result;
    CUDA(cudaMallocHost(&pinned, sizeof(FrameBlock)));
    CUDA(cudaMallocHost(&result, result_bytes(300)));
    *pinned = frame_block(source, target, 3, pixels.data);
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch_letterbox(stream, block.data, planes.data, target);
    post.run(stream, block.data, output.data);
    CUDA(cudaMemcpyAsync(result, post.result.data, result_bytes(300), cudaMemcpyDeviceToHost, stream));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    std::vector<double> times;
    for (int i = 0; i < 2000; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        CUDA(cudaMemcpyAsync(block.data, pinned, sizeof(FrameBlock), cudaMemcpyHostToDevice, stream));
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaStreamSynchronize(stream));
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    std::sort(times.begin(), times.end());
    std::printf("%-58s %8.2f us (p50)  %8.2f us (p99)\n", "frame without network, host clock, 1080p on the GPU",
                times[1000], times[1980]);
}

void time_all() {
    cudaDeviceProp properties;
    CUDA(cudaGetDeviceProperties(&properties, 0));
    std::printf("%s, %d multiprocessors, L2 %.0f MB, %d pixels per letterbox thread\n", properties.name,
                properties.multiProcessorCount, properties.l2CacheSize / 1e6, thread_pixels);
    {
        constexpr std::size_t bytes = 1u << 30;
        const Buffer<std::uint8_t> from(bytes), to(bytes);
        const double us = time_us(
            [&](cudaStream_t s, int) { CUDA(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice, s)); },
            1);
        line("ceiling: device copy, read + written", us, 2. * bytes);
    }
    time_letterbox<float>("letterbox 1920x1080 BGR -> 640 float32", {1920, 1080}, 3, false);
    time_letterbox<std::uint16_t>("letterbox 1920x1080 BGR -> 640 float16", {1920, 1080}, 3, false);
    time_letterbox<float>("letterbox 1280x720 BGR -> 640 float32 (exact half)", {1280, 720}, 3, false);
    time_letterbox<float>("letterbox 1333x1000 BGR -> 640 float32", {1333, 1000}, 3, false);
    time_letterbox<float>("letterbox 3840x2160 BGR -> 640 float32", {3840, 2160}, 3, false);
    time_letterbox<float>("letterbox 1920x1080 BGRA -> 640 float32", {1920, 1080}, 4, false);
    time_letterbox<float>("letterbox 1920x1080 NV12 -> 640 float32", {1920, 1080}, 1, true);
    if (thread_pixels != 4) return;
    using cases::Trouble;
    const Head coco{HeadKind::raw, 8400, 80};
    time_post<float>("raw (84, 8400) float32", {coco, Trouble::none, 0.004, 0}, 0.25f, 300, false);
    time_post<float>("raw (84, 8400) float32", {coco, Trouble::none, 0.036, 0}, 0.25f, 300, false);
    time_post<float>("raw (84, 8400) float32, agnostic", {coco, Trouble::none, 0.036, 0}, 0.25f, 300, true);
    time_post<std::uint16_t>("raw (84, 8400) float16", {coco, Trouble::none, 0.036, 0}, 0.25f, 300, false);
    time_post<float>("raw (84, 8400) float32", {coco, Trouble::none, 0.17, 0}, 0.25f, 300, false);
    time_post<float>("raw (84, 8400), all candidates", {coco, Trouble::crowd, 1., 0}, 0.001f, 300, false);
    time_post<float>("raw (84, 8400), all candidates, agnostic", {coco, Trouble::crowd, 1., 0}, 0.001f, 300, true);
    time_post<float>("raw (84, 8400), all candidates, 1000 kept", {coco, Trouble::none, 1., 0}, 0.001f, 1000, false);
    time_post<float>("raw (84, 8400), all candidates, agnostic, 1000", {coco, Trouble::crowd, 1., 0}, 0.001f, 1000,
                     true);
    time_post<float>("transposed (8400, 84) float32", {{HeadKind::raw_transposed, 8400, 80}, Trouble::none, 0.036, 0},
                     0.25f, 300, false);
    time_post<float>("yolov5 (25200, 85) float32", {{HeadKind::yolov5, 25200, 80}, Trouble::none, 0.012, 0}, 0.25f, 300,
                     false);
    time_post<float>("raw (84, 33600) float32, 1280 px", {{HeadKind::raw, 33600, 80}, Trouble::none, 0.009, 0}, 0.25f,
                     300, false);
    time_post<float>("end2end (300, 6) float32", {{HeadKind::end2end, 300, 80}, Trouble::none, 0.1, 0}, 0.25f, 300,
                     false);
    time_frame();
}

}  // namespace

int main(int count, char** words) {
    const auto asked = [&](const char* what) {
        return count < 2 || std::any_of(words + 1, words + count, [&](const char* w) { return !std::strcmp(w, what); });
    };
    const bool small = count > 1 && asked("small");
    if (asked("check") || small) {
        check_letterbox(small);
        check_post(small);
        std::printf("%d checks, %d failed\n", checks, failures);
    }
    if (asked("time")) time_all();
    return failures ? 1 : 0;
}
