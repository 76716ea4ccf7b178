// Translation only: arrays, the GIL, exceptions. What YOLO means is decided elsewhere.
#include "bindings.hpp"
#include <pybind11/stl.h>

#include <optional>
#include "error.hpp"
#include "letterbox.hpp"
#include "live.hpp"
#include "pool.hpp"
#include "postprocess.hpp"

namespace py = pybind11;
using namespace edgeyolo;

namespace edgeyolo {
namespace {

// An array of its own: the result outlives the workspace that it is read from.
template <class To, class From>
py::array_t<To> copy(const std::vector<From>& values, std::vector<py::ssize_t> shape) {
    py::array_t<To> array(std::move(shape));
    std::copy(values.begin(), values.end(), array.mutable_data());
    return array;
}

}  // namespace

PixelFormat pixel_format(const std::string& name, py::ssize_t channel_count) {
    check(name == "bgr" || name == "rgb", "color must be 'bgr' or 'rgb', found '" + name + "'");
    const bool bgr = name == "bgr";
    switch (channel_count) {
        case 1: return PixelFormat::gray;
        case 3: return bgr ? PixelFormat::bgr : PixelFormat::rgb;
        case 4: return bgr ? PixelFormat::bgra : PixelFormat::rgba;
        default: throw InvalidInput("an image has 1, 3 or 4 channels, found " + std::to_string(channel_count));
    }
}

ImageView image_view(const py::array& array, const std::string& color) {
    check(array.dtype().is(py::dtype::of<std::uint8_t>()),
          "an image is a uint8 array, found " + py::str(array.dtype()).cast<std::string>());
    check(array.ndim() == 2 || array.ndim() == 3,
          "an image has the shape (H, W) or (H, W, C), found " + std::to_string(array.ndim()) + " dimensions");
    const bool has_channels = array.ndim() == 3;
    ImageView view;
    view.format = pixel_format(color, has_channels ? array.shape(2) : 1);
    for (int axis = 0; axis < 2; ++axis)
        check(array.shape(axis) >= 1 && array.shape(axis) <= 32767,
              "an image is 1 to 32767 pixels wide and high, found " + std::to_string(array.shape(1)) + " x " +
                  std::to_string(array.shape(0)));
    view.data = static_cast<const std::uint8_t*>(array.data());
    view.size = {static_cast<int>(array.shape(1)), static_cast<int>(array.shape(0))};
    view.row_stride = array.strides(0);
    view.pixel_stride = array.strides(1);
    view.channel_stride = has_channels ? array.strides(2) : 1;
    return view;
}

HeadKind head_kind(const std::string& kind) {
    if (kind == "raw") return HeadKind::raw;
    if (kind == "raw_transposed") return HeadKind::raw_transposed;
    if (kind == "yolov5") return HeadKind::yolov5;
    if (kind == "end2end") return HeadKind::end2end;
    throw InvalidInput("head must be 'raw', 'raw_transposed', 'yolov5' or 'end2end', found '" + kind + "'");
}

ResultArrays as_arrays(const Results& results) {
    const auto count = static_cast<py::ssize_t>(results.size());
    return py::make_tuple(copy<float>(results.boxes, {count, 4}), copy<float>(results.scores, {count}),
                          copy<std::int64_t>(results.class_ids, {count}));
}

std::shared_ptr<py::object> hold(py::object object) {
    return {new py::object(std::move(object)), [](py::object* held) {
                // At the interpreter's end there is nothing left to free it with.
                if (!Py_IsInitialized()) return;
                const py::gil_scoped_acquire gil;
                delete held;
            }};
}

}  // namespace edgeyolo

