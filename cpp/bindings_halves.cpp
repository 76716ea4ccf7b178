// The GPU work around ONNX Runtime's network, translated: Halves, memory for its tensors, the capture lock.
#include <pybind11/stl.h>

#include <memory>
#include <mutex>
#include <utility>
#include <vector>
#include "bindings.hpp"
#include "bindings_arrays.hpp"
#include "error.hpp"
#include "graph_capture.hpp"
#include "halves.hpp"

namespace py = pybind11;

namespace edgeyolo {
namespace {

// Frees something that waits for the GPU, which other Python threads need not do.
template <class T>
void free_without_gil(std::unique_ptr<T> held) {
    if (Py_IsInitialized() && PyGILState_Check()) {
        const py::gil_scoped_release release;
        held.reset();
    }
}

// One Halves as Python sees it, with what it needs to take frames.
class BoundHalves {
public:
    BoundHalves(int device, HalvesOptions options) {
        const py::gil_scoped_release release;
        const auto opened = cuda::Device::open(device);
        intake_ = std::make_shared<FrameIntake>(opened);
        halves_ = std::make_unique<Halves>(opened, std::move(options));
    }
    ~BoundHalves() { close(); }
    BoundHalves(const BoundHalves&) = delete;
    BoundHalves& operator=(const BoundHalves&) = delete;

    Halves& halves() const {
        check(halves_ != nullptr, "this detector was closed: load the model again");
        return *halves_;
    }
    const std::shared_ptr<FrameIntake>& intake() const { return intake_; }
    void close() {
        free_without_gil(std::make_unique<std::shared_ptr<FrameIntake>>(std::move(intake_)));
        free_without_gil(std::move(halves_));
    }

private:
    std::shared_ptr<FrameIntake> intake_;
    std::unique_ptr<Halves> halves_;
};

// GPU memory at one address for as long as it lives, read and written by somebody else's network.
class BoundMemory {
public:
    BoundMemory(int device, std::size_t bytes) {
        const py::gil_scoped_release release;
        const auto opened = cuda::Device::open(device);
        memory_ = std::make_unique<cuda::DeviceBuffer>(opened, bytes);
        stream_ = std::make_unique<cuda::Stream>(opened);
        fill(0);
    }
    ~BoundMemory() { close(); }
    BoundMemory(const BoundMemory&) = delete;
    BoundMemory& operator=(const BoundMemory&) = delete;

    cuda::DevicePtr address() const { return memory().pointer(); }
    std::size_t bytes() const { return memory().bytes(); }
    void fill(std::uint8_t value) const {
        const cuda::ContextGuard guard(*stream().device());
        stream().fill(address(), value, bytes());
        stream().synchronize();
    }
    void read(void* to, std::size_t size) const {
        const cuda::ContextGuard guard(*stream().device());
        check(size <= bytes(), "more bytes were asked for than this memory has");
        stream().copy_to_host(to, address(), size);
        stream().synchronize();
    }
    void close() {
        free_without_gil(std::move(stream_));
        free_without_gil(std::move(memory_));
    }

private:
    const cuda::DeviceBuffer& memory() const {
        check(memory_ != nullptr, "this memory was freed");
        return *memory_;
    }
    const cuda::Stream& stream() const {
        memory();
        return *stream_;
    }

