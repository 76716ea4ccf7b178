#include "bindings_arrays.hpp"
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include "bindings.hpp"
#include "error.hpp"

namespace py = pybind11;

namespace edgeyolo {
namespace {

constexpr const char* expected_shapes = "an image is (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), with any strides";

std::string text(const std::vector<std::int64_t>& values) {
    return py::str(py::tuple(py::cast(values))).cast<std::string>();
}

// Shape and strides (bytes) of a uint8 array to an image. `pixels` is the address of its first element.
DeviceImage device_image(cuda::DevicePtr pixels, const std::vector<std::int64_t>& shape,
                         const std::vector<std::int64_t>& strides, const std::string& color) {
    const bool has_channels = shape.size() == 3;
    const bool channels_first = has_channels && shape[2] > 4 && (shape[0] == 1 || shape[0] == 3 || shape[0] == 4);
    check((shape.size() == 2 || has_channels) && !channels_first && (!has_channels || shape[2] != 2),
          std::string(expected_shapes) + "; found an array of the shape " + text(shape) +
              (channels_first ? ": the channels come last, use tensor.permute(1, 2, 0)" : ""));
    for (int axis = 0; axis < 2; ++axis)
        check(shape[axis] >= 1 && shape[axis] <= 32767,
              "an image is 1 to 32767 pixels wide and high, found an array of the shape " + text(shape));
    DeviceImage image;
    image.pixels = pixels;
    image.size = {static_cast<int>(shape[1]), static_cast<int>(shape[0])};
    image.row_stride = strides[0];
    image.pixel_stride = strides[1];
    image.channel_stride = has_channels ? strides[2] : 1;
    image.format = pixel_format(color, has_channels ? shape[2] : 1);
    return image;
}

std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    for (std::size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
    return strides;
}

void check_type(const std::string& found) {
    throw InvalidInput("an image holds uint8 values, found " + found +
                       "; use (tensor * 255).round().to(torch.uint8) for values in 0..1");
}

// The tensor of a capsule, which is used up by this. It goes back to its library when the last reference dies.
struct Imported {
    dlpack::Tensor tensor{};
    std::shared_ptr<const void> owner;
};

template <class Managed>
Imported own(Managed* managed) {
    Imported imported;
    imported.tensor = managed->tensor;
    imported.owner = std::shared_ptr<const void>(managed, [](Managed* held) {
        if (!held->deleter || !Py_IsInitialized()) return;
        const py::gil_scoped_acquire gil;
        held->deleter(held);
    });
    return imported;
}

// Null where the library does not offer it, or in another major version.
const dlpack::ExchangeApi* exchange_api(const py::object& object) {
    const py::handle type = py::type::handle_of(object);
    if (!py::hasattr(type, dlpack::exchange_attribute)) return nullptr;
    const py::object capsule = type.attr(dlpack::exchange_attribute);
    if (!PyCapsule_IsValid(capsule.ptr(), dlpack::exchange_name)) return nullptr;
    const auto* api =
        static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::exchange_name));
    return api->version.major == dlpack::our_version.major ? api : nullptr;
}

template <class Managed>
Imported import_capsule(PyObject* capsule, const char* name, const char* used) {
    auto* managed = static_cast<Managed*>(PyCapsule_GetPointer(capsule, name));
    if (!managed) throw py::error_already_set();
    if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>)
        check(managed->version.major <= dlpack::our_version.major,
              "this array speaks DLPack " + std::to_string(managed->version.major) + ", known is DLPack 1");
    if (PyCapsule_SetName(capsule, used) != 0) throw py::error_already_set();
    return own(managed);
}

Imported import(const py::object& object, py::int_ stream) {
    py::dict arguments;
    arguments["stream"] = std::move(stream);
    arguments["max_version"] = py::make_tuple(dlpack::our_version.major, dlpack::our_version.minor);
    const py::object method = object.attr("__dlpack__");
    py::object capsule;
    try {
        capsule = method(**arguments);
    } catch (py::error_already_set& error) {
        // Libraries older than DLPack 1.0 do not know the argument.
        if (!error.matches(PyExc_TypeError)) throw;
        PyDict_DelItemString(arguments.ptr(), "max_version");
        capsule = method(**arguments);
    }
    if (PyCapsule_IsValid(capsule.ptr(), dlpack::versioned_name))
        return import_capsule<dlpack::ManagedTensorVersioned>(capsule.ptr(), dlpack::versioned_name,
                                                              dlpack::versioned_used);
    check(PyCapsule_IsValid(capsule.ptr(), dlpack::legacy_name), "__dlpack__() must return an unused DLPack capsule");
    return import_capsule<dlpack::ManagedTensor>(capsule.ptr(), dlpack::legacy_name, dlpack::legacy_used);
}

