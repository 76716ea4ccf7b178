"""How good a model in training is, by the application's own rules.

    validation = Validation(pictures, labels, names, imgsz=640)
    metrics = validation(step.ema.model)                # after each epoch; the pictures are decoded once

Pictures are letterboxed and boxes decoded by the functions that serve a published model, and the mAP is COCO's
(tools/metrics.py): what is measured here is what the exported graph will answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from edgeyolo import Detections, _core
from edgeyolo.errors import InvalidInput
from edgeyolo.pictures import read_picture

from ..metrics import Evaluation, Labels, Metrics

__all__ = ["Validation", "evaluate"]

Head = Literal["auto", "raw", "end2end"]

CONF = 0.001  # the curve's right end: COCO counts every detection
CACHE_BYTES = 1 << 30


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
    max_det: detections of a picture. cache_bytes: memory for letterboxed pictures (3 bytes a pixel); what does not fit
    is decoded every time.
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
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if not pictures or len(pictures) != len(labels):
            raise InvalidInput(f"expected pictures with labels for each, found {len(pictures)} and {len(labels)}")
        if head not in ("auto", "raw", "end2end"):
            raise InvalidInput(f"head is one of auto, raw, end2end; found {head!r}")
        if batch < 1:
            raise InvalidInput(f"batch must be at least 1, found {batch}")
        self._pictures = [Path(picture) for picture in pictures]
        self._names = {int(key): str(name) for key, name in sorted(names.items())}
        self._labels = [
            _checked(rows, picture, self._names) for rows, picture in zip(labels, self._pictures, strict=True)
        ]
        self._imgsz = (imgsz, imgsz) if isinstance(imgsz, int) else (int(imgsz[0]), int(imgsz[1]))
        self._batch, self._head = batch, head
        self._max_det = max_det
        self._post = _core.Postprocessor(conf=CONF, iou=iou, max_det=max_det, agnostic=False, allowed=[])
        self._letterbox = _core.LetterboxPool()
        self._room = cache_bytes // (3 * self._imgsz[0] * self._imgsz[1])
        self._cache: dict[int, tuple[NDArray[np.uint8], tuple[int, int]]] = {}

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
                width, height = found.image_size
                rows = self._labels[index]
                centre, size = rows[:, 1:3] * (width, height), rows[:, 3:5] * (width, height)
                boxes = np.hstack([centre - size / 2, centre + size / 2])
                evaluation.add(found, Labels(boxes, rows[:, 0].astype(np.int64)))
                if progress is not None:
                    progress(index + 1, len(self._pictures))
        return evaluation.result()

    def detections(self, model: Any) -> Generator[Detections, None, None]:
        """What the model finds in each picture, in its pixels, down to a score of 0.001. Close it, or use it up."""
        kind = self._check(model)
        first = next(model.parameters())
        count = len(self._pictures)
        with _measured(model, kind, self._max_det), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            ahead = self._ask(pool, 0)
            for start in range(0, count, self._batch):
                loaded = [future.result() for future in ahead]
                ahead = self._ask(pool, start + self._batch)  # decoded while the network is at work
                pixels = torch.from_numpy(np.stack([planes for planes, _ in loaded]))
                with torch.no_grad():
                    images = pixels.to(first.device).to(first.dtype).div_(255)
                    outputs = model(images)[0].to(torch.float32).cpu().numpy()
                sizes = [size for _, size in loaded]
                yield from pool.map(self._decode, outputs, sizes, [kind] * len(sizes))

    def _ask(self, pool: ThreadPoolExecutor, start: int) -> list[Future[tuple[NDArray[np.uint8], tuple[int, int]]]]:
        stop = min(start + self._batch, len(self._pictures))
        return [pool.submit(self._read, index) for index in range(start, stop)]

    def _read(self, index: int) -> tuple[NDArray[np.uint8], tuple[int, int]]:
        """Letterboxed RGB planes (3, H, W) of a picture, and its size (width, height)."""
        if index in self._cache:
            return self._cache[index]
        picture = read_picture(self._pictures[index])
        planes = np.empty((3, *self._imgsz), np.float32)
        self._letterbox.run(picture, planes)
        # Exactly the pixels: what comes out of the letterbox are whole numbers / 255.
        result = np.rint(planes * np.float32(255)).astype(np.uint8), (picture.shape[1], picture.shape[0])
        if index < self._room:
            self._cache[index] = result
        return result

    def _decode(self, output: NDArray[np.float32], size: tuple[int, int], kind: str) -> Detections:
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
    try:
        model.eval()
        vars(head).update(settings)
        yield
    finally:
        for key in settings:
            vars(head).pop(key, None)
        vars(head).update(before)
        for layer, training in modes.items():
            layer.training = training
