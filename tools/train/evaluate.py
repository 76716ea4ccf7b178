"""How good a model in training is, by the application's own rules.

    validation = Validation(pictures, labels, names, imgsz=640)
    metrics = validation(step.ema.model)                # after each epoch; the pictures are decoded once

Pictures are letterboxed and boxes decoded by the functions that serve a published model, and the mAP is COCO's
(tools/metrics.py): what is measured here is what the exported graph will answer. On CUDA the pictures stay on the
device, the forward pass is a graph, and the host decodes and counts one batch while the device computes the next ones.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgeyolo import Detections, _core
from edgeyolo.errors import InvalidInput

from ..metrics import Evaluation, Labels, Metrics
from .evaluate_forward import Forward, Output, forward_of
from .evaluate_pictures import Pictures, Size
from .graph import Recorder

__all__ = ["Validation", "evaluate"]

Head = Literal["auto", "raw", "end2end"]

CONF = 0.001  # the curve's right end: COCO counts every detection
THREADS = 16


def evaluate(
    model: Any,
    pictures: Sequence[Path],
    labels: Sequence[NDArray[Any]],
    names: Mapping[int, str],
    *,
    imgsz: int | tuple[int, int],
    batch: int = 16,
    head: Head = "auto",
    iou: float = 0.7,
    max_det: int = 300,
    progress: Callable[[int, int], None] | None = None,
) -> Metrics:
    """Measures once; see Validation for the arguments and errors."""
    validation = Validation(
        pictures, labels, names, imgsz=imgsz, batch=batch, head=head, iou=iou, max_det=max_det, cache_bytes=0
    )
    return validation(model, progress)


class Validation:
    """Pictures with labels, to measure models on again and again.

    pictures: files. labels: for each picture (M, 5): class, then cx, cy, w, h from 0 to 1. names: class id -> name.
    imgsz: side of the network's input in pixels, or (height, width). batch: pictures of one forward pass.
    head: "end2end", "raw" (with NMS at `iou`), "auto": as export() chooses, end2end where the model has that branch.
    max_det: detections of a picture. cache_bytes: memory for letterboxed pictures (3 bytes a pixel); None: a
    twentieth of what is free on the device, or 1 GiB of the host's. What does not fit is decoded every time.
    recorder: records the forward pass; a training step's shares its graphs' memory with this one, which never runs at
    the same time. None: on CUDA one of its own.

    A model's graph, and the model, are held until another model comes or the Validation goes.
    """

    def __init__(
        self,
        pictures: Sequence[Path],
        labels: Sequence[NDArray[Any]],
        names: Mapping[int, str],
        *,
        imgsz: int | tuple[int, int],
        batch: int = 16,
        head: Head = "auto",
        iou: float = 0.7,
        max_det: int = 300,
        cache_bytes: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        if not pictures or len(pictures) != len(labels):
            raise InvalidInput(f"expected pictures with labels for each, found {len(pictures)} and {len(labels)}")
        if head not in ("auto", "raw", "end2end"):
            raise InvalidInput(f"head is one of auto, raw, end2end; found {head!r}")
        if batch < 1:
            raise InvalidInput(f"batch must be at least 1, found {batch}")
        paths = [Path(picture) for picture in pictures]
        self._names = {int(key): str(name) for key, name in sorted(names.items())}
        self._labels = [_checked(rows, picture, self._names) for rows, picture in zip(labels, paths, strict=True)]
        self._imgsz = (imgsz, imgsz) if isinstance(imgsz, int) else (int(imgsz[0]), int(imgsz[1]))
        self._batch, self._head, self._max_det, self._recorder = batch, head, max_det, recorder
        self._post = _core.Postprocessor(conf=CONF, iou=iou, max_det=max_det, agnostic=False, allowed=[])
        self._pictures = Pictures(paths, self._imgsz, batch, cache_bytes)
        self._truths: list[tuple[Size, Labels] | None] = [None] * len(paths)
        self._forward: Forward | None = None

    def __call__(self, model: Any, progress: Callable[[int, int], None] | None = None) -> Metrics:
        """Measures a model as it is: its mode and settings are put back, its statistics stay.

        model: an Ultralytics DetectionModel, on any device. progress: called with (pictures done, pictures in all).
        Raises InvalidInput for classes, sizes or a head that do not fit the model, SourceError for a picture that
        cannot be read.
        """
        evaluation = Evaluation(self._names)
        # Closed whatever happens: the end of the generator is what puts the model back.
        with contextlib.closing(self.detections(model)) as results:
            for index, found in enumerate(results):
                evaluation.add(found, self._truth(index, found.image_size))
                if progress is not None:
                    progress(index + 1, len(self._labels))
        return evaluation.result()

    def forget(self) -> None:
        """Lets go of the model that was measured, its graph and the recorder; the pictures stay."""
        self._forward = self._recorder = None

    def detections(self, model: Any) -> Generator[Detections, None, None]:
        """What the model finds in each picture, in its pixels, down to a score of 0.001. Close it, or use it up."""
        kind = self._check(model)
        shape = (self._batch, 3, *self._imgsz)
        workers = min(THREADS, os.cpu_count() or 1)
        with _measured(model, kind, self._max_det), ThreadPoolExecutor(workers) as pool:
            forward = self._forward = forward_of(self._forward, model, kind, shape, self._recorder)
            flying: deque[tuple[Output, list[Size]]] = deque()
            decoding: deque[Iterable[Detections]] = deque()
            with contextlib.closing(self._pictures.batches(forward.device, pool)) as batches:
                for pixels, sizes in batches:
                    flying.append((forward(pixels), sizes))
                    if len(flying) > forward.flying:
                        decoding.append(self._decoded(*flying.popleft(), kind, pool))
                    while len(decoding) > (1 if forward.flying else 0):
                        yield from decoding.popleft()
            for output, sizes in flying:
                decoding.append(self._decoded(output, sizes, kind, pool))
                yield from decoding.popleft()
            for results in decoding:
                yield from results

    def _decoded(
        self, output: Output, sizes: list[Size], kind: Literal["raw", "end2end"], pool: ThreadPoolExecutor
    ) -> Iterable[Detections]:
        """In threads where it is work: the 300 rows of an end-to-end head take less time than handing them over."""
        rows, kinds = output(), [kind] * len(sizes)
        return (pool.map if kind == "raw" else map)(self._decode, rows, sizes, kinds)

    def _truth(self, index: int, size: Size) -> Labels:
        known = self._truths[index]
        if known is None or known[0] != size:
            rows = self._labels[index]
            centre, sides = rows[:, 1:3] * size, rows[:, 3:5] * size
            boxes = np.hstack([centre - sides / 2, centre + sides / 2])
            known = self._truths[index] = size, Labels(boxes, rows[:, 0].astype(np.int64))
        return known[1]

    def _decode(self, output: NDArray[np.float32], size: Size, kind: str) -> Detections:
        geometry = _core.Letterbox(size, (self._imgsz[1], self._imgsz[0]))
        boxes, scores, class_ids = self._post.run(output, kind, len(self._names), geometry)
        return Detections(boxes, scores, class_ids, self._names, size)

    def _check(self, model: Any) -> Literal["raw", "end2end"]:
        head = model.model[-1]
        if int(head.nc) != len(self._names):
            raise InvalidInput(f"the model has {int(head.nc)} classes, the labels name {len(self._names)}")
        stride = max(int(s) for s in head.stride)
        if any(side < stride or side % stride for side in self._imgsz):
            raise InvalidInput(f"imgsz {self._imgsz} (height, width): expected multiples of the stride {stride}")
        has = {
            "end2end": getattr(head, "one2one_cv2", None) is not None,
            "raw": getattr(head, "cv2", None) is not None,
        }
        if self._head != "auto":
            if not has[self._head]:
                raise InvalidInput(f"head={self._head!r}: the model has {' or '.join(k for k in has if has[k])}")
            return self._head
        return "end2end" if has["end2end"] else "raw"


def _checked(rows: NDArray[Any], picture: Path, names: Mapping[int, str]) -> NDArray[np.float64]:
    values = np.asarray(rows, np.float64)
    values = values.reshape(0, 5) if not values.size else values
    if values.ndim != 2 or values.shape[1] != 5 or not np.isfinite(values).all():
        raise InvalidInput(f"{picture}: expected labels (M, 5), finite: class, cx, cy, w, h; found {values.shape}")
    unknown = set(values[:, 0].tolist()) - names.keys()
    if unknown:
        raise InvalidInput(f"{picture}: class {min(unknown):g} is none of the {len(names)} classes")
    return values


@contextlib.contextmanager
def _measured(model: Any, kind: Literal["raw", "end2end"], max_det: int) -> Iterator[None]:
    """The model in evaluation mode, with the head of this kind; afterwards as before, module by module."""
    modes = {layer: layer.training for layer in model.modules()}
    head = model.model[-1]
    # A head keeps the grid of its last picture (anchors, strides, for a shape): the three belong together.
    settings = {
        "_end2end": kind == "end2end", "max_det": max_det, "agnostic_nms": False, "xyxy": False, "export": False,
        "shape": None, "anchors": None, "strides": None,
    }  # fmt: skip
    before = {key: vars(head)[key] for key in settings if key in vars(head)}
    # A Detect head computes both of its branches, whichever it answers with, but passes over one that is not there.
    idle = ("cv2", "cv3") if kind == "end2end" and type(head).__name__ == "Detect" else ()
    branches = {key: head._modules[key] for key in idle}
    try:
        model.eval()
        vars(head).update(settings)
        head._modules.update(dict.fromkeys(branches))
        yield
    finally:
        for key in settings:
            vars(head).pop(key, None)
        vars(head).update(before)
        head._modules.update(branches)
        for layer, training in modes.items():
            layer.training = training