// What a capsule of ours keeps until its taker calls the deleter.
template <class Managed>
struct Exported {
    Managed managed{};
    DeviceArray array;
    std::vector<std::int64_t> strides;
};

template <class Managed>
py::capsule export_capsule(const DeviceArray& array, const char* name) {
    auto exported = std::make_unique<Exported<Managed>>();
    exported->array = array;
    exported->strides = row_major(array.shape);
    Managed& managed = exported->managed;
    managed.tensor = {reinterpret_cast<void*>(array.pointer),
                      {dlpack::cuda, array.device->ordinal},
                      static_cast<std::int32_t>(array.shape.size()),
                      array.dtype,
                      exported->array.shape.data(),
                      exported->strides.data(),
                      0};
    managed.context = exported.get();
    managed.deleter = [](Managed* held) { delete static_cast<Exported<Managed>*>(held->context); };
    if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) managed.version = dlpack::our_version;
    // The destructor of a capsule that nobody took: a taken one has another name.
    PyObject* capsule = PyCapsule_New(&managed, name, [](PyObject* self) {
        const char* own = std::is_same_v<Managed, dlpack::ManagedTensor> ? dlpack::legacy_name : dlpack::versioned_name;
        if (!PyCapsule_IsValid(self, own)) return;
        auto* held = static_cast<Managed*>(PyCapsule_GetPointer(self, own));
        held->deleter(held);
    });
    if (!capsule) throw py::error_already_set();
    exported.release();
    return py::reinterpret_steal<py::capsule>(capsule);
}

// The stream is of no concern: the array is complete.
py::capsule to_dlpack(const DeviceArray& array, const std::optional<py::object>&,
                      const std::optional<std::pair<int, int>>& version,
                      const std::optional<std::pair<int, int>>& device, const std::optional<bool>& copy) {
    if (device && *device != std::pair<int, int>(dlpack::cuda, array.device->ordinal))
        throw py::buffer_error("this array stays on its GPU; copy it with to_numpy()");
    if (copy.value_or(false)) throw py::buffer_error("this array is shared without a copy: copy it after taking it");
    if (version && version->first >= 1)
        return export_capsule<dlpack::ManagedTensorVersioned>(array, dlpack::versioned_name);
    return export_capsule<dlpack::ManagedTensor>(array, dlpack::legacy_name);
}

std::string typestr(const DeviceArray& array) {
    return std::string("<") + (array.dtype.code == dlpack::floating ? "f" : "i") + std::to_string(array.dtype.bits / 8);
}

Facts cuda_array_interface(const DeviceArray& array) {
    Facts result;
    result["shape"] = py::tuple(py::cast(array.shape));
    result["typestr"] = typestr(array);
    result["data"] = py::make_tuple(array.pointer, false);
    result["strides"] = py::none();
    result["stream"] = py::none();
    result["version"] = 3;
    return result;
}

py::array to_numpy(const DeviceArray& array) {
    py::array result(py::dtype(typestr(array)), array.shape);
    void* to = result.mutable_data();
    const std::size_t bytes = array.bytes();
    if (bytes == 0) return result;
    const py::gil_scoped_release release;
    const cuda::ContextGuard guard(*array.device);
    const cuda::Stream stream(array.device);
    stream.copy_to_host(to, array.pointer, bytes);
    stream.synchronize();
    return result;
}

DeviceImage tensor_image(const dlpack::Tensor& tensor, const std::string& color) {
    if (tensor.dtype.code != dlpack::unsigned_integer || tensor.dtype.bits != 8 || tensor.dtype.lanes != 1)
        check_type("DLPack type " + std::to_string(tensor.dtype.code) + " of " + std::to_string(tensor.dtype.bits) +
                   " bits");
    const std::vector<std::int64_t> shape(tensor.shape, tensor.shape + tensor.ndim);
    const auto strides =
        tensor.strides ? std::vector<std::int64_t>(tensor.strides, tensor.strides + tensor.ndim) : row_major(shape);
    const auto pixels = static_cast<cuda::DevicePtr>(reinterpret_cast<std::uintptr_t>(tensor.data));
    return device_image(pixels + tensor.byte_offset, shape, strides, color);
}

}  // namespace

std::size_t DeviceArray::bytes() const {
    std::size_t count = dtype.bits / 8;
    for (const auto side : shape) count *= static_cast<std::size_t>(side);
    return count;
}

FrameIntake::Taken FrameIntake::take(const py::object& object, const std::string& color) {
    Taken taken;
    // DLPack first: only there is the producer's stream known, or can the producer be told which stream is to wait.
    if (const dlpack::ExchangeApi* api = exchange_api(object))
        take_exchanged(*api, object, color, taken);
    else if (py::hasattr(object, "__dlpack__"))
        take_dlpack(object, color, taken);
    else
        take_cuda_array(object, color, taken);
    return taken;
}

