// What is there and what works, for doctor, selfcheck and the tests: driver, devices, TensorRT, the GPU's single steps.
#include <pybind11/stl.h>

#include <memory>
#include "bindings.hpp"
#include "error.hpp"
#include "gpu_steps.hpp"
#include "kernels.hpp"
#include "trt/loader.hpp"

namespace py = pybind11;

namespace edgeyolo {
namespace {

// A device's primary context, made current for a `with` block, and the thread kept out of other threads' captures.
class CurrentDevice {
public:
    explicit CurrentDevice(int ordinal) : device_(cuda::Device::open(ordinal)) {}
    // Entered and never left: its thread is gone, by fork() or at the end of the process, and with it what to undo.
    ~CurrentDevice() { (void)guard_.release(); }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    void enter() {
        check(!guard_, "this device is current already");
        guard_ = std::make_unique<cuda::ContextGuard>(*device_);
    }
    void leave() { guard_.reset(); }

private:
    cuda::DeviceRef device_;
    std::unique_ptr<cuda::ContextGuard> guard_;
};

Facts device_facts(int ordinal) {
    const auto device = cuda::Device::open(ordinal);
    const cuda::ContextGuard guard(*device);
    const cuda::MemoryInfo memory = cuda::memory_info(*device);
    Facts facts;
    facts["ordinal"] = ordinal;
    facts["name"] = device->name;
    facts["compute_capability"] = std::to_string(device->compute_major) + "." + std::to_string(device->compute_minor);
    facts["multiprocessors"] = device->multiprocessors;
    facts["integrated"] = device->integrated;
    facts["memory"] = memory.total;
    facts["free"] = memory.free;
    return facts;
}

Facts driver_facts() {
    const cuda::Driver& driver = cuda::driver();
    Facts facts;
    facts["library"] = driver.library;
    facts["cuda"] = std::to_string(driver.version / 1000) + "." + std::to_string(driver.version % 1000 / 10);
    facts["devices"] = driver.device_count;
    return facts;
}

std::string find_tensorrt(std::vector<std::string> folders, std::string adapters) {
    trt::Options options;
    options.folders = std::move(folders);
    options.adapter_folder = std::move(adapters);
    return trt::find_library(options).text();
}

// One picture through the GPU's steps and a given network output: the letterboxed planes, boxes, scores, class ids.
py::typing::Tuple<py::array_t<float>, ResultArrays> run_steps(GpuSteps& self, const py::array& image,
                                                              const py::array_t<float, py::array::c_style>& output,
                                                              const std::string& color) {
    const ImageView view = image_view(image, color);
    const auto outcome = [&] {
        const py::gil_scoped_release release;
        return self.run(view, output.data());
    }();
    py::array_t<float> planes(static_cast<py::ssize_t>(outcome.planes.size()));
    std::copy(outcome.planes.begin(), outcome.planes.end(), planes.mutable_data());
    return py::make_tuple(planes, as_arrays(outcome.results));
}

}  // namespace

void bind_devices(py::module_& m) {
    py::class_<CurrentDevice>(m, "CurrentDevice", "Makes a GPU current in this thread, for a `with` block.")
        .def(py::init<int>(), py::arg("ordinal"))
        .def("__enter__", &CurrentDevice::enter)
        .def(
            "__exit__",
            [](CurrentDevice& self, const py::object&, const py::object&, const py::object&) { self.leave(); },
            py::arg("kind"), py::arg("error"), py::arg("trace"));
    py::class_<GpuSteps>(m, "GpuSteps", "Letterbox, decode and NMS of the GPU alone, to compare them with the CPU's.")
        .def(py::init([](int device, std::pair<int, int> imgsz, const std::string& head, int rows, int classes,
                         float conf, double iou, int max_det, bool agnostic) {
                 return std::make_unique<GpuSteps>(device, Size{imgsz.second, imgsz.first},
                                                   Head{head_kind(head), rows, classes},
                                                   Postprocessor::Options{conf, iou, max_det, agnostic, {}});
             }),
             py::arg("device"), py::kw_only(), py::arg("imgsz"), py::arg("head"), py::arg("rows"), py::arg("classes"),
             py::arg("conf"), py::arg("iou"), py::arg("max_det"), py::arg("agnostic"))
        .def("run", &run_steps, py::arg("image").noconvert(), py::arg("output"), py::arg("color") = "bgr",
             "The letterboxed planes (flat), then boxes, scores, class ids that `output` gives for this image.");
    m.def(
        "current_context",
        [] {
            cuda::ContextHandle context = nullptr;
            const cuda::Driver& driver = cuda::driver();
            driver.check(driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
            return reinterpret_cast<std::uintptr_t>(context);
        },
        "The CUDA context that is current in this thread; 0 for none.");
    m.def("has_gpu_kernels", &has_gpu_kernels, "Whether this build has GPU kernels: it was made with nvcc.");
    m.def("driver", &driver_facts, "The CUDA driver, opened by this. Raises DeviceError without one.");
    m.def("device", &device_facts, py::arg("ordinal"), "A GPU and its memory. Makes its context.");
    m.def("find_tensorrt", &find_tensorrt, py::arg("folders"), py::arg("adapters"),
          "The TensorRT library that would be used. Raises EngineError, saying what was looked for.");
}

}  // namespace edgeyolo
