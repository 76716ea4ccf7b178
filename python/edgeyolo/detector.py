"""The detector: one model, ready to run on images, from any number of threads."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from .backend import Color, Found, Pending
from .detections import Detections
from .device_detections import DeviceDetections
from .errors import EdgeYoloError, InvalidInput
from .handle import Handle, to_detections, to_device_detections
from .head import HeadKind
from .image import as_frame, as_image, is_image
from .loading import DEFAULT_IOU, DEFAULT_SLOTS, AsItIs, LoadOptions, Running, as_it_is, start, start_current
from .published import PublicKey, Require, read_current
from .source import Frame, Source
from .source import open as open_source

__all__ = ["Detector", "load"]

CLOSED = "this detector was closed: load the model again"


def load(
    model: str | os.PathLike[str],
    *,
    device: str | int = "auto",
    conf: float = 0.25,
    iou: float = DEFAULT_IOU,
    max_det: int = 300,
    classes: Iterable[int | str] | None = None,
    agnostic: bool = False,
    imgsz: int | Sequence[int] | None = None,
    names: Mapping[int, str] | Sequence[str] | None = None,
    color: Color = "bgr",
    head: HeadKind | None = None,
    slots: int = DEFAULT_SLOTS,
    graph: Literal["auto", "off"] = "auto",
    tf32: bool = True,
    allow_cpu: bool = False,
    require: Require | None = None,
    public_key: PublicKey | None = None,
) -> Detector:
    """Loads a detection model and runs it once, so that the first frame is as fast as the next.

    model: path of an .onnx file (CPU or GPU) or of a TensorRT .engine or .plan file (GPU), with or without Ultralytics'
    metadata; or of a folder that `edgeyolo publish` made. Of such a folder every digest is checked before anything is
    deserialized, and the first of the version's models that runs here is taken. A version that is damaged, or lacks
    what is required, gives way to the one before it, with a warning. info()["published"] tells what was chosen and why.
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
    allow_cpu: runs an .onnx file on the CPU, with a warning and the reason in info()["why_cpu"], where the GPU that was
    asked for cannot be used. Otherwise that is a DeviceError.
    require: what a published model must have on record. "verified", the default: it, or the graph that it was built
    from, was run and agreed with its reference; "executed": this very file was; "intact": no more than its digest.
    public_key: an Ed25519 public key, as the path of a PEM file or its bytes: published folders must be signed with its
    private half.

    An argument other than its default that has no effect on this model (iou where the network suppresses duplicates
    itself, slots on the CPU) is told by a warning in the log "edgeyolo", and in info()["notes"].

    Raises InvalidInput for an argument that cannot be used, EngineError for a file that cannot be run, ManifestError
    for a network that is no detector, DeviceError for a device that is not there.
    """
    options = LoadOptions(
        device=device,
        conf=conf,
        iou=iou,
        max_det=max_det,
        classes=classes,
        agnostic=agnostic,
        imgsz=imgsz,
        names=names,
        color=color,
        head=head,
        slots=slots,
        graph=graph,
        tf32=tf32,
        allow_cpu=allow_cpu,
        require=require,
        public_key=public_key,
    )
    return Detector(start(model, options), options)


class Detector:
    """A loaded model. Made by `load()`; its arguments are described there.

    Any number of threads may call it at once; each gets the result that it would get alone. A signal handler may swap
    or close it. A detector on a GPU does not survive fork(): use it in the process that loaded it, or load it in the
    child. One on the CPU loads its model anew in the child, at its first call there.
    """

    def __init__(self, running: Running, options: LoadOptions) -> None:
        # Calls read the first attribute once and hold what they read; only swap() and close() write, under the lock.
        self._running: Running | None = running
        self._options = options
        self._names = running.settled.names
        self._tried: AsItIs | None = None if running.origin is None else running.origin.current
        self._swaps = 0
        # Both may be taken again by their own thread: a signal handler may swap or close.
        self._state, self._swapping = threading.RLock(), threading.RLock()

    @property
    def names(self) -> Mapping[int, str]:
        """Class id -> name. Empty for an end2end model that states no names: there a class is named by its id."""
        running = self._running
        return self._names if running is None else running.settled.names

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
        running = self._open()
        names = running.settled.names
        if is_image(images):
            (found,) = running.backend.run([as_frame(images)], running.color, timings)
            return to_detections(found, names)
        if isinstance(images, (list, tuple)) or (isinstance(images, np.ndarray) and images.ndim == 4):
            results = running.backend.run([as_frame(image) for image in images], running.color, timings)
            return [to_detections(found, names) for found in results]
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
        running, frame = self._open(), as_frame(image)
        backend, color, names = running.backend, running.color, running.settled.names
        if on_device:
            return Handle(backend.submit_on_device(frame, color), lambda found: to_device_detections(found, names))
        return Handle(backend.submit(frame, color, timings), lambda found: to_detections(found, names))

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
        running = self._open()
        return running.backend.frame_buffer(int(height), int(width), int(channels), running.color)

    def stream(self, source: Any, *, timings: bool = False) -> Iterator[tuple[Frame, Detections | None]]:
        """Detects on every frame of a source: a `Source`, or whatever `edgeyolo.open()` takes.

        Yields (frame, result), in the order of the source; the result is None where `frame.error` says why there is no
        image. Frames of files and cameras are BGR; arrays are taken in the detector's color. On a GPU, up to `slots`
        frames of a file are in work at once; of a live source each result is handed out before the next frame is taken,
        the newest there is by then (see `edgeyolo.open()`, latest=). A generator that is not resumed holds no lock and
        blocks nobody. A source that was opened here is closed at the end.
        """
        if isinstance(source, Source):
            yield from self._stream(source, timings)
            return
        with open_source(source) as opened:
            yield from self._stream(opened, timings)

    def _stream(self, source: Source, timings: bool) -> Iterator[tuple[Frame, Detections | None]]:
        waiting: deque[tuple[Frame, Pending[Found] | None, Mapping[int, str]]] = deque()

        def oldest() -> tuple[Frame, Detections | None]:
            frame, pending, names = waiting.popleft()
            if pending is None:
                return frame, None
            pending.wait(None)
            return frame, to_detections(pending.found(), names)

        for frame in source:
            running = self._open()
            if frame.image is None:
                waiting.append((frame, None, {}))
            else:
                color: Color = running.color if frame.from_array else "bgr"
                pending = running.backend.submit(as_image(frame.image), color, timings)
                waiting.append((frame, pending, running.settled.names))
            ahead = 1 if source.live else running.backend.slots
            del running  # a paused stream keeps no model
            while len(waiting) >= ahead:
                yield oldest()
        while waiting:
            yield oldest()

    def swap(self, model: str | os.PathLike[str] | None = None, **changed: Any) -> bool:
        """Puts another model in the place of this one, between two frames. Returns whether it did.

        The new model is loaded and run once while the old one goes on working; then the next call gets the new one.
        Calls and handles in work finish on the old one, streams go on, no frame is dropped, and the old one's memory is
        freed with the last of them. Until then both are in memory. A `frame_buffer()` stays usable.

        model: as load() takes it. Without one, the published folder that the present model came from is asked for its
        current version: False at once when that is still the one that was tried last, so a loop can ask every second;
        one that was damaged and is published again is tried again.
        Of a published folder only the current version counts: what runs already is the one to fall back to.
        changed: arguments of load() that are to differ from now on.

        Raises what load() raises, and then the old model goes on. A version that failed is tried again only by name,
        swap(folder), or with changed arguments.
        """
        with self._swapping:
            origin = self._open().origin
            options = dataclasses.replace(self._options, **changed)
            current: AsItIs | None = None
            if model is None:
                if origin is None:
                    raise InvalidInput("swap() without a model is for models of a published folder: name the new one")
                model = origin.folder
                current = as_it_is(origin.folder, read_current(model)[0])
                if current == self._tried and not changed:
                    return False
            try:
                running = start_current(model, options)
                try:
                    running.warm_up()
                    with self._state:
                        before = self._open()  # raises if it was closed in the meantime
                        self._running, self._options, self._names = running, options, running.settled.names
                        self._swaps += 1
                except BaseException:
                    running.close()
                    raise
            except EdgeYoloError:
                if current and not changed:  # with changed arguments it may be those; an interruption says nothing
                    self._tried = current
                raise
            if running.origin is not None:
                self._tried = running.origin.current
            del before  # the last to hold it, unless calls do: here it is freed, outside of the lock
            return True

    def info(self) -> dict[str, Any]:
        """What was loaded and what engaged, in plain values: for logs, bug reports and `edgeyolo info`."""
        running = self._open()
        settled, model, origin = running.settled, running.model, running.origin
        run = settled.run
        return {
            "model": str(model.path),
            **model.info(),
            "imgsz": list(run.imgsz),
            "batch": model.batch or "dynamic",
            "head": run.head.kind,
            "nms": "in the network" if run.head.kind == "end2end" else "edgeyolo",
            "classes": run.head.classes,
            "names": dict(settled.names),
            "names_source": settled.names_source,
            "conf": run.conf,
            "iou": run.iou,
            "max_det": run.max_det,
            "agnostic": run.agnostic,
            "color": running.color,
            **running.backend.info(),
            "notes": list(settled.notes),
            "published": None if origin is None else dict(origin.told),
            "swaps": self._swaps,
        }

    def close(self) -> None:
        """Frees the model. Calls that are running in other threads finish; later ones raise. Closing twice is fine."""
        with self._state:
            running, self._running = self._running, None
        if running is not None:
            running.close()

    def _open(self) -> Running:
        running = self._running
        if running is None:
            raise EdgeYoloError(CLOSED)
        return running

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        running = self._running
        if running is None:
            return "<Detector: closed>"
        model = running.model
        return f"<Detector: {model.path.name}, {model.backend} on {model.device}, imgsz {running.settled.run.imgsz}>"
