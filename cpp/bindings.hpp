// What the bindings' files share. pybind11 stays inside them.
#pragma once
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/typing.h>

#include <memory>
#include <string>
#include "decode.hpp"
#include "image.hpp"
#include "postprocess.hpp"

namespace edgeyolo {

// The order of an image's channels by the caller's word for it and by their number.
PixelFormat pixel_format(const std::string& color, pybind11::ssize_t channel_count);
// (H, W) or (H, W, C) uint8 with any strides. The view is valid while `array` lives.
ImageView image_view(const pybind11::array& array, const std::string& color);
HeadKind head_kind(const std::string& kind);
// boxes (N, 4) float32, scores (N,) float32, class ids (N,) int64: arrays of their own.
using ResultArrays =
    pybind11::typing::Tuple<pybind11::array_t<float>, pybind11::array_t<float>, pybind11::array_t<std::int64_t>>;
ResultArrays as_arrays(const Results& results);

// A dict for Python code to read: dict[str, Any].
using Facts = pybind11::typing::Dict<pybind11::str, pybind11::object>;

// Keeps a Python object alive from C++ code that may drop it on any thread, without the GIL.
std::shared_ptr<pybind11::object> hold(pybind11::object object);

// Everything of the GPU: bindings_gpu.cpp, and by it bindings_arrays.cpp and bindings_devices.cpp.
void bind_gpu(pybind11::module_& m);
void bind_devices(pybind11::module_& m);
void bind_halves(pybind11::module_& m);

}  // namespace edgeyolo