namespace {

using LetterboxPool = Pool<LetterboxWorkspace>;

// C++ errors become the classes of edgeyolo/errors.py.
void translate(std::exception_ptr error) {
    const auto raise = [](const char* name, const char* message) {
        const py::object type = py::module_::import("edgeyolo.errors").attr(name);
        PyErr_SetString(type.ptr(), message);
    };
    try {
        if (error) std::rethrow_exception(error);
    } catch (const InvalidInput& e) {
        raise("InvalidInput", e.what());
    } catch (const EngineError& e) {
        raise("EngineError", e.what());
    } catch (const DeviceError& e) {
        raise("DeviceError", e.what());
    }
}

Isa isa_by_name(const std::optional<std::string>& wanted) {
    if (!wanted) return best_isa();
    for (const Isa isa : available_isas())
        if (*wanted == name(isa)) return isa;
    throw InvalidInput("this machine cannot run the instruction set '" + *wanted + "'");
}

// The output of one picture as a contiguous float32 matrix, and what it means.
Head head_of(const std::string& kind, const py::array& output, int classes) {
    Head head{head_kind(kind), 0, classes};
    check(output.dtype().is(py::dtype::of<float>()) && output.ndim() == 2 && (output.flags() & py::array::c_style),
          "the network's output must be a C-contiguous float32 matrix per picture");
    const bool raw = head.kind == HeadKind::raw;
    head.rows = static_cast<int>(output.shape(raw ? 1 : 0));
    const py::ssize_t columns = output.shape(raw ? 0 : 1);
    const int expected = head.kind == HeadKind::end2end ? 6 : head.kind == HeadKind::yolov5 ? 5 + classes : 4 + classes;
    check(columns == expected, "the network's output has " + std::to_string(columns) + " values per box, a '" + kind +
                                   "' head of " + std::to_string(classes) + " classes has " + std::to_string(expected));
    return head;
}

ResultArrays postprocess(Postprocessor& self, const py::array& output, const std::string& kind, int classes,
                         const Letterbox& geometry, const std::optional<std::string>& isa) {
    const Head head = head_of(kind, output, classes);
    const auto* data = static_cast<const float*>(output.data());
    const Isa chosen = isa_by_name(isa);
    const Postprocessor::Lease workspace = [&] {
        const py::gil_scoped_release release;
        return self.run(data, head, geometry, chosen);
    }();
    return as_arrays(workspace->results);
}

// `out` is (3, H, W) float32, C-contiguous: one picture of the network's input.
Letterbox letterbox_into(LetterboxPool& pool, const py::array& image, py::array& out, const std::string& color,
                         const std::optional<std::string>& isa, const std::optional<Letterbox>& before) {
    const ImageView view = image_view(image, color);
    check(out.dtype().is(py::dtype::of<float>()) && out.ndim() == 3 && out.shape(0) == 3 &&
              (out.flags() & py::array::c_style) && out.writeable(),
          "out must be a writable, C-contiguous float32 array of the shape (3, H, W)");
    const Letterbox geometry = fit(view.size, {static_cast<int>(out.shape(2)), static_cast<int>(out.shape(1))});
    auto* planes = static_cast<float*>(out.mutable_data());
    const Isa chosen = isa_by_name(isa);
    const py::gil_scoped_release release;
    letterbox(view, geometry, planes, *pool.take(), chosen, before ? &*before : nullptr);
    return geometry;
}

py::array_t<float> boxes_to_source(const Letterbox& geometry, const py::array_t<float, py::array::c_style>& boxes) {
    check(boxes.ndim() == 2 && boxes.shape(1) == 4, "boxes must be an array of the shape (N, 4)");
    py::array_t<float> result({boxes.shape(0), py::ssize_t{4}});
    std::copy(boxes.data(), boxes.data() + boxes.size(), result.mutable_data());
    to_source(geometry, result.mutable_data(), static_cast<int>(boxes.shape(0)));
    return result;
}

py::dict live_counts() {
    py::dict counts;
    const LiveCounters& count = live();
    counts["letterbox_workspaces"] = count.letterbox_workspaces.load();
    counts["postprocessors"] = count.postprocessors.load();
    counts["workspaces"] = count.workspaces.load();
    counts["devices"] = count.devices.load();
    counts["streams"] = count.streams.load();
    counts["events"] = count.events.load();
    counts["modules"] = count.modules.load();
    counts["graphs"] = count.graphs.load();
    counts["graph_execs"] = count.graph_execs.load();
    counts["device_buffers"] = count.device_buffers.load();
    counts["device_bytes"] = count.device_bytes.load();
    counts["pinned_buffers"] = count.pinned_buffers.load();
    counts["pinned_bytes"] = count.pinned_bytes.load();
    return counts;
}

}  // namespace

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
    m.doc() = "The native core of edgeyolo. Private: use the edgeyolo package.";
    py::register_exception_translator(&translate);
#ifdef EDGEYOLO_VERSION
    m.attr("__version__") = EDGEYOLO_VERSION;
#endif

    py::class_<Letterbox>(m, "Letterbox",
                          "Where a picture lies inside the network's input. Sizes are (width, height) in pixels.")
        .def(py::init([](std::pair<int, int> source, std::pair<int, int> target) {
                 return fit({source.first, source.second}, {target.first, target.second});
             }),
             py::arg("source"), py::arg("target"))
        .def_property_readonly("source", [](const Letterbox& g) { return std::pair(g.source.width, g.source.height); })
        .def_property_readonly("target", [](const Letterbox& g) { return std::pair(g.target.width, g.target.height); })
        .def_property_readonly("resized",
                               [](const Letterbox& g) { return std::pair(g.resized.width, g.resized.height); })
        .def_readonly("left", &Letterbox::left)
        .def_readonly("top", &Letterbox::top)
        .def("to_source", &boxes_to_source, py::arg("boxes"),
             "Boxes (N, 4) xyxy float32 from input pixels to the picture's pixels, clipped to it.");

    py::class_<LetterboxPool>(m, "LetterboxPool",
                              "Scratch memory of letterbox calls; any number of threads may use it at once.")
        .def(py::init<>())
        .def("run", &letterbox_into, py::arg("image").noconvert(), py::arg("out").noconvert(), py::arg("color") = "bgr",
             py::arg("isa") = py::none(), py::arg("before") = py::none(),
             "Letterbox a uint8 picture (H, W[, 1|3|4]) of any strides into out (3, H, W) float32 RGB / 255.\n\n"
             "before: what the last call for this `out` returned, when nobody else has written to it since; a border\n"
             "that is the same is then not written again.");

    py::class_<Postprocessor>(m, "Postprocessor",
                              "Network output > candidates > NMS > boxes in the picture's pixels. Thread-safe.")
        .def(py::init([](float conf, double iou, int max_det, bool agnostic, std::vector<std::uint8_t> allowed) {
                 return std::make_unique<Postprocessor>(
                     Postprocessor::Options{conf, iou, max_det, agnostic, std::move(allowed)});
             }),
             py::kw_only(), py::arg("conf"), py::arg("iou"), py::arg("max_det"), py::arg("agnostic"),
             py::arg("allowed"))
        .def("run", &postprocess, py::arg("output").noconvert(), py::arg("head"), py::arg("classes"),
             py::arg("geometry"), py::arg("isa") = py::none(),
             "Returns boxes (N, 4) float32 xyxy, scores (N,) float32 and class ids (N,) int64, best first.");

    m.def(
        "isas",
        [] {
            std::vector<std::string> names;
            for (const Isa isa : available_isas()) names.emplace_back(name(isa));
            return names;
        },
        "Instruction sets that this machine can run, 'scalar' first, the one in use last.");
    m.def("live", &live_counts, "Objects of the core that are alive, by kind, and bytes of GPU and pinned memory.");
    bind_gpu(m);
}