    std::unique_ptr<cuda::DeviceBuffer> memory_;
    std::unique_ptr<cuda::Stream> stream_;
};

// capture_mutex() for a `with` block, on one thread.
class CaptureLock {
public:
    void enter() {
        check(!lock_.owns_lock(), "this lock is held already");
        const py::gil_scoped_release release;
        lock_ = std::unique_lock<std::mutex>(capture_mutex());
    }
    void leave() {
        if (lock_.owns_lock()) lock_.unlock();
    }

private:
    std::unique_lock<std::mutex> lock_;
};

DType tensor_dtype(const std::string& name) {
    if (name == "float32") return DType::float32;
    if (name == "float16") return DType::float16;
    throw InvalidInput("a network's tensors are float32 or float16, found '" + name + "'");
}

std::unique_ptr<BoundHalves> make_halves(int device, std::pair<int, int> imgsz, int batch, const std::string& input,
                                         const std::string& output, const std::string& head, int rows, int classes,
                                         float conf, double iou, int max_det, bool agnostic,
                                         std::vector<std::uint8_t> allowed) {
    HalvesOptions options;
    options.target = {imgsz.second, imgsz.first};
    options.batch = batch;
    options.input = tensor_dtype(input);
    options.output = tensor_dtype(output);
    options.head = {head_kind(head), rows, classes};
    options.thresholds = {conf, iou, max_det, agnostic, std::move(allowed)};
    return std::make_unique<BoundHalves>(device, std::move(options));
}

// Returns the pictures' sizes, (width, height).
std::vector<std::pair<int, int>> begin(const BoundHalves& self, const std::vector<py::object>& images,
                                       const std::string& color, std::uintptr_t input, int places) {
    const TakenFrames taken = take_frames(images, color, self.intake());
    {
        const py::gil_scoped_release release;
        self.halves().begin(taken.frames, input, places);
    }
    std::vector<std::pair<int, int>> sizes;
    for (const Size size : taken.sizes) sizes.emplace_back(size.width, size.height);
    return sizes;
}

std::vector<ResultArrays> finish(const BoundHalves& self, std::uintptr_t output) {
    const auto results = [&] {
        const py::gil_scoped_release release;
        return self.halves().finish(output);
    }();
    std::vector<ResultArrays> arrays;
    for (const Results& one : results) arrays.push_back(as_arrays(one));
    return arrays;
}

py::array frame_buffer(int device, int height, int width, int channel_count, const std::string& color) {
    const PixelFormat format = pixel_format(color, channel_count);
    const auto buffer = [&] {
        const py::gil_scoped_release release;
        const std::lock_guard<std::mutex> lock(capture_mutex());
        return std::make_shared<FrameBuffer>(cuda::Device::open(device), Size{width, height}, format);
    }();
    return as_array(buffer);
}

py::array_t<std::uint8_t> read(const BoundMemory& self, std::size_t bytes) {
    py::array_t<std::uint8_t> result(static_cast<py::ssize_t>(bytes));
    std::uint8_t* to = result.mutable_data();
    const py::gil_scoped_release release;
    self.read(to, bytes);
    return result;
}

}  // namespace

void bind_halves(py::module_& m) {
    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    py::class_<BoundHalves>(m, "Halves", "The GPU work before and after somebody else's network, on one stream.")
        .def(py::init(&make_halves), py::arg("device"), py::kw_only(), py::arg("imgsz"), py::arg("batch"),
             py::arg("input"), py::arg("output"), py::arg("head"), py::arg("rows"), py::arg("classes"), py::arg("conf"),
             py::arg("iou"), py::arg("max_det"), py::arg("agnostic"), py::arg("allowed"))
        .def_property_readonly(
            "stream", [](const BoundHalves& self) { return reinterpret_cast<std::uintptr_t>(self.halves().stream()); },
            "The CUstream as a number.")
        .def("begin", &begin, py::arg("images"), py::arg("color"), py::arg("input"), py::arg("places"),
             "Upload and letterbox into `places` pictures at the address `input`. Returns sizes (width, height).")
        .def(
            "wait", [](const BoundHalves& self) { self.halves().wait(); }, no_gil)
        .def("finish", &finish, py::arg("output"),
             "Decode, NMS and download from the address `output`: per picture boxes, scores, class ids.")
        .def(
            "release", [](const BoundHalves& self) { self.halves().release(); }, no_gil,
            "In place of finish(): drops the frames, and ends a capture left open by this thread.")
        .def("close", &BoundHalves::close);
    py::class_<BoundMemory>(m, "GpuMemory", "Zeroed GPU memory that a network reads or writes.")
        .def(py::init<int, std::size_t>(), py::arg("device"), py::arg("bytes"))
        .def_property_readonly("address", &BoundMemory::address)
        .def_property_readonly("bytes", &BoundMemory::bytes)
        .def("fill", &BoundMemory::fill, py::arg("value"), no_gil)
        .def("read", &read, py::arg("bytes"), "A copy of the first bytes.")
        .def("close", &BoundMemory::close);
    py::class_<CaptureLock>(m, "CaptureLock",
                            "Held around what may not meet a graph capture, in this process, for a `with` block.")
        .def(py::init<>())
        .def("__enter__", &CaptureLock::enter)
        .def(
            "__exit__",
            [](CaptureLock& self, const py::object&, const py::object&, const py::object&) { self.leave(); },
            py::arg("kind"), py::arg("error"), py::arg("trace"));
    m.def("frame_buffer", &frame_buffer, py::arg("device"), py::arg("height"), py::arg("width"), py::arg("channels"),
          py::arg("color"), "A zeroed uint8 array in page-locked memory.");
}

}  // namespace edgeyolo
