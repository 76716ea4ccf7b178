"""The detector: one model, ready to run on images, from any number of threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from .backend import Backend, Color, Found, LoadedModel, Pending
from .detections import Detections
from .device import ONNX_SUFFIX, cuda_ordinal
from .device_detections import DeviceDetections
from .engine import EngineModel
from .errors import EdgeYoloError, EngineError, InvalidInput
from .handle import Handle, to_detections, to_device_detections
from .head import HeadKind
from .image import as_frame, as_image, is_image
from .onnx_cuda import OnnxCudaModel
from .options import settle
from .session import OnnxSession
from .source import Frame, Source
from .source import open as open_source

__all__ = ["Detector", "load"]

CLOSED = "this detector was closed: load the model again"
MAX_SLOTS = 16


def load(
    model: str | os.PathLike[str],
    *,
    device: str | int = "auto",
    conf: float = 0.25,
    iou: float = 0.7,
    max_det: int = 300,
    classes: Iterable[int | str] | None = None,
    agnostic: bool = False,
    imgsz: int | Sequence[int] | None = None,
    names: Mapping[int, str] | Sequence[str] | None = None,
    color: Color = "bgr",
    head: HeadKind | None = None,
    slots: int = 2,
    graph: Literal["auto", "off"] = "auto",
    tf32: bool = True,
    allow_cpu: bool = False,
) -> Detector:
    """Loads a detection model and runs it once, so that the first frame is as fast as the next.

    model: path of an .onnx file (CPU or GPU) or of a TensorRT .engine or .plan file (GPU), with or without Ultralytics'
    metadata.
    device: "auto", "cpu", or the GPU: 0, "cuda", "cuda:1". "auto" is GPU 0 for engines and the CPU for .onnx files.
    conf: a detection's score is above it. iou: of two boxes of one class that overlap more, the worse one is dropped.
    max_det: detections per image at the most. agnostic: boxes of different classes suppress each other too.
    classes: ids or names of the classes to report; None reports all.
    imgsz: input size of a model with a dynamic one, an int or (height, width), in pixels.
    names: class names, in place of those in the model. Without any, a class is named by its id.
    color: the channel order of the images that will be handed in.
    head: layout of the network's output, where it cannot be told from its shape.
    slots: images that a GPU works on at once: while one is computed the next is uploaded. 1 to 16.
    graph: "auto" replays each frame as one CUDA graph where the engine allows it, "off" never does, for debugging.
    tf32: lets an .onnx file on a GPU multiply matrices in TensorFloat-32, which is ONNX Runtime's and torch's habit:
    faster, with results a little further from the CPU's. An engine has its precision built in.
    allow_cpu: runs an .onnx file on the CPU, with a warning and the reason in info(), where the GPU that was asked for
    cannot be used. Otherwise that is a DeviceError.

    Raises InvalidInput for an argument that cannot be used, EngineError for a file that cannot be run, ManifestError
    for a network that is no detector, DeviceError for a device that is not there.
    """
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidInput(f"expected the path of a model file, found {type(model).__name__}")
    path = Path(model).expanduser()
    if not path.is_file():
        raise EngineError(f"expected a model file, found {'a folder' if path.is_dir() else 'nothing'} at {path}")
    if color not in ("bgr", "rgb"):
        raise InvalidInput(f"color must be 'bgr' or 'rgb', found {color!r}")
    if graph not in ("auto", "off"):
        raise InvalidInput(f"graph must be 'auto' or 'off', found {graph!r}")
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= MAX_SLOTS:
        raise InvalidInput(f"slots must be 1 to {MAX_SLOTS}, found {slots!r}")
    ordinal = cuda_ordinal(device, path)
    loaded: LoadedModel
    if ordinal is None:
        loaded = OnnxSession(path)
    elif path.suffix.lower() == ONNX_SUFFIX:
        loaded = OnnxCudaModel(path, device=ordinal, slots=slots, graph=graph == "auto", tf32=tf32, allow_cpu=allow_cpu)
    else:
        loaded = EngineModel(path, device=ordinal, slots=slots, graph=graph == "auto")
    try:
        return Detector(
            loaded,
            conf=conf,
            iou=iou,
            max_det=max_det,
            classes=classes,
            agnostic=agnostic,
            imgsz=imgsz,
            names=names,
            color=color,
            head=head,
        )
    except BaseException:
        loaded.close()
        raise


class Detector:
    """A loaded model. Made by `load()`; its arguments are described there.

    Any number of threads may call it at once; each gets the result that it would get alone. A detector on a GPU does
    not survive fork(): use it in the process that loaded it, or load it in the child.
    """

    names: Mapping[int, str]
    """Class id -> name. Empty for an end2end model that states no names: there a class is named by its id."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        conf: float,
        iou: float,
        max_det: int,
        classes: Iterable[int | str] | None,
        agnostic: bool,
        imgsz: int | Sequence[int] | None,
        names: Mapping[int, str] | Sequence[str] | None,
        color: Color,
        head: HeadKind | None,
    ) -> None:
        self._model = model
        self._color = color
        self._settled = settle(
            model,
            conf=conf,
            iou=iou,
            max_det=max_det,
            classes=classes,
            agnostic=agnostic,
            imgsz=imgsz,
            names=names,
            head=head,
        )
        self.names = self._settled.names
        self._backend: Backend | None = model.start(self._settled.run)

    @overload
    def __call__(self, images: NDArray[Any], *, timings: bool = False) -> Detections: ...
    @overload
    def __call__(self, images: Sequence[Any], *, timings: bool = False) -> list[Detections]: ...
    @overload
    def __call__(self, images: Any, *, timings: bool = False) -> Detections: ...
    def __call__(self, images: Any, *, timings: bool = False) -> Detections | list[Detections]:
        """Detects the objects in one image, or in each image of a sequence.

        images: uint8 (H, W, 3), also (H, W), (H, W, 1), (H, W, 4) and uint16; the sizes of a sequence may differ. For
        a detector on a GPU also uint8 images of these shapes in its memory, by DLPack or `__cuda_array_interface__`.
        timings: fills `timings` of each result with milliseconds: letterbox and postprocess of that image, network of
        the run that it was part of, total of the run. Raises InvalidInput for anything that is no image.
        """
        if is_image(images):
            (found,) = self._open().run([as_frame(images)], self._color, timings)
            return to_detections(found, self.names)
        if isinstance(images, (list, tuple)) or (isinstance(images, np.ndarray) and images.ndim == 4):
            results = self._open().run([as_frame(image) for image in images], self._color, timings)
            return [to_detections(found, self.names) for found in results]
        as_image(images)  # raises, saying what was found
        raise InvalidInput(f"expected an image or a list of images, found {type(images).__name__}")

    @overload
    def submit(self, image: Any, *, timings: bool = False, on_device: Literal[False] = False) -> Handle[Detections]: ...
    @overload
    def submit(self, image: Any, *, timings: bool = False, on_device: Literal[True]) -> Handle[DeviceDetections]: ...
    def submit(
        self, image: Any, *, timings: bool = False, on_device: bool = False
    ) -> Handle[Detections] | Handle[DeviceDetections]:
        """Starts the detection on one image and returns at once with a handle for its result.

        An ordinary array may be changed as soon as this returns; a `frame_buffer()` or an image in GPU memory must keep
        its content until the handle is done. With all slots in work it waits for one. On the CPU there is nothing to
        overlap with: the work is done here, in the calling thread. Raises InvalidInput for anything that is no image.
        on_device: leaves boxes, scores and class ids on the GPU (without timings), for torch.from_dlpack and the like.
        """
        backend, frame, names = self._open(), as_frame(image), self.names
        if on_device:
            return Handle(
                backend.submit_on_device(frame, self._color), lambda found: to_device_detections(found, names)
            )
        return Handle(backend.submit(frame, self._color, timings), lambda found: to_detections(found, names))

    def frame_buffer(self, height: int, width: int, channels: int = 3) -> NDArray[np.uint8]:
        """A zeroed uint8 array (height, width, channels) to read frames into, in page-locked memory on a GPU.

        The detector reads it, and views of it, in place: no copy on the host. It belongs to the caller and outlives the
        detector. channels: 1, 3 or 4. On the CPU this is an ordinary array.
        """
        for name, value, most in (("height", height, 32767), ("width", width, 32767), ("channels", channels, 4)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
                raise InvalidInput(f"{name} must be 1 to {most}, found {value!r}")
        if channels == 2:
            raise InvalidInput("channels must be 1, 3 or 4, found 2")
        return self._open().frame_buffer(int(height), int(width), int(channels), self._color)

    def stream(self, source: Any, *, timings: bool = False) -> Iterator[tuple[Frame, Detections | None]]:
        """Detects on every frame of a source: a `Source`, or whatever `edgeyolo.open()` takes.

        Yields (frame, result), in the order of the source; the result is None where `frame.error` says why there is no
        image. Frames of files and cameras are BGR; arrays are taken in the detector's color. On a GPU, up to `slots`
        frames of a file are in work at once; of a live source each result is handed out before the next frame is read,
        since waiting for that would make it old. A generator that is not resumed holds no lock and blocks nobody. A
        source that was opened here is closed at the end.
        """
        if isinstance(source, Source):
            yield from self._stream(source, timings)
            return
        with open_source(source) as opened:
            yield from self._stream(opened, timings)

    def _stream(self, source: Source, timings: bool) -> Iterator[tuple[Frame, Detections | None]]:
        ahead = 1 if source.live else self._open().slots
        waiting: deque[tuple[Frame, Pending[Found] | None]] = deque()

        def oldest() -> tuple[Frame, Detections | None]:
            frame, pending = waiting.popleft()
            if pending is None:
                return frame, None
            pending.wait(None)
            return frame, to_detections(pending.found(), self.names)

        for frame in source:
            if frame.image is None:
                waiting.append((frame, None))
            else:
                color: Color = self._color if frame.from_array else "bgr"
                waiting.append((frame, self._open().submit(as_image(frame.image), color, timings)))
            if len(waiting) >= ahead:
                yield oldest()
        while waiting:
            yield oldest()

    def info(self) -> dict[str, Any]:
        """What was loaded and what engaged, in plain values: for logs, bug reports and `edgeyolo info`."""
        backend, model, run = self._open(), self._model, self._settled.run
        return {
            "model": str(model.path),
            **model.info(),
            "imgsz": list(run.imgsz),
            "batch": model.batch or "dynamic",
            "head": run.head.kind,
            "nms": "in the network" if run.head.kind == "end2end" else "edgeyolo",
            "classes": run.head.classes,
            "names": dict(self.names),
            "names_source": self._settled.names_source,
            "conf": run.conf,
            "iou": run.iou,
            "max_det": run.max_det,
            "agnostic": run.agnostic,
            "color": self._color,
            **backend.info(),
            "notes": list(self._settled.notes),
        }

    def close(self) -> None:
        """Frees the model. Calls that are running in other threads finish; later ones raise. Closing twice is fine."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()
            self._model.close()

    def _open(self) -> Backend:
        backend = self._backend
        if backend is None:
            raise EdgeYoloError(CLOSED)
        return backend

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._backend is None:
            return "<Detector: closed>"
        model = self._model
        return f"<Detector: {model.path.name}, {model.backend} on {model.device}, imgsz {self._settled.run.imgsz}>"
