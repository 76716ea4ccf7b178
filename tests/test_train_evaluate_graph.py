"""Measuring again and again: what is recorded when, what is held, where the pictures stay. A tape stands for the graph;
a device store is a tensor beside the host's, here on the CPU too."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.examples.signs import CLASSES, dataset
from edgeyolo.tools.model.weights import open_weights
from edgeyolo.tools.train import evaluate_forward, evaluate_pictures
from edgeyolo.tools.train.evaluate import Validation
from edgeyolo.tools.train.evaluate_pictures import Pictures
from edgeyolo.tools.train.memory import FreeMemory

from edgeyolo import Detections
from edgeyolo.errors import SourceError
from export_checkpoints import ASSETS
from test_train_graph import Tape

NAMES = dict(enumerate(CLASSES))
IMGSZ = (64, 96)
COUNT, BATCH = 13, 2  # more batches than are on their way at once; the last one is smaller


@pytest.fixture(scope="module")
def drawn() -> list[bytes]:
    return [dataset.picture("val", index, 192, seed=5)[1] for index in range(COUNT)]


@pytest.fixture
def files(tmp_path: Path, drawn: list[bytes]) -> list[Path]:
    paths = [tmp_path / f"{index:02d}.jpg" for index in range(COUNT)]
    for path, jpeg in zip(paths, drawn, strict=True):
        path.write_bytes(jpeg)
    return paths


@pytest.fixture
def model() -> Any:
    return open_weights(ASSETS / "signs.pt").model


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded at the first batch."""
    monkeypatch.setattr(evaluate_forward, "PAYS", 0)


def validation(files: Sequence[Path], **options: Any) -> Validation:
    rng = np.random.default_rng(0)
    boxes = [
        np.column_stack((rng.integers(0, 8, 3), rng.uniform(0.3, 0.7, (3, 2)), rng.uniform(0.1, 0.5, (3, 2))))
        for _ in files
    ]
    return Validation(files, boxes, NAMES, imgsz=IMGSZ, **{"batch": BATCH, **options})


