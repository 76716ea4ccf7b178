"""The same ONNX file in Ultralytics and here gives the same boxes on real photographs.

Random weights from YAML; the class head is rescaled so that scores spread over 0..1 as those of a trained model do.
Left out, and counted: pairs of boxes within 1e-4 of the IoU threshold, where Ultralytics' class offset rounds.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import _core

ultralytics = pytest.importorskip("ultralytics")
PHOTOS = Path(ultralytics.__file__).parent / "assets"

# The models, and whether the end-to-end head is exported.
CASES = [
    ("yolo26n.yaml", False),
    ("yolo26n.yaml", True),
    ("yolo11n.yaml", False),
    ("yolov8n.yaml", False),
    ("yolov5n.yaml", False),
]
CONF, IOU = 0.25, 0.7


def spread_scores(model: Any, image: NDArray[np.float32]) -> None:
    """Scales and shifts the last layers of the class branches so that at least 2 % of the anchors score above 0.25."""
    head = model.model[-1]
    branches = [head.cv3] + ([head.one2one_cv3] if getattr(head, "one2one_cv3", None) is not None else [])
    for branch in branches:
        for layers in branch:
            seen: list[torch.Tensor] = []
            hook = layers[-1].register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
            with torch.no_grad():
                model(torch.from_numpy(image))
                hook.remove()
                logits = torch.nn.functional.conv2d(seen[0], layers[-1].weight)
                # One bias and one gain for a level: the best class of an anchor is then spread around the threshold.
                best = logits.amax(1).flatten(1)  # (photograph, anchor)
                gain = 3.0 / best.std()
                layers[-1].weight *= gain
                # The photograph with the lower scores decides, so that each has enough.
                layers[-1].bias[:] = -1.1 - torch.quantile(best * gain, 0.98, dim=1).min()


def export_with_spread_scores(yaml: str, end2end: bool, folder: Path) -> Path:
    """An ONNX of random weights whose scores are spread as those of a trained model; 640 x 640, static."""
    torch.manual_seed(0)
    model = ultralytics.YOLO(yaml)
    model.model.eval()
    blob = np.empty((2, 3, 640, 640), np.float32)
    for planes, name in zip(blob, ("bus.jpg", "zidane.jpg"), strict=True):
        _core.LetterboxPool().run(cv2.imread(str(PHOTOS / name)), planes)
    spread_scores(model.model, blob)
    model.ckpt_path = str(folder / "model.pt")
    model.model.pt_path = str(folder / "model.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about tracing
        return Path(model.export(format="onnx", imgsz=640, nms=False if end2end else None, verbose=False))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0][:-5]}{'-end2end' if case[1] else ''}")
def model_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    yaml, end2end = request.param
    return export_with_spread_scores(yaml, end2end, tmp_path_factory.mktemp("ultralytics"))


def near_threshold(raw: NDArray[np.float32], conf: float) -> set[int]:
    """Anchors of pairs whose IoU is within 1e-4 of the threshold: either answer is right for them."""
    from torchvision.ops import box_iou

    rows = raw[0].T
    scores, classes = rows[:, 4:].max(1), rows[:, 4:].argmax(1)
    keep = np.flatnonzero(scores > conf)
    half = rows[keep, 2:4] / 2
    boxes = torch.from_numpy(np.concatenate([rows[keep, :2] - half, rows[keep, :2] + half], 1))
    close = (box_iou(boxes, boxes) - IOU).abs().numpy() < 1e-4
    close &= classes[keep][:, None] == classes[keep][None]
    return set(keep[close.any(1)].tolist())


# Sizes whose two sides round by different factors: the way back then differs by axis.
@pytest.mark.parametrize(
    ("photo", "size"),
    [
        ("bus.jpg", None),
        ("zidane.jpg", None),
        ("bus.jpg", (641, 639)),
        ("bus.jpg", (1079, 1919)),
        ("bus.jpg", (1001, 333)),
    ],
    ids=["bus", "zidane", "641x639", "1079x1919", "1001x333"],
)
def test_same_boxes(model_file: Path, photo: str, size: tuple[int, int] | None) -> None:
    image = cv2.imread(str(PHOTOS / photo))
    if size is not None:
        image = cv2.resize(image, size)
    peer = ultralytics.YOLO(str(model_file), task="detect")
    expected = peer.predict(image, imgsz=640, conf=CONF, iou=IOU, max_det=300, device="cpu", verbose=False)[0].boxes
    with edgeyolo.load(model_file, conf=CONF, iou=IOU) as model:
        found = model(image)
        assert model.info()["imgsz"] == [640, 640]
    assert len(found) > 10, "too few boxes to compare"

    theirs = expected.data.cpu().numpy()
    ours = np.column_stack([found.boxes, found.scores, found.class_ids])
    if len(ours) != len(theirs) and found.names:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(model_file))
        blob = np.zeros((1, 3, 640, 640), np.float32)
        _core.LetterboxPool().run(image, blob[0])
        raw = session.run(None, {"images": blob})[0]
        assert near_threshold(raw, CONF), f"{len(ours)} boxes here, {len(theirs)} there, and none is near the threshold"
        pytest.skip("a pair of boxes lies within 1e-4 of the IoU threshold")
    assert len(ours) == len(theirs)
    # The same order, up to ties: scores agree position by position; boxes are matched among near-equal scores.
    np.testing.assert_allclose(ours[:, 4], theirs[:, 4], rtol=0, atol=1e-5)
    unused = set(range(len(theirs)))
    for row in ours:
        near = [i for i in unused if abs(theirs[i, 4] - row[4]) <= 1e-5 and theirs[i, 5] == row[5]]
        distance = {i: np.abs(theirs[i, :4] - row[:4]).max() for i in near}
        best = min(distance, key=lambda i: distance[i], default=None)
        assert best is not None and distance[best] <= 0.02, f"no partner for {row}: {distance}"
        unused.discard(best)
