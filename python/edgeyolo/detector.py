"""The detector: one model, ready to run on images, from any number of threads."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from . import _core
from .detections import Detections
from .errors import DeviceError, EdgeYoloError, EngineError, InvalidInput
from .head import HeadKind, head_from_shape
from .image import as_image, is_image
from .manifest import names_from_caller
from .session import OnnxSession
from .source import Frame, Source
from .source import open as open_source

__all__ = ["Detector", "load"]

DEFAULT_IMGSZ = 640
DEFAULT_STRIDE = 32
MAX_CHUNK = 16  # images per run of a model with a dynamic batch: bounds the memory of a long list
# An end2end network without names does not tell its number of classes; its ids are taken up to this one.
UNKNOWN_CLASSES = 1 << 16

Milliseconds = dict[str, float]


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
    color: Literal["bgr", "rgb"] = "bgr",
    head: HeadKind | None = None,
) -> Detector:
    """Loads a detection model and runs it once, so that the first frame is as fast as the next.

    model: path of an .onnx file, with or without Ultralytics' metadata.
    device: "auto" or "cpu".
    conf: a detection's score is above it. iou: of two boxes of one class that overlap more, the worse one is dropped.
    max_det: detections per image at the most. agnostic: boxes of different classes suppress each other too.
    classes: ids or names of the classes to report; None reports all.
    imgsz: input size of a model with a dynamic one, an int or (height, width), in pixels.
    names: class names, in place of those in the model. Without any, a class is named by its id.
    color: the channel order of the images that will be handed in.
    head: layout of the network's output, where it cannot be told from its shape.

    Raises InvalidInput for an argument that cannot be used, EngineError for a file that cannot be run, ManifestError
    for a network that is no detector, DeviceError for a device that is not there.
    """
    path = Path(model)
    if not path.is_file():
        raise EngineError(f"expected a model file, found {'a folder' if path.is_dir() else 'nothing'} at {path}")
    if path.suffix.lower() != ".onnx":
        hint = " Export it to ONNX first." if path.suffix.lower() in (".pt", ".pth") else ""
        raise EngineError(f"expected an .onnx file, found {path.name}.{hint}")
    if isinstance(device, str) and device not in ("auto", "cpu"):
        raise DeviceError(f"device must be 'auto' or 'cpu', found {device!r}")
    if not isinstance(device, str):
        raise DeviceError(f"device={device!r}: this version runs on the CPU only; use device='auto' or 'cpu'")
    if color not in ("bgr", "rgb"):
        raise InvalidInput(f"color must be 'bgr' or 'rgb', found {color!r}")
    return Detector(
        OnnxSession(path),
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


class Detector:
    """A loaded model. Made by `load()`; its arguments are described there.

    Any number of threads may call it at once; each gets the result that it would get alone.
    """

    names: Mapping[int, str]
    """Class id -> name. Empty for an end2end model that states no names: there a class is named by its id."""

    def __init__(
        self,
        session: OnnxSession,
        *,
        conf: float,
        iou: float,
        max_det: int,
        classes: Iterable[int | str] | None,
        agnostic: bool,
        imgsz: int | Sequence[int] | None,
        names: Mapping[int, str] | Sequence[str] | None,
        color: Literal["bgr", "rgb"],
        head: HeadKind | None,
    ) -> None:
        self._session: OnnxSession | None = session
        self._color = color
        self._notes: list[str] = []
        facts = session.facts()
        self._imgsz = self._choose_imgsz(session, imgsz, facts.imgsz, facts.stride or DEFAULT_STRIDE)
        given = names_from_caller(names) if names is not None else facts.names

        # The first run shows the output's real shape, and takes the network's own warm-up out of the first frame.
        self._inputs: deque[_Input] = deque()
        blank = _Input(session.batch or 1, self._imgsz)
        _, rows, columns = session.run(blank.planes).shape
        self._inputs.append(blank)
        self._head = head_from_shape(
            (rows, columns),
            self._imgsz,
            classes=None if given is None else len(given),
            end2end=facts.end2end,
            kind=head,
        )
        self._names_source = "caller" if names is not None else "model" if given is not None else "ids"
        if given is None:
            self._notes.append(
                "the model states no class names: classes are named by their ids; pass names= to name them"
            )
            given = {i: str(i) for i in range(self._head.classes or 0)}
        self.names = MappingProxyType(given)
        self._classes = self._head.classes or UNKNOWN_CLASSES
        self._post: _core.Postprocessor | None = _core.Postprocessor(
            conf=conf, iou=iou, max_det=max_det, agnostic=agnostic, allowed=self._class_mask(classes)
        )
        self._letterbox = _core.LetterboxPool()
        self._options = {"conf": conf, "iou": iou, "max_det": max_det, "agnostic": agnostic, "color": color}

    def _choose_imgsz(
        self, session: OnnxSession, wanted: int | Sequence[int] | None, stated: tuple[int, int] | None, stride: int
    ) -> tuple[int, int]:
        """(height, width) of the input. Raises InvalidInput when the caller wants what the model cannot take."""
        size = _pair(wanted)
        if session.size is not None:
            if size is not None and size != session.size:
                raise InvalidInput(
                    f"imgsz={wanted!r}: {session.path.name} has a fixed input of {session.size[0]} x {session.size[1]} "
                    "(height x width); leave imgsz out or export the model again"
                )
            return session.size
        if size is None:
            size = stated or (DEFAULT_IMGSZ, DEFAULT_IMGSZ)
            if stated is None:
                self._notes.append(f"the model states no input size: {DEFAULT_IMGSZ} is used; pass imgsz= to change it")
        for fixed, value in zip((session.input_shape[2], session.input_shape[3]), size, strict=True):
            if isinstance(fixed, int) and fixed > 0 and fixed != value:
                raise InvalidInput(f"imgsz={size}: the input of {session.path.name} is {session.input_shape}")
        if size[0] % stride or size[1] % stride:
            near = tuple(max(stride, round(value / stride) * stride) for value in size)
            raise InvalidInput(
                f"imgsz must be a multiple of the model's stride {stride}, found {size}; the nearest is {near}"
            )
        return size

    def _class_mask(self, classes: Iterable[int | str] | None) -> list[int]:
        """1 for each class to report; empty for all. Raises InvalidInput for a class that the model does not have."""
        if classes is None:
            return []
        if isinstance(classes, (str, bytes)) or not isinstance(classes, Iterable):
            raise InvalidInput(f"classes must be a list of ids or names, found {classes!r}")
        mask = [0] * self._classes
        ids = {name: i for i, name in self.names.items()}
        for value in classes:
            class_id = ids.get(value, -1) if isinstance(value, str) else value
            if isinstance(class_id, bool) or not isinstance(class_id, (int, np.integer)):
                raise InvalidInput(f"classes must be a list of ids or names, found {value!r} in it")
            if not 0 <= class_id < self._classes:
                known = ", ".join(f"{i} {name}" for i, name in list(self.names.items())[:100])
                raise InvalidInput(f"the model has no class {value!r}; it has: {known or 'ids without names'}")
            mask[int(class_id)] = 1
        return mask

    @overload
    def __call__(self, images: NDArray[Any], *, timings: bool = False) -> Detections: ...
    @overload
    def __call__(self, images: Sequence[NDArray[Any]], *, timings: bool = False) -> list[Detections]: ...
    def __call__(
        self, images: NDArray[Any] | Sequence[NDArray[Any]], *, timings: bool = False
    ) -> Detections | list[Detections]:
        """Detects the objects in one image, or in each image of a sequence.

        images: uint8 (H, W, 3), also (H, W), (H, W, 1), (H, W, 4) and uint16; the sizes of a sequence may differ.
        timings: fills `timings` of each result with milliseconds: letterbox and postprocess of that image, network of
        the run that it was part of, total of the run. Raises InvalidInput for anything that is no image.
        """
        if is_image(images):
            return self._run([as_image(images)], self._color, timings)[0]
        if isinstance(images, (list, tuple)) or (isinstance(images, np.ndarray) and images.ndim == 4):
            return self._detect_all([as_image(image) for image in images], timings)
        as_image(images)  # raises, saying what was found
        raise InvalidInput(f"expected an image or a list of images, found {type(images).__name__}")

    def stream(self, source: Any, *, timings: bool = False) -> Iterator[tuple[Frame, Detections | None]]:
        """Detects on every frame of a source: a `Source`, or whatever `edgeyolo.open()` takes.

        Yields (frame, result); the result is None where `frame.error` says why there is no image. Frames of files and
        cameras are BGR; arrays are taken in the detector's color. A generator that is not resumed holds no lock and
        blocks nobody. A source that was opened here is closed at the end.
        """
        if isinstance(source, Source):
            yield from self._stream(source, timings)
            return
        with open_source(source) as opened:
            yield from self._stream(opened, timings)

    def _stream(self, source: Source, timings: bool) -> Iterator[tuple[Frame, Detections | None]]:
        for frame in source:
            if frame.image is None:
                yield frame, None
                continue
            color = self._color if frame.from_array else "bgr"
            yield frame, self._run([as_image(frame.image)], color, timings)[0]

    def _detect_all(self, images: list[NDArray[np.uint8]], timings: bool) -> list[Detections]:
        session = self._open_session()
        chunk = session.batch or MAX_CHUNK
        results: list[Detections] = []
        for start in range(0, len(images), chunk):
            results += self._run(images[start : start + chunk], self._color, timings)
        return results

    def _run(self, images: list[NDArray[np.uint8]], color: str, timings: bool) -> list[Detections]:
        """One run of the network over at most one batch of images."""
        session, post = self._open_session(), self._post
        if post is None:
            raise EdgeYoloError(CLOSED)
        clock = time.perf_counter
        started = clock()
        rows = session.batch or len(images)
        batch = self._take_input(rows)
        try:
            # Rows beyond the images keep what an earlier call left there; nothing reads their output.
            geometries, letterbox_ms = [], []
            for row, image in enumerate(images):
                begun = clock()
                before = batch.geometries[row]
                batch.geometries[row] = None  # unknown, should the call fail half-way
                geometry = self._letterbox.run(image, batch.planes[row], color, None, before)
                batch.geometries[row] = geometry
                geometries.append(geometry)
                letterbox_ms.append((clock() - begun) * 1e3)
            begun = clock()
            outputs = session.run(batch.planes[:rows])
            network_ms = (clock() - begun) * 1e3
        finally:
            if self._session is not None:  # a closed detector keeps no memory
                self._inputs.append(batch)
        results: list[Detections] = []
        for geometry, output, box_ms in zip(geometries, outputs, letterbox_ms, strict=False):
            begun = clock()
            boxes, scores, class_ids = post.run(output, self._head.kind, self._classes, geometry)
            measured: Milliseconds | None = None
            if timings:
                now = clock()
                measured = {
                    "letterbox": box_ms,
                    "network": network_ms,
                    "postprocess": (now - begun) * 1e3,
                    "total": (now - started) * 1e3,
                }
            results.append(Detections(boxes, scores, class_ids, self._names_for(class_ids), geometry.source, measured))
        return results

    def _names_for(self, class_ids: NDArray[np.int64]) -> Mapping[int, str]:
        return self.names or {i: str(i) for i in class_ids.tolist()}

    def _take_input(self, rows: int) -> _Input:
        """Input memory for at least `rows` images that no other call uses. deque.pop is atomic."""
        try:
            batch = self._inputs.pop()
        except IndexError:
            return _Input(rows, self._imgsz)
        return batch if len(batch.planes) >= rows else _Input(rows, self._imgsz)

    def info(self) -> dict[str, Any]:
        """What was loaded and what engaged, in plain values: for logs, bug reports and `edgeyolo info`."""
        session = self._open_session()
        return {
            "model": str(session.path),
            "backend": session.backend,
            "backend_version": session.version,
            "device": "cpu",
            "providers": list(session.providers),
            "input": {
                "name": session.input_name,
                "shape": list(session.input_shape),
                "dtype": session.input_dtype.name,
            },
            "imgsz": list(self._imgsz),
            "batch": session.batch or "dynamic",
            "head": self._head.kind,
            "nms": "in the network" if self._head.kind == "end2end" else "edgeyolo",
            "classes": self._head.classes,
            "names": dict(self.names),
            "names_source": self._names_source,
            **self._options,
            "simd": _core.isas()[-1],
            "notes": list(self._notes),
        }

    def close(self) -> None:
        """Frees the model. Calls that are running in other threads finish; later ones raise. Closing twice is fine."""
        self._session = None
        self._post = None
        self._letterbox = _core.LetterboxPool()
        self._inputs.clear()

    def _open_session(self) -> OnnxSession:
        session = self._session
        if session is None:
            raise EdgeYoloError(CLOSED)
        return session

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._session is None:
            return "<Detector: closed>"
        return f"<Detector: {self._session.path.name}, {self._session.backend} on cpu, imgsz {self._imgsz}>"


CLOSED = "this detector was closed: load the model again"


class _Input:
    """Memory for the network's input, kept from call to call, and where in it the last pictures lie."""

    def __init__(self, rows: int, imgsz: tuple[int, int]) -> None:
        self.planes = np.zeros((rows, 3, *imgsz), np.float32)
        self.geometries: list[_core.Letterbox | None] = [None] * rows


def _pair(imgsz: int | Sequence[int] | None) -> tuple[int, int] | None:
    """imgsz as (height, width)."""
    if imgsz is None:
        return None
    values = [imgsz, imgsz] if isinstance(imgsz, (int, np.integer)) else list(imgsz)
    if len(values) != 2 or any(
        isinstance(v, bool) or not isinstance(v, (int, np.integer)) or not 1 <= v <= 32767 for v in values
    ):
        raise InvalidInput(f"imgsz must be an int or (height, width), 1 to 32767 pixels each, found {imgsz!r}")
    return int(values[0]), int(values[1])
