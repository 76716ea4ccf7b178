"""Augmentation: the pixels against NumPy and OpenCV, the boxes against Ultralytics and against the pixels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edgeyolo.tools.train.augment import Augment
from edgeyolo.tools.train.data import TrainData
from edgeyolo.tools.train.loss import bucket, pack_targets
from edgeyolo.tools.train.warp import shift_hsv
from numpy.typing import NDArray

from augment_cases import PLAIN, SIZE, WILD, boxes_of, canvas_of, picture_of, pixels, training_data, warped
from edgeyolo.errors import InvalidInput
from media import photo

cv2 = pytest.importorskip("cv2")

Floats = NDArray[np.float64]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These pictures are too small for two: the threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data(tmp_path: Path) -> TrainData:
    return training_data(tmp_path)


# ------------------------------------------------------------------------------------------------ an independent truth


@pytest.mark.parametrize(
    "augment", [PLAIN, WILD, Augment(SIZE, fliplr=0, hsv=(0, 0, 0))], ids=["plain", "wild", "usual"]
)
def test_pixels_are_those_of_a_mosaic_warped_in_numpy(data: TrainData, augment: Augment) -> None:
    for step in range(2):
        indices = np.array([1, 2, 5])
        batch, drawn = augment(indices, data, step), augment.draw(indices, data, step)
        for i, image in enumerate(pixels(batch)):
            wanted = warped(canvas_of(drawn, i, data), drawn.matrix[i], SIZE)
            # float32 places: where they decide between two far tiles, a pixel may fall on the other side
            far = np.abs(image - wanted).max(-1) > 0.6
            assert far.mean() < 0.002


def test_pixels_agree_with_opencv(tmp_path: Path) -> None:
    data = training_data(tmp_path, [(256, 256), (256, 200)] * 2, 256)
    augment = Augment(256, degrees=10, shear=5, fliplr=0, hsv=(0, 0, 0))
    indices = np.array([0, 1, 2])
    batch, drawn = augment(indices, data, 3), augment.draw(indices, data, 3)
    half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])
    for i, image in enumerate(pixels(batch)):
        matrix = np.linalg.inv(half) @ drawn.matrix[i] @ half  # OpenCV counts from the centre of the first pixel
        wanted = cv2.warpAffine(canvas_of(drawn, i, data), matrix[:2], (256, 256), borderValue=(114,) * 3)
        difference = np.abs(image.astype(int) - wanted)
        assert difference.mean() < 0.4
        assert (difference > 8).mean() < 0.01  # OpenCV rounds places to 1/32 pixel: seen at the seams


def test_without_chance_a_picture_comes_out_as_it_is(data: TrainData) -> None:
    batch = PLAIN(np.arange(6), data, 0)
    assert batch.images.dtype == torch.uint8
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    for i, image in enumerate(pixels(batch)):
        own = picture_of(data, i)
        height, width = own.shape[:2]
        if (SIZE - height) % 2 or (SIZE - width) % 2:
            continue  # centred to half a pixel: compared in the tests above
        top, left = (SIZE - height) // 2, (SIZE - width) // 2
        wanted = np.full((SIZE, SIZE, 3), 114, np.uint8)
        wanted[top : top + height, left : left + width] = own
        np.testing.assert_array_equal(image, wanted)


@pytest.mark.parametrize(("option", "axis"), [("fliplr", 2), ("flipud", 1)])
def test_flips_mirror_pixels_and_boxes(data: TrainData, option: str, axis: int) -> None:
    plain = Augment(SIZE, degrees=5, fliplr=0, mixup=0.5)
    indices = np.arange(6)
    straight, turned = plain(indices, data, 1), replace(plain, **{option: 1.0})(indices, data, 1)
    far = np.abs(pixels(turned).astype(int) - np.flip(pixels(straight), axis)) > 1
    assert far.mean() < 0.001
    column = 3 - axis  # x is 1, y is 2
    mirrored = straight.targets.clone()
    mirrored[..., column] = torch.where(straight.mask, 1 - mirrored[..., column], mirrored[..., column])
    torch.testing.assert_close(turned.targets, mirrored, rtol=0, atol=1e-6)
    assert torch.equal(turned.mask, straight.mask)
    assert straight.mask.sum() > 5


def test_flips_happen_as_often_as_asked(data: TrainData) -> None:
    drawn = Augment(SIZE, fliplr=0.25, flipud=0.75, scale=0).draw(np.zeros(4000, np.int64), data, 0)
    assert abs((drawn.matrix[:, 0, 0] < 0).mean() - 0.25) < 0.03
    assert abs((drawn.matrix[:, 1, 1] < 0).mean() - 0.75) < 0.03


def test_the_kernel_gives_the_same_pixels() -> None:
    pytest.importorskip("triton")
    script = Path(__file__).with_name("warp_kernel.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    assert len(report) == 8  # mosaic, mixup, perspective: each on and off
    for row in report:
        assert row["worst"] <= 1
        assert row["share"] < 1e-3
        assert row["spread"] > 25


# ------------------------------------------------------------------------------------------------ colours
def test_hsv_is_that_of_opencv() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (3, 40, 40, 3)).astype(np.float32)
    image[0, :10] = image[0, :10, :, :1]  # grey
    image[0, 10] = 0
    gains = np.array([[0.01, 1.4, 0.7], [-0.015, 0.4, 1.3], [0.4, 1.0, 1.0]], np.float32)
    shifted = shift_hsv(torch.from_numpy(image), torch.from_numpy(gains)).numpy()
    for got, source, (hue, saturation, value) in zip(shifted, image, gains, strict=True):
        hsv = cv2.cvtColor(source / 255, cv2.COLOR_RGB2HSV)  # hue in degrees, the others from 0 to 1
        hsv[..., 0] = (hsv[..., 0] + 360 * hue) % 360
        hsv[..., 1:] = np.clip(hsv[..., 1:] * (saturation, value), 0, 1)
        np.testing.assert_allclose(got, cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB) * 255, atol=0.02)


@pytest.mark.parametrize("seed", range(4))
def test_hsv_means_what_it_means_to_ultralytics(seed: int) -> None:
    from ultralytics.data.augment import RandomHSV

    image = photo(64, 64)
    np.random.seed(seed)
    r = np.random.uniform(-1, 1, 3) * (0.015, 0.7, 0.4)
    np.random.seed(seed)
    theirs = RandomHSV(0.015, 0.7, 0.4).apply_image({"img": image.copy()})["img"][:, :, ::-1]
    rgb = torch.from_numpy(image[:, :, ::-1].astype(np.float32))[None]
    ours = shift_hsv(rgb, torch.tensor(r[None] + (0, 1, 1), dtype=torch.float32))[0].numpy()
    assert np.abs(ours - theirs).mean() < 2.0  # their hue has 180 steps; saturation and value are cut to whole numbers
    assert np.abs(ours - image[:, :, ::-1]).mean() > 5.0


def test_hsv_gains_are_drawn_from_the_whole_range(data: TrainData) -> None:
    hsv = Augment(SIZE).draw(np.zeros(2000, np.int64), data, 0).hsv
    np.testing.assert_allclose(hsv.min(0), (-0.015, 0.3, 0.6), atol=0.01)
    np.testing.assert_allclose(hsv.max(0), (0.015, 1.7, 1.4), atol=0.01)
    np.testing.assert_allclose(hsv.mean(0), (0, 1, 1), atol=0.03)


# ------------------------------------------------------------------------------------------------ boxes
def test_boxes_are_those_of_ultralytics(data: TrainData) -> None:
    """Given the same mosaic and matrix, Ultralytics moves, cuts and leaves out the same boxes."""
    from ultralytics.data.augment import RandomPerspective
    from ultralytics.utils.instance import Instances

    augment = replace(WILD, hsv=(0, 0, 0), scale=0.9)
    kept = left_out = 0
    for step in range(30):
        indices = np.array([4, 3, 2])
        drawn = augment.draw(indices, data, step)
        targets, mask = augment.labels(drawn, data)
        for i in range(3):
            xyxy, classes = [], []
            tiled = drawn.centre[i].any()
            for tile, index in enumerate(drawn.pictures[i] if tiled else drawn.pictures[i, :1]):
                first = data.first[index]
                for cls, cx, cy, w, h in data.labels[first : first + data.counts[index]]:
                    width, height = data.sizes[index]
                    x, y = drawn.centre[i] - np.array([(width, 0)[tile % 2], (height, 0)[tile // 2]]) * tiled
                    xyxy.append([x + (cx - w / 2) * width, y + (cy - h / 2) * height,
                                 x + (cx + w / 2) * width, y + (cy + h / 2) * height])  # fmt: skip
                    classes.append(cls)
            canvas_width, canvas_height = drawn.canvas[i]
            boxes = np.clip(np.array(xyxy).reshape(-1, 4), 0, (canvas_width, canvas_height) * 2)
            there = ((boxes[:, 2:] - boxes[:, :2]) > 0).all(1)
            labels = {
                "cls": np.array(classes)[there],
                "instances": Instances(boxes[there].astype(np.float32), bbox_format="xyxy", normalized=False),
            }
            labels["instances"].segments = np.zeros((0, 0, 2), np.float32)
            params = {
                "M": drawn.matrix[i], "scale": drawn.scale[i], "orig_shape": (int(canvas_height), int(canvas_width)),
                "size": (SIZE, SIZE),
            }  # fmt: skip
            theirs = RandomPerspective(perspective=0.001).apply_instances(labels, params)
            theirs["instances"].convert_bbox("xywh")
            np.testing.assert_allclose(targets[i][mask[i]][:, 1:] * SIZE, theirs["instances"].bboxes, atol=2e-3)
            np.testing.assert_array_equal(targets[i][mask[i]][:, 0], theirs["cls"])
            kept, left_out = kept + int(mask[i].sum()), left_out + len(xyxy) - int(mask[i].sum())
    assert kept > 100
    assert left_out > 100


def test_boxes_stay_on_their_objects(tmp_path: Path) -> None:
    """A bright rectangle in each dark picture: after the warp it fills its box."""
    size, rng = 256, np.random.default_rng(1)
    paths, labels = [], []
    for i in range(6):
        height, width = ((256, 256), (160, 256), (256, 200))[i % 3]
        image = np.zeros((height, width, 3), np.uint8)
        x1, y1 = rng.integers(10, 60, 2)
        x2, y2 = rng.integers(90, 150, 2)
        image[y1:y2, x1:x2] = 40 * (i + 1)
        paths.append(tmp_path / f"{i}.png")
        assert cv2.imwrite(str(paths[-1]), image)
        labels.append(
            np.array([[i, (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height]])
        )
    data = TrainData(paths, labels, size)
    augment = Augment(size, hsv=(0, 0, 0), flipud=0.5)  # no rotation: an upright rectangle stays one
    off = []
    for step in range(8):
        batch = augment(np.arange(6), data, step)
        for i, image in enumerate(pixels(batch).astype(np.int64)):
            boxes = boxes_of(batch, i)
            for cls, x1, y1, x2, y2 in boxes:
                if (boxes[:, 0] == cls).sum() > 1:
                    continue  # the picture came twice
                level = 40 * (int(cls) + 1)
                ys, xs = np.nonzero(np.abs(image[:, :, 0] - level) <= level / 2)  # edges are where they cross the half
                inside = (xs >= x1 - 1) & (xs <= x2) & (ys >= y1 - 1) & (ys <= y2)
                assert inside.any()
                found = (xs[inside].min(), ys[inside].min(), xs[inside].max() + 1, ys[inside].max() + 1)
                np.testing.assert_allclose(found, (x1, y1, x2, y2), atol=1.01)
                off.append(np.subtract(found, (x1, y1, x2, y2)))
    assert len(off) > 60
    assert np.abs(np.mean(off, 0)).max() < 0.15  # not to one side, as half a pixel would be


# ------------------------------------------------------------------------------------------------ mosaic, mixup, closed
def test_the_mosaic_is_drawn_as_in_ultralytics(data: TrainData) -> None:
    drawn = Augment(SIZE, mosaic=0.7, mixup=0.3).draw(np.tile(np.arange(6), 500), data, 0)
    batch, views = 3000, len(drawn.pictures)
    tiled = drawn.centre.any(1)
    assert abs(tiled.mean() - 0.7) < 0.03
    assert drawn.centre[tiled].min() == SIZE / 2
    assert drawn.centre[tiled].max() == 1.5 * SIZE - 1  # whole pixels
    assert (drawn.canvas[tiled] == 2 * SIZE).all()
    np.testing.assert_array_equal(drawn.canvas[~tiled], data.sizes[drawn.pictures[~tiled, 0]])
    assert (drawn.pictures[~tiled] == drawn.pictures[~tiled, :1]).all()
    np.testing.assert_array_equal(drawn.pictures[:batch, 0], np.tile(np.arange(6), 500))
    np.testing.assert_allclose(np.bincount(drawn.pictures[tiled, 1:].ravel()) / (3 * tiled.sum()), 1 / 6, atol=0.02)
    mixed = drawn.partner >= 0
    assert abs(mixed.mean() - 0.3) < 0.03
    assert drawn.partner[mixed].tolist() == list(range(batch, views))
    assert abs(drawn.ratio[mixed].mean() - 0.5) < 0.01
    assert abs(drawn.ratio[mixed].std() - 0.062) < 0.005  # of Beta(32, 32)
    assert (drawn.scale.min() >= 0.5, drawn.scale.max() <= 1.5) == (True, True)
    # The middle of the canvas lands within translate of the middle of the output.
    middle = np.einsum("tij,tj->ti", drawn.matrix, np.column_stack((drawn.canvas / 2, np.ones(views))))
    np.testing.assert_allclose(middle[:, :2].min(0), 0.4 * SIZE, atol=0.3)
    np.testing.assert_allclose(middle[:, :2].max(0), 0.6 * SIZE, atol=0.3)


class Others:
    """What an Ultralytics transform asks of a data set: here the next of the given pictures."""

    cache = "ram"

    def __init__(self, parts: list[dict[str, Any]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return 3

    def get_image_and_label(self, index: int) -> dict[str, Any]:
        return self.parts.pop(0)


def test_the_mosaic_of_ultralytics_has_the_same_pixels(data: TrainData, monkeypatch: pytest.MonkeyPatch) -> None:
    from ultralytics.data import augment as theirs

    drawn = Augment(SIZE).draw(np.arange(6), data, 0)
    for view in range(6):
        centre = [float(value) for value in drawn.centre[view][::-1]]  # they draw y first
        monkeypatch.setattr(theirs.random, "uniform", lambda low, high, values=centre: values.pop(0))
        parts = []
        for index in drawn.pictures[view]:
            image = picture_of(data, int(index)).copy()
            parts.append({"img": image, "resized_shape": image.shape[:2]})
        mosaic = theirs.Mosaic(dataset=Others(parts[1:]), imgsz=SIZE, p=1.0)
        got = mosaic.apply_image(parts[0], mosaic.get_params(parts[0]))["img"]
        np.testing.assert_array_equal(canvas_of(drawn, view, data), got)


def test_mixup_blends_two_views_and_their_boxes(data: TrainData) -> None:
    augment = Augment(SIZE, mixup=0.5, hsv=(0, 0, 0), fliplr=0)
    indices = np.array([4, 3, 2, 4])
    batch, drawn = augment(indices, data, 2), augment.draw(indices, data, 2)
    mixed = drawn.partner >= 0
    assert mixed.any()
    assert not mixed.all()
    alone = replace(
        augment.draw(indices, data, 2), partner=np.full(len(drawn.pictures), -1), ratio=np.ones(len(drawn.pictures))
    )
    targets, mask = augment.labels(alone, data)
    for i, image in enumerate(pixels(batch)):
        own = [warped(canvas_of(drawn, view, data), drawn.matrix[view], SIZE) for view in (i, drawn.partner[i])]
        wanted = own[0] * drawn.ratio[i] + own[1] * (1 - drawn.ratio[i]) if mixed[i] else own[0]
        assert (np.abs(image - wanted).max(-1) > 0.6).mean() < 0.002
        both = [targets[i][mask[i]]] + ([targets[drawn.partner[i]][mask[drawn.partner[i]]]] if mixed[i] else [])
        np.testing.assert_array_equal(batch.targets[i][batch.mask[i]].numpy(), np.concatenate(both))


def test_closed_leaves_mosaic_and_mixup_out(data: TrainData) -> None:
    drawn = Augment(SIZE, mixup=1.0).draw(np.arange(6), data, 0, closed=True)
    assert not drawn.centre.any()
    assert (drawn.partner == -1).all()
    assert len(drawn.pictures) == 6
    assert drawn.scale.std() > 0.1  # the affine stays


# ------------------------------------------------------------------------------------------------ the same again
def test_a_step_is_the_same_wherever_and_whenever_it_runs(data: TrainData, tmp_path: Path) -> None:
    augment = Augment(SIZE, seed=3, mixup=0.5, degrees=10, flipud=0.5)
    indices = np.array([5, 0, 3, 4])
    first = augment(indices, data, 7)
    for _ in range(2):
        augment(indices, data, 8)
    on_disk = training_data(tmp_path, on_disk=True)
    for other in (data, on_disk):
        again = augment(torch.from_numpy(indices), other, 7)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for changed in (augment(indices, data, 8), replace(augment, seed=4)(indices, data, 7)):
        assert not torch.equal(changed.images, first.images)


def test_chunks_do_not_show(data: TrainData, monkeypatch: pytest.MonkeyPatch) -> None:
    from edgeyolo.tools.train import warp

    augment, indices = Augment(SIZE, mixup=0.5), np.arange(5)
    whole = augment(indices, data, 0)
    monkeypatch.setattr(warp, "CHUNK_PIXELS", 2 * SIZE * SIZE)
    assert torch.equal(augment(indices, data, 0).images, whole.images)


def test_targets_have_the_form_of_the_loss(data: TrainData) -> None:
    batch = replace(PLAIN, pad=bucket)(np.arange(6), data, 0)
    assert batch.targets.shape == (6, 64, 5)
    index, column = batch.mask.nonzero(as_tuple=True)
    flat = batch.targets[index, column]
    targets, mask = pack_targets(index, flat[:, 0], flat[:, 1:], batch=6, nc=3)
    assert torch.equal(mask, batch.mask)
    assert torch.equal(targets, batch.targets)
    assert batch.mask.sum(1).tolist() == [0, 1, 2, 3, 4, 0]


def test_padding_grows_with_the_fullest_picture(data: TrainData) -> None:
    crowded = TrainData(data.pictures[:1], [np.tile([[0, 0.5, 0.5, 0.5, 0.5]], (70, 1))], SIZE)
    assert replace(PLAIN, pad=bucket)([0], crowded, 0).targets.shape == (1, 128, 5)
    assert PLAIN([0], crowded, 0).targets.shape == (1, 128, 5)
    with pytest.raises(InvalidInput, match=r"pad\(70\) gave 64"):
        replace(PLAIN, pad=lambda boxes: 64)([0], crowded, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed is at least 0, got -1"),
        ({"mosaic": 1.5}, "mosaic goes from 0 to 1; got 1.5"),
        ({"hsv": (0.1, -0.1, 0)}, "hsv_s goes from 0 to 1"),
        ({"scale": 1.0}, "scale goes from 0 to 0.99"),
        ({"perspective": 0.1}, "perspective goes from 0 to 0.001"),
    ],
)
def test_options_are_checked(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        Augment(SIZE, **options)


def test_another_image_size_is_refused(data: TrainData) -> None:
    with pytest.raises(InvalidInput, match="decoded at 64, the batches are wanted at 32"):
        Augment(32)([0], data, 0)