def same(ours: Sequence[Detections], theirs: Sequence[Detections], most: float = 0.0) -> None:
    """Equal; with `most`: but for rounding, which a batch of another size may change, above the threshold's edge."""
    assert len(ours) == len(theirs) == COUNT and sum(map(len, theirs)) > COUNT
    for a, b in zip(ours, theirs, strict=True):
        if most:
            a, b = a[a.scores > 0.01], b[b.scores > 0.01]
        assert a.image_size == b.image_size and np.array_equal(a.class_ids, b.class_ids)
        np.testing.assert_allclose(a.boxes, b.boxes, atol=100 * most, rtol=0)
        np.testing.assert_allclose(a.scores, b.scores, atol=most, rtol=0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("head", ["raw", "end2end"])
def test_one_shape_gives_what_batches_as_they_are_give(files: list[Path], model: Any, head: str) -> None:
    tape = Tape()
    plain, recorded = validation(files, head=head), validation(files, head=head, recorder=tape)
    for _ in range(2):  # pictures from the files, then from the cache
        same(list(recorded.detections(model)), list(plain.detections(model)), 1e-5)
    assert recorded(model).map50_95 == pytest.approx(plain(model).map50_95, abs=1e-6)
    assert (tape.records, tape.warm_ups) == (1, 1)


def test_recorded_once_it_pays(files: list[Path], model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_forward, "PAYS", 9)
    tape, other = Tape(), copy.deepcopy(model)
    measured = validation(files, recorder=tape)
    eager = list(measured.detections(model))  # 7 batches
    assert tape.records == 0
    same(list(measured.detections(model)), eager)  # both ways, and they are the same
    assert tape.records == 1
    measured(model)
    measured(other)
    assert tape.records == 1  # a model that is measured once is not worth it
    measured(other)
    assert tape.records == 2


@pytest.mark.usefixtures("at_once")
def test_new_weights_in_the_same_place_need_no_new_recording(files: list[Path], model: Any) -> None:
    tape = Tape()
    recorded, plain = validation(files, recorder=tape), validation(files)
    before = list(recorded.detections(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    after = list(recorded.detections(model))
    assert tape.records == 1
    same(after, list(plain.detections(model)), 1e-5)
    assert any(len(a) != len(b) or not np.array_equal(a.scores, b.scores) for a, b in zip(after, before, strict=True))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("what", ["parameter", "buffer", "type"])
def test_moved_tensors_are_recorded_anew(files: list[Path], model: Any, what: str) -> None:
    tape = Tape()
    recorded, norm = validation(files, recorder=tape), model.model[0].bn
    recorded(model)
    if what == "parameter":
        norm.weight.data = norm.weight.data.clone()
    elif what == "buffer":
        norm.running_mean = norm.running_mean.clone()
    else:
        model.double()
    recorded(model)
    recorded(model)
    assert tape.records == 2


@pytest.mark.usefixtures("at_once")
def test_a_refused_recording_is_told_once(files: list[Path], model: Any) -> None:
    tape = Tape(fail_at=1)
    recorded, plain = validation(files, recorder=tape), list(validation(files).detections(model))
    with pytest.warns(RuntimeWarning, match="without a CUDA graph: RuntimeError: operation not permitted") as told:
        same(list(recorded.detections(model)), plain, 1e-5)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(list(recorded.detections(model)), plain, 1e-5)
        recorded(copy.deepcopy(model))
    assert tape.records == 1


@pytest.mark.usefixtures("at_once")
def test_what_is_held_and_when_it_goes(files: list[Path], model: Any) -> None:
    seen: list[weakref.ref[Any]] = []

    class Watching(Tape):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            head = model.model[-1]
            seen.extend(weakref.ref(t) for t in (head.anchors, head.strides, run))
            return super().record(run)

    recorded = validation(files, recorder=Watching())
    before = {key: value for key, value in vars(model.model[-1]).items() if key in ("anchors", "strides")}
    recorded(model)
    # The graph reads the grid that the head had while it was recorded; the head itself has its old one again.
    assert all(vars(model.model[-1]).get(key) is value for key, value in before.items())
    assert [ref() is not None for ref in seen] == [True] * 3
    gc.collect()
    gc.disable()
    try:
        recorded(copy.deepcopy(model))  # of one model at a time
        assert [ref() for ref in seen[:3]] == [None] * 3
        recorded(model)
        alive = weakref.ref(model.model[0].conv.weight), seen[-1]
        assert alive[1]() is not None
        del recorded
        assert alive[1]() is None  # no cycle keeps the graph or its memory
    finally:
        gc.enable()
    assert alive[0]() is not None


@pytest.mark.usefixtures("at_once")
def test_forget(files: list[Path], model: Any) -> None:
    tape = Tape()
    measuring = validation(files, recorder=tape)
    found = list(measuring.detections(model))
    read = set(measuring._pictures.read)
    alive = [weakref.ref(thing) for thing in (tape, measuring._forward)]
    del tape
    measuring.forget()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert measuring._pictures.read == read and read
    same(list(measuring.detections(model)), found, 1e-5)


def test_the_branch_that_does_not_answer_is_left_out(files: list[Path], model: Any) -> None:
    head, calls = model.model[-1], {"cv2": 0, "one2one_cv2": 0}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name in calls:

        def count(*_: Any, name: str = name) -> None:
            calls[name] += 1

        getattr(head, name)[0].register_forward_hook(count)
    hook = model.register_forward_hook(lambda layer, args, out: seen.append((args[0], out[0])))
    list(validation(files, head="end2end").detections(model))
    assert calls == {"cv2": 0, "one2one_cv2": 7}
    hook.remove()
    assert isinstance(head.cv2, torch.nn.ModuleList) and isinstance(head.cv3, torch.nn.ModuleList)
    head.end2end = True
    with torch.no_grad():
        whole = [model.eval()(images)[0] for images, _ in seen]
    assert calls == {"cv2": 7, "one2one_cv2": 14}
    assert all(torch.equal(a, b) for a, (_, b) in zip(whole, seen, strict=True))
    list(validation(files, head="raw").detections(model))
    assert calls["cv2"] == 14


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pictures, "_choose", lambda self, device: ("device", len(self.files)))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("recorder", [None, Tape()], ids=["eager", "recorded"])
def test_pictures_on_the_device(
    files: list[Path], model: Any, monkeypatch: pytest.MonkeyPatch, recorder: Tape | None
) -> None:
    plain = list(validation(files).detections(model))
    on_device(monkeypatch)
    kept = validation(files, recorder=recorder)
    stopped = kept.detections(model)
    next(stopped)
    stopped.close()  # a part of the pictures is there by now
    same(list(kept.detections(model)), plain, 1e-5 if recorder else 0.0)
    for file in files:
        file.unlink()
    same(list(kept.detections(model)), plain, 1e-5 if recorder else 0.0)


def test_a_damaged_picture_ends_it_on_the_device_too(
    files: list[Path], model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch)
    whole = files[5].read_bytes()
    files[5].write_bytes(whole[:300])
    kept = validation(files)
    with pytest.raises(SourceError, match=r"05\.jpg"):
        kept(model)
    files[5].write_bytes(whole)
    same(list(kept.detections(model)), list(validation(files).detections(model)))


@pytest.mark.parametrize(
    ("free", "unified", "cache_bytes", "wanted"),
    [
        (20 * 13, False, None, ("device", 13)),
        (20 * 13 - 1, False, None, ("host", 13)),
        (1 << 30, False, 13, ("device", 13)),
        (1 << 30, False, 12, ("host", 12)),
        (1 << 30, False, 3, ("host", 2)),  # whole batches
        (1 << 30, False, 0, ("host", 0)),
        (20 * 7, True, None, ("host", 6)),  # the same memory: pinned is taken too
    ],
)
def test_where_the_pictures_go(
    monkeypatch: pytest.MonkeyPatch, free: int, unified: bool, cache_bytes: int | None, wanted: tuple[str, int]
) -> None:
    """free, cache_bytes: in pictures; there are 13, in batches of 2."""
    each = 3 * 32 * 64
    monkeypatch.setattr(evaluate_pictures, "free_memory", lambda device: FreeMemory(free * each, 1 << 40, unified))
    limit = None if cache_bytes is None else cache_bytes * each
    assert Pictures([Path("a.jpg")] * 13, (32, 64), 2, limit)._choose(torch.device("cuda")) == wanted
