"""Images in the memory of a GPU, made with the driver alone: what torch and CuPy would hand to the detector."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeyolo import _core

CUDA, UNSIGNED = 2, 1
python = ctypes.pythonapi
python.PyCapsule_New.restype = ctypes.py_object
python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
python.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


class Driver:
    """Calls of the driver that the core has opened, on one device. Works on the simulated and on a real one.

    As other libraries of the process make them: the thread's capture mode stays what it is.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self._device = _core.CurrentDevice(ordinal)  # keeps the context, and with it the memory
        with self._device:
            self._context = ctypes.c_void_p(_core.current_context())
        self._library = ctypes.CDLL(_core.driver()["library"])
        self._find = self._library.cuGetProcAddress_v2
        self._find.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self.result(name, *arguments)
        assert code == 0, f"{name}: {code}"

    def result(self, name: str, *arguments: Any) -> int:
        """The CUresult of the call."""
        self._raw("cuCtxPushCurrent", self._context)
        try:
            return self._raw(name, *arguments)
        finally:
            self._raw("cuCtxPopCurrent", ctypes.byref(ctypes.c_void_p()))

    def _raw(self, name: str, *arguments: Any) -> int:
        address, status = ctypes.c_void_p(), ctypes.c_int()
        code = self._find(name.encode(), ctypes.byref(address), 12000, 1, ctypes.byref(status))
        assert code == 0 and address.value, name
        return int(ctypes.CFUNCTYPE(ctypes.c_int)(address.value)(*arguments))

    def capture_mode(self) -> int:
        """Of this thread: 0 global (the default), 1 thread-local, 2 relaxed."""
        mode = ctypes.c_int(0)
        self("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        found = mode.value
        self("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return found


class GpuImage:
    """A uint8 array in GPU memory. `view` picks part of it: an index as NumPy takes it, e.g. [2:, ::2]."""

    def __init__(self, array: NDArray[Any], *, ordinal: int = 0, view: Any = (), stream: bool = False) -> None:
        self.driver = Driver(ordinal)
        whole = np.ascontiguousarray(array)
        part = whole[view]
        self.shape, self.strides, self.dtype = part.shape, part.strides, part.dtype
        offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        self._base = ctypes.c_ulonglong()
        self.driver("cuMemAlloc", ctypes.byref(self._base), ctypes.c_size_t(whole.nbytes))
        self._stream = ctypes.c_void_p()
        self.driver("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(1))
        self.write(whole)
        if not stream:
            self.driver("cuStreamSynchronize", self._stream)
        self.pointer = self._base.value + offset
        self.streams_told: list[Any] = []
        self.taken = 0
        self.given_back = 0
        self._kept: list[Any] = []

    def write(self, array: NDArray[Any]) -> None:
        """On this image's own stream, without waiting for it."""
        self._content = np.ascontiguousarray(array)
        source = ctypes.c_void_p(self._content.ctypes.data)
        size = ctypes.c_size_t(self._content.nbytes)
        self.driver("cuMemcpyHtoDAsync", self._base, source, size, self._stream)

    def free(self) -> None:
        self.driver("cuStreamSynchronize", self._stream)
        self.driver("cuStreamDestroy", self._stream)
        self.driver("cuMemFree", self._base)

    def __enter__(self) -> GpuImage:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()


class ByInterface(GpuImage):
    """Offers __cuda_array_interface__ version 3, with its stream."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "version": 3,
            "stream": self._stream.value,
        }


class ByDlpack(GpuImage):
    """Offers DLPack: as torch does, it makes the consumer's stream wait for its own."""

    versioned = True

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self.driver.ordinal

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> Any:
        if max_version is not None and not self.versioned:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.streams_told.append(stream)
        event = ctypes.c_void_p()
        self.driver("cuEventCreate", ctypes.byref(event), ctypes.c_uint(2))
        self.driver("cuEventRecord", event, self._stream)
        self.driver("cuStreamWaitEvent", ctypes.c_void_p(stream), event, ctypes.c_uint(0))
        self.driver("cuEventDestroy", event)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return python.PyCapsule_New(self.managed(), name, None)

    def managed(self) -> int:
        """The address of the structure that DLPack hands out."""
        ndim = len(self.shape)
        shape = (ctypes.c_int64 * ndim)(*self.shape)
        strides = (ctypes.c_int64 * ndim)(*(stride // self.dtype.itemsize for stride in self.strides))
        code = {"u": UNSIGNED, "f": 2, "i": 0}[self.dtype.kind]
        tensor = Tensor(
            self.pointer, CUDA, self.driver.ordinal, ndim, code, self.dtype.itemsize * 8, 1, shape, strides, 0
        )

        def give_back(_: int) -> None:
            self.given_back += 1

        deleter = DELETER(give_back)
        managed = Versioned(1, 0, None, deleter, 0, tensor) if self.versioned else Legacy(tensor, None, deleter)
        self.taken += 1
        self._kept.append((managed, deleter, shape, strides))
        return ctypes.addressof(managed)


class ByOldDlpack(ByDlpack):
    """The same before DLPack 1.0."""

    versioned = False


EXCHANGE_NAME = b"dlpack_exchange_api"  # the capsule points to it
FROM_OBJECT = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
WORK_STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class ExchangeApi(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("before", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", FROM_OBJECT),
        ("to_object", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("work_stream", WORK_STREAM),
    )


class ByExchange(ByDlpack):
    """Offers DLPack's C functions, as torch does since 2.10: the consumer asks for the producer's stream."""

    current: weakref.ref[ByExchange] | None = None  # whose stream is the library's current one

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the C functions come first")

    @staticmethod
    def _from_object(image: Any, result: Any) -> int:
        ByExchange.current = weakref.ref(image)
        result[0] = image.managed()
        return 0

    @staticmethod
    def _work_stream(device_type: int, ordinal: int, result: Any) -> int:
        image = ByExchange.current() if ByExchange.current is not None else None
        assert image is not None and (device_type, ordinal) == image.__dlpack_device__()
        result[0] = image._stream.value
        return 0

    _api = ExchangeApi(1, 3, None, None, FROM_OBJECT(_from_object), None, None, WORK_STREAM(_work_stream))
    __dlpack_c_exchange_api__ = python.PyCapsule_New(ctypes.addressof(_api), EXCHANGE_NAME, None)


def read_capsule(array: Any, **arguments: Any) -> tuple[Tensor, Any]:
    """The tensor that an exporter hands out, and the capsule that keeps it."""
    capsule = array.__dlpack__(**arguments)
    for name, layout in ((b"dltensor_versioned", Versioned), (b"dltensor", Legacy)):
        if python.PyCapsule_IsValid(capsule, name):
            managed = ctypes.cast(python.PyCapsule_GetPointer(capsule, name), ctypes.POINTER(layout)).contents
            return managed.tensor, capsule
    raise AssertionError("no DLPack capsule")


def read_device(pointer: int, shape: tuple[int, ...], dtype: Any, ordinal: int = 0) -> NDArray[Any]:
    """Copies an array out of GPU memory."""
    driver, result, stream = Driver(ordinal), np.zeros(shape, dtype), ctypes.c_void_p()
    driver("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
    target, source = ctypes.c_void_p(result.ctypes.data), ctypes.c_ulonglong(pointer)
    driver("cuMemcpyDtoHAsync", target, source, ctypes.c_size_t(result.nbytes), stream)
    driver("cuStreamSynchronize", stream)
    driver("cuStreamDestroy", stream)
    return result