void FrameIntake::check_device(int type, int id) const {
    check(type == dlpack::cuda || type == dlpack::cuda_managed,
          "expected an image in the memory of an NVIDIA GPU, found DLPack device type " + std::to_string(type));
    check(type == dlpack::cuda_managed || id == device_->ordinal,
          "the image is on GPU " + std::to_string(id) + ", this detector runs on GPU " +
              std::to_string(device_->ordinal) + "; copy it there, or load the model for that device");
}

void FrameIntake::take_exchanged(const dlpack::ExchangeApi& api, const py::object& object, const std::string& color,
                                 Taken& taken) {
    dlpack::ManagedTensorVersioned* managed = nullptr;
    if (api.from_object_no_sync(object.ptr(), &managed) != 0) throw py::error_already_set();
    Imported imported = own(managed);
    const dlpack::Device device = imported.tensor.device;
    check_device(device.type, device.id);
    void* stream = nullptr;
    if (api.current_work_stream(dlpack::cuda, device_->ordinal, &stream) != 0) throw py::error_already_set();
    // The library's own stream, which ours waits for. Null names the legacy default stream, whose number is 1.
    const auto legacy = reinterpret_cast<cuda::StreamHandle>(std::uintptr_t{1});
    taken.image = tensor_image(imported.tensor, color);
    taken.image.producer = stream ? static_cast<cuda::StreamHandle>(stream) : legacy;
    taken.image.keep = std::move(imported.owner);
}

void FrameIntake::take_dlpack(const py::object& object, const std::string& color, Taken& taken) {
    const auto [type, id] = object.attr("__dlpack_device__")().cast<std::pair<int, int>>();
    check_device(type, id);
    taken.lane = lanes_.take();
    if (!taken.lane->stream) {
        const cuda::ContextGuard guard(*device_);
        taken.lane->stream = cuda::Stream(device_);
    }
    const auto handle = taken.lane->stream.get();
    Imported imported = import(object, py::int_(reinterpret_cast<std::uintptr_t>(handle)));
    taken.image = tensor_image(imported.tensor, color);
    taken.image.producer = handle;
    taken.image.keep = std::move(imported.owner);
}

void FrameIntake::take_cuda_array(const py::object& object, const std::string& color, Taken& taken) {
    const auto found = object.attr("__cuda_array_interface__").cast<py::dict>();
    const auto get = [&](const char* key) -> py::object {
        return found.contains(key) ? py::object(found[key]) : py::object(py::none());
    };
    const auto type = get("typestr").cast<std::string>();
    if (type.size() < 3 || type.substr(1) != "u1") check_type("'" + type + "'");
    check(get("mask").is_none(), "an image has no mask");
    const auto shape = get("shape").cast<std::vector<std::int64_t>>();
    const py::object strides = get("strides");
    const auto pixels = get("data").cast<py::tuple>()[0].cast<cuda::DevicePtr>();
    taken.image = device_image(pixels, shape,
                               strides.is_none() ? row_major(shape) : strides.cast<std::vector<std::int64_t>>(), color);
    const py::object stream = get("stream");
    if (!stream.is_none()) {
        const auto number = stream.cast<std::uintptr_t>();
        check(number != 0, "__cuda_array_interface__ names stream 0, which the standard forbids: 1 is the default one");
        taken.image.producer = reinterpret_cast<cuda::StreamHandle>(number);
    }
    taken.image.keep = hold(object);
}

void bind_arrays(py::module_& m) {
    py::class_<DeviceArray>(m, "DeviceArray",
                            "A row-major array in GPU memory of its own, complete: for torch.from_dlpack and the like.")
        .def_property_readonly("shape", [](const DeviceArray& self) { return py::tuple(py::cast(self.shape)); })
        .def_property_readonly("dtype", [](const DeviceArray& self) { return py::dtype(typestr(self)); })
        .def_property_readonly("device", [](const DeviceArray& self) { return self.device->ordinal; })
        .def("__len__", [](const DeviceArray& self) { return self.shape.at(0); })
        .def("__dlpack__", &to_dlpack, py::kw_only(), py::arg("stream") = py::none(),
             py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(), py::arg("copy") = py::none())
        .def("__dlpack_device__",
             [](const DeviceArray& self) { return std::pair<int, int>(dlpack::cuda, self.device->ordinal); })
        .def_property_readonly("__cuda_array_interface__", &cuda_array_interface)
        .def("to_numpy", &to_numpy, "A copy in host memory.");
}

}  // namespace edgeyolo
