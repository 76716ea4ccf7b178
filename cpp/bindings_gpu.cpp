// The GPU's classes, translated: engine files, the pipeline, frames in GPU and pinned memory.
#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include "bindings.hpp"
#include "bindings_arrays.hpp"
#include "error.hpp"
#include "pipeline.hpp"

namespace py = pybind11;

namespace edgeyolo {
namespace {

using TimeLimit = std::optional<std::chrono::nanoseconds>;
using DeviceArrays = py::typing::Tuple<DeviceArray, DeviceArray, DeviceArray>;

// One pipeline as Python sees it.
struct GpuPipeline {
    GpuPipeline(const std::shared_ptr<LoadedEngine>& engine, PipelineOptions options)
        : intake(std::make_shared<FrameIntake>(engine->device())), pipeline(engine, std::move(options)) {}

    std::shared_ptr<FrameIntake> intake;  // read and written atomically; empty once closed
    Pipeline pipeline;
};
using PipelineRef = std::shared_ptr<GpuPipeline>;

// The destructor waits for the GPU, which other Python threads need not do.
PipelineRef without_gil(std::unique_ptr<GpuPipeline> pipeline) {
    return PipelineRef(pipeline.release(), [](GpuPipeline* held) {
        if (Py_IsInitialized() && PyGILState_Check()) {
            const py::gil_scoped_release release;
            delete held;
        } else {
            delete held;
        }
    });
}

struct GpuTicket {
    PipelineRef owner;
    Ticket ticket;
    std::vector<Size> sizes;  // of the pictures
};

// A frame buffer that this array is the whole of; empty for any other array.
std::shared_ptr<FrameBuffer> frame_buffer_of(const py::array& array) {
    py::object base = array.base() ? py::reinterpret_borrow<py::object>(array.base()) : py::object(py::none());
    // Views of views: NumPy shortens the chain to very few links.
    for (int link = 0; link < 8 && py::isinstance<py::array>(base); ++link) {
        const auto next = py::reinterpret_borrow<py::array>(base);
        base = next.base() ? py::reinterpret_borrow<py::object>(next.base()) : py::object(py::none());
    }
    if (!py::isinstance<FrameBuffer>(base)) return nullptr;
    return base.cast<std::shared_ptr<FrameBuffer>>();
}

Frame host_frame(const py::array& array, const std::string& color) {
    const ImageView view = image_view(array, color);
    const auto buffer = frame_buffer_of(array);
    if (!buffer) return view;
    const ImageView whole = buffer->view();
    const bool same = view.data == whole.data && view.size == whole.size && view.format == whole.format &&
                      view.row_stride == whole.row_stride && view.pixel_stride == whole.pixel_stride &&
                      view.channel_stride == whole.channel_stride;
    // A crop of a frame buffer, or one whose channels are in the other order, is copied as any other array.
    if (same) return buffer;
    return view;
}

GpuTicket submit(const PipelineRef& self, const std::vector<py::object>& images, const std::string& color,
                 bool on_device, bool timings) {
    const TakenFrames taken = take_frames(images, color, std::atomic_load(&self->intake));
    SubmitOptions options;
    options.leave_on_device = on_device;
    options.timings = timings;
    const py::gil_scoped_release release;
    return {self, self->pipeline.submit(taken.frames, options), taken.sizes};
}

// Without a time limit the core sleeps until the GPU is done, which it always is in the end; with one it has to look
// again and again, in slices, so that Ctrl-C is heard.
template <class Fetch>
auto wait_for(std::optional<double> seconds, const Fetch& fetch) {
    using Clock = std::chrono::steady_clock;
    constexpr auto slice = std::chrono::milliseconds(100);
    constexpr double longest = 1e9;  // 31 years, which a clock can hold
    if (!seconds) {
        const py::gil_scoped_release release;
        return fetch(std::nullopt);
    }
    const std::chrono::duration<double> limit(std::min(*seconds, longest));
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);
    for (;;) {
        auto result = [&] {
            const py::gil_scoped_release release;
            const auto left = std::max(Clock::duration::zero(), end - Clock::now());
            return fetch(std::min<std::chrono::nanoseconds>(slice, left));
        }();
        if (result || Clock::now() >= end) return result;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

std::optional<std::vector<ResultArrays>> wait(const GpuTicket& self, std::optional<double> timeout) {
    const auto results =
        wait_for(timeout, [&](TimeLimit limit) { return self.owner->pipeline.wait(self.ticket, limit); });
    if (!results) return {};
    std::vector<ResultArrays> arrays;
    for (const Results& one : *results) arrays.push_back(as_arrays(one));
    return arrays;
}

std::optional<std::vector<DeviceArrays>> wait_on_device(const GpuTicket& self, std::optional<double> timeout) {
    auto found =
        wait_for(timeout, [&](TimeLimit limit) { return self.owner->pipeline.wait_on_device(self.ticket, limit); });
    if (!found) return {};
    const auto results = std::make_shared<const DeviceResults>(std::move(*found));
    std::vector<DeviceArrays> arrays;
    for (const DeviceResults::Picture& picture : results->pictures) {
        const auto array = [&](cuda::DevicePtr pointer, std::vector<std::int64_t> shape, dlpack::TypeCode code) {
            return DeviceArray{results, results->device, pointer, std::move(shape), {code, 32, 1}};
        };
        const std::int64_t count = picture.count;
        arrays.push_back(py::make_tuple(array(picture.boxes, {count, 4}, dlpack::floating),
                                        array(picture.scores, {count}, dlpack::floating),
                                        array(picture.class_ids, {count}, dlpack::signed_integer)));
    }
    return arrays;
}

// Milliseconds by stage; a stage that cannot be told apart is left out.
std::map<std::string, double> timings(const GpuTicket& self) {
    std::map<std::string, double> result;
    const auto measured = Pipeline::timings(self.ticket);
    if (!measured) return result;
    const auto put = [&](const char* name, float value) {
        if (!std::isnan(value)) result[name] = value;
    };
    put("upload", measured->upload);
    put("letterbox", measured->letterbox);
    put("network", measured->network);
    put("postprocess", measured->postprocess);
    put("frame", measured->frame);
    return result;
}

py::array frame_buffer(const PipelineRef& self, int height, int width, int channel_count, const std::string& color) {
    const PixelFormat format = pixel_format(color, channel_count);
    const auto buffer = [&] {
        const py::gil_scoped_release release;
        return self->pipeline.frame_buffer({width, height}, format);
    }();
    return as_array(buffer);
}

Facts graph_facts(const GraphStats& stats) {
    Facts facts;
    facts["path"] = path_name(stats.path);
    facts["reason"] = stats.reason;
    facts["captures"] = stats.captures;
    facts["failed_tries"] = stats.failed_tries;
    facts["replays"] = stats.replays;
    facts["enqueued"] = stats.enqueued;
    facts["executed"] = stats.executed;
    facts["fallbacks"] = stats.fallbacks;
    facts["graphs"] = stats.graphs;
    facts["capture_ms"] = stats.capture_ms;
    facts["device_bytes"] = stats.device_bytes;
    return facts;
}

Facts pipeline_info(const GpuPipeline& self) {
    const PipelineInfo info = self.pipeline.info();
    Facts facts;
    facts["graph"] = graph_facts(info.graph);
    facts["slots"] = info.slots;
    facts["batch"] = info.batch;
    facts["frames"] = info.frames;
    facts["device_bytes"] = info.device_bytes;
    facts["pinned_bytes"] = info.pinned_bytes;
    facts["scratch_bytes"] = info.scratch_bytes;
    return facts;
}

PipelineRef make_pipeline(const std::shared_ptr<LoadedEngine>& engine, const std::string& head, int classes,
                          std::pair<int, int> imgsz, float conf, double iou, int max_det, bool agnostic,
                          std::vector<std::uint8_t> allowed, int slots, bool graph, bool dla, bool embedded_nms,
                          py::object warn) {
    PipelineOptions options;
    options.slots = slots;
    options.graph = graph ? GraphMode::automatic : GraphMode::off;
    options.head = head_kind(head);
    options.classes = classes;
    options.thresholds = {conf, iou, max_det, agnostic, std::move(allowed)};
    options.target = {imgsz.second, imgsz.first};
    options.dla = dla;
    options.embedded_nms = embedded_nms;
    options.warn = [callback = hold(std::move(warn))](const std::string& message) {
        const py::gil_scoped_acquire gil;
        try {
            (*callback)(message);
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("edgeyolo");
        }
    };
    const py::gil_scoped_release release;
    return without_gil(std::make_unique<GpuPipeline>(engine, std::move(options)));
}

std::vector<Facts> tensor_facts(const LoadedEngine& self) {
    std::vector<Facts> all;
    for (const TensorInfo& tensor : self.engine().io()) {
        Facts facts;
        facts["name"] = tensor.name;
        facts["input"] = tensor.input;
        facts["dtype"] = tensor.dtype == DType::other ? tensor.dtype_text : dtype_name(tensor.dtype);
        facts["shape"] = tensor.shape;
        py::list profiles;
        for (const ProfileShape& profile : tensor.profiles) {
            py::dict shapes;
            shapes["min"] = profile.min;
            shapes["opt"] = profile.opt;
            shapes["max"] = profile.max;
            profiles.append(shapes);
        }
        facts["profiles"] = profiles;
        all.push_back(facts);
    }
    return all;
}

std::shared_ptr<LoadedEngine> open_engine(const EngineFile& file, int device, std::vector<std::string> folders,
                                          std::string adapters, int dla_core, bool plugins) {
    trt::Options options;
    options.folders = std::move(folders);
    options.adapter_folder = std::move(adapters);
    options.dla_core = dla_core;
    options.plugins = plugins;
    const py::gil_scoped_release release;
    auto loaded = LoadedEngine::open(file, device, options);
    // Its destructor waits for capture_mutex(), which a thread may hold that waits for the GIL.
    auto* engine = loaded.get();
    return {engine, [held = std::move(loaded)](LoadedEngine*) mutable {
                if (Py_IsInitialized() && PyGILState_Check()) {
                    const py::gil_scoped_release without_gil;
                    held.reset();
                } else {
                    held.reset();
                }
            }};
}

void bind_engine(py::module_& m) {
    py::class_<EngineFile>(m, "EngineFile", "A TensorRT plan, with or without a JSON header in front of it.")
        .def(py::init([](const std::filesystem::path& path) {
                 const py::gil_scoped_release release;
                 return EngineFile::read(path.string());
             }),
             py::arg("path"))
        .def_property_readonly("header", [](const EngineFile& self) { return std::string(self.header()); })
        .def_property_readonly("plan_size", &EngineFile::plan_size);

    py::class_<LoadedEngine, std::shared_ptr<LoadedEngine>>(m, "LoadedEngine",
                                                            "A plan on one GPU, before a head is chosen.")
        .def(py::init(&open_engine), py::arg("file"), py::kw_only(), py::arg("device"), py::arg("folders"),
             py::arg("adapters"), py::arg("dla_core") = -1, py::arg("plugins") = false)
        .def_property_readonly("plan_digest", &LoadedEngine::plan_digest)
        .def_property_readonly("tensorrt", [](const LoadedEngine& self) { return self.library().text(); })
        .def_property_readonly("tensorrt_version",
                               [](const LoadedEngine& self) { return trt::version_text(self.library().version); })
        .def_property_readonly("device_name", [](const LoadedEngine& self) { return self.device()->name; })
        .def_property_readonly("tensors", &tensor_facts)
        .def_property_readonly("default_target",  // (height, width)
                               [](const LoadedEngine& self) {
                                   const Size size = self.default_target();
                                   return std::pair(size.height, size.width);
                               })
        .def_property_readonly("largest_batch", &LoadedEngine::largest_batch)
        .def(
            "output_shape",
            [](const LoadedEngine& self, std::pair<int, int> imgsz, int batch) {
                const py::gil_scoped_release release;
                return self.output_shape({imgsz.second, imgsz.first}, batch);
            },
            py::arg("imgsz"), py::arg("batch"), "For `batch` pictures of (height, width) pixels.");
}

void bind_pipeline(py::module_& m) {
    py::class_<FrameBuffer, std::shared_ptr<FrameBuffer>>(m, "FrameBuffer",
                                                          "Page-locked memory behind Detector.frame_buffer().");
    py::class_<GpuTicket>(m, "Ticket", "Pictures in work. Results are handed out once.")
        .def("done",
             [](const GpuTicket& self) {
                 const py::gil_scoped_release release;
                 return self.owner->pipeline.done(self.ticket);
             })
        .def("wait", &wait, py::arg("timeout") = py::none(),
             "Per picture boxes, scores, class ids; None when `timeout` seconds pass first.")
        .def("wait_on_device", &wait_on_device, py::arg("timeout") = py::none())
        .def("timings", &timings)
        .def_property_readonly("sizes", [](const GpuTicket& self) {  // (width, height) per picture
            std::vector<std::pair<int, int>> sizes;
            for (const Size size : self.sizes) sizes.emplace_back(size.width, size.height);
            return sizes;
        });
    py::class_<GpuPipeline, PipelineRef>(m, "Pipeline", "Slots on one GPU. Thread-safe.")
        .def(py::init(&make_pipeline), py::arg("engine"), py::kw_only(), py::arg("head"), py::arg("classes"),
             py::arg("imgsz"), py::arg("conf"), py::arg("iou"), py::arg("max_det"), py::arg("agnostic"),
             py::arg("allowed"), py::arg("slots"), py::arg("graph"), py::arg("dla"), py::arg("embedded_nms"),
             py::arg("warn"))
        .def_property_readonly("batch", [](const GpuPipeline& self) { return self.pipeline.batch(); })
        .def("submit", &submit, py::arg("images"), py::arg("color"), py::arg("on_device") = false,
             py::arg("timings") = false, "1 to `batch` images, in host or GPU memory.")
        .def("frame_buffer", &frame_buffer, py::arg("height"), py::arg("width"), py::arg("channels"), py::arg("color"))
        .def("info", &pipeline_info)
        .def("close", [](GpuPipeline& self) {
            // Calls that use the intake hold it; the streams go with the last of them.
            auto intake = std::atomic_exchange(&self.intake, std::shared_ptr<FrameIntake>());
            const py::gil_scoped_release release;
            self.pipeline.close();
            intake.reset();
        });
}

}  // namespace

TakenFrames take_frames(const std::vector<py::object>& images, const std::string& color,
                        const std::shared_ptr<FrameIntake>& intake) {
    TakenFrames taken;
    for (const py::object& image : images) {
        if (py::isinstance<py::array>(image)) {
            taken.frames.push_back(host_frame(py::reinterpret_borrow<py::array>(image), color));
        } else {
            check(intake != nullptr, "this detector was closed: load the model again");
            taken.lanes.push_back(intake->take(image, color));
            taken.frames.emplace_back(taken.lanes.back().image);
        }
        taken.sizes.push_back(size_of(taken.frames.back()));
    }
    return taken;
}

py::array as_array(const std::shared_ptr<FrameBuffer>& buffer) {
    std::fill_n(buffer->data(), buffer->bytes(), std::uint8_t{0});
    const auto [width, height] = buffer->size();
    return py::array_t<std::uint8_t>({height, width, channels(buffer->format())}, buffer->data(), py::cast(buffer));
}

void bind_gpu(py::module_& m) {
    bind_arrays(m);
    bind_engine(m);
    bind_pipeline(m);
    bind_devices(m);
    bind_halves(m);
}

}  // namespace edgeyolo
