"""The sign generator and its data set: seeds, boxes against masks drawn separately, splits, files."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.examples.signs import CLASSES, MIN_VISIBLE, dataset, photos, render, signs
from numpy.typing import NDArray

cv2 = pytest.importorskip("cv2")
ASSETS = Path(__file__).resolve().parents[1] / "assets"
GREEN = (0, 255, 0)


def plain(width: int, height: int, colour: tuple[int, int, int] = GREEN) -> NDArray[np.uint8]:
    image = np.empty((height, width, 3), np.uint8)
    image[:] = colour
    return image


def inside_polygon(polygon: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Even-odd rule for the grid of all (y, x); shares nothing with the generator's own rasteriser."""
    crossings = np.zeros((len(y), len(x)), np.int64)
    for (x1, y1), (x2, y2) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
        if y1 != y2:
            spans = (y1 <= y) != (y2 <= y)
            crossings += spans[:, None] & (x[None, :] < (x1 + (y - y1) / (y2 - y1) * (x2 - x1))[:, None])
    return np.asarray(crossings % 2 == 1)


def hull(mask: NDArray[np.bool_], step: float, x0: float, y0: float) -> list[float]:
    columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
    return [
        x0 + columns[0] * step,
        y0 + rows[0] * step,
        x0 + (columns[-1] + 1) * step,
        y0 + (rows[-1] + 1) * step,
    ]


def nothing_hidden(plate: Any, size: tuple[int, int], *_: Any) -> NDArray[np.uint8]:
    return np.zeros((size[1], size[0]), np.uint8)


def test_a_seed_gives_one_picture() -> None:
    photo = np.random.default_rng(1).integers(0, 256, (240, 320, 3), dtype=np.uint8)
    before = photo.copy()
    first, again, other = (render(photo, np.random.default_rng(seed), signs=4) for seed in (7, 7, 8))
    for a, b in zip(first, again, strict=True):
        assert np.array_equal(a, b)
    assert not np.array_equal(first[0], other[0])
    assert np.array_equal(photo, before)


def test_boxes_lie_inside_and_keep_the_sizes_asked_for() -> None:
    seen: Counter[int] = Counter()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        width, height = int(rng.integers(200, 500)), int(rng.integers(200, 500))
        image, boxes, class_ids = render(plain(width, height), rng, min_size=20, max_fraction=0.4)
        assert image.shape == (height, width, 3) and image.dtype == np.uint8
        assert boxes.dtype == np.float32 and boxes.shape == (len(class_ids), 4) and class_ids.dtype == np.int64
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= (width, height)).all()
        longer = (boxes[:, 2:] - boxes[:, :2]).max(axis=1, initial=0)
        assert (longer <= 0.4 * min(width, height) + 0.5).all()
        assert (longer >= MIN_VISIBLE * 20 - 0.5).all()  # an occluded sign is never smaller than its visible part
        seen.update(class_ids.tolist())
    assert set(seen) == set(range(len(CLASSES)))


def test_the_number_of_signs_is_the_one_asked_for_where_there_is_room() -> None:
    for count in (0, 1, 5):
        _, boxes, _ = render(
            plain(800, 800), np.random.default_rng(count), signs=count, distractors=0, max_fraction=0.1
        )
        assert len(boxes) == count


@pytest.mark.parametrize("class_id", range(len(CLASSES)))
def test_a_box_is_the_hull_of_a_mask_drawn_separately(class_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_occluder", nothing_hidden)
    step, compared = 1 / 8, 0
    for seed in range(6):
        rng = np.random.default_rng([class_id, seed])
        width, height = 150, 120
        plates = signs._arrange(width, height, [class_id], rng, 14.0, 0.6)
        for plate in plates:
            box = signs._paste(plain(width, height).astype(np.float32), plain(width, height), plate, rng)
            assert box is not None
            x, y = (np.arange(0, side, step) + step / 2 for side in (width, height))
            mask = inside_polygon(plate.outline, x, y)
            fine = min(8, max(2, math.ceil(160 / plate.size)))
            np.testing.assert_allclose(box, hull(mask, step, 0, 0), atol=1 / fine + step)
            compared += 1
    assert compared >= 5


def test_a_box_fits_the_pixels_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signs, "_occluder", nothing_hidden)
    monkeypatch.setattr(signs, "_post", lambda *_: None)
    compared = 0
    for seed in range(40):
        photo = plain(300, 300)
        image, boxes, _ = render(
            photo, np.random.default_rng(seed), signs=1, distractors=0, min_size=40, max_fraction=0.4, camera=False
        )
        changed = np.abs(image.astype(int) - photo).max(axis=2) > 60
        for box in boxes:
            longer = float((box[2:] - box[:2]).max())
            np.testing.assert_allclose(hull(changed, 1.0, 0, 0), box, atol=1.5 + 0.06 * longer)
            compared += 1
    assert compared >= 38


def test_occlusion_cuts_the_box_and_hiding_too_much_drops_the_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    def left_part(share: float) -> Any:
        def mask(
            plate: Any, size: tuple[int, int], k: int, corner: NDArray[np.int64], rng: object
        ) -> NDArray[np.uint8]:
            low, high = plate.outline[:, 0].min(), plate.outline[:, 0].max()
            hidden = np.zeros((size[1], size[0]), np.uint8)
            hidden[:, : round((low + share * (high - low) - corner[0]) * k)] = 255
            return hidden

        return mask

    square = CLASSES.index("parking")
    for share, kept in ((0.3, True), (0.7, False)):
        monkeypatch.setattr(signs, "_occluder", left_part(share))
        for seed in range(8):
            rng = np.random.default_rng(seed)
            (plate,) = signs._arrange(300, 300, [square], rng, 60.0, 0.3)
            scene = plain(300, 300).astype(np.float32)
            box = signs._paste(scene, plain(300, 300), plate, rng)
            low, high = plate.outline[:, 0].min(), plate.outline[:, 0].max()
            if plate.outline.min() < 0 or plate.outline.max() > 300:
                continue
            if kept:
                assert box is not None
                assert box[0] == pytest.approx(low + share * (high - low), abs=0.6)
                assert box[2] == pytest.approx(high, abs=0.6)
            else:
                assert box is None
                assert np.array_equal(scene, plain(300, 300).astype(np.float32))  # nothing half drawn is left


@pytest.mark.parametrize(
    "photo",
    [
        np.zeros((64, 64), np.uint8),
        np.zeros((64, 64, 4), np.uint8),
        np.zeros((64, 64, 3)),
        np.zeros((8, 64, 3), np.uint8),
    ],
)
def test_a_photo_of_another_kind_is_refused(photo: Any) -> None:
    with pytest.raises(ValueError, match="photo must be uint8"):
        render(photo, np.random.default_rng(0))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dataset.write(tmp_path_factory.mktemp("signs") / "data", train=24, val=16, imgsz=160, seed=3).parent


def test_labels_parse_and_lie_inside(written: Path) -> None:
    classes: set[int] = set()
    for split, count in (("train", 24), ("val", 16)):
        pictures = sorted((written / "images" / split).iterdir())
        assert len(pictures) == count
        for path in pictures:
            image = cv2.imread(str(path))
            assert max(image.shape[:2]) == 160
            for line in (written / "labels" / split / f"{path.stem}.txt").read_text().splitlines():
                k, x, y, w, h = line.split()
                classes.add(int(k))
                x1, y1, x2, y2 = (float(v) for v in (x, y, x, y))
                half_w, half_h = float(w) / 2, float(h) / 2
                assert half_w > 0 and half_h > 0
                assert min(x1 - half_w, y1 - half_h) >= -1e-6 and max(x2 + half_w, y2 + half_h) <= 1 + 1e-6
    assert classes <= set(range(len(CLASSES))) and len(classes) >= 6
    yaml = (written / "data.yaml").read_text()
    assert "train: images/train\nval: images/val\n" in yaml
    assert all(f"  {k}: {name}\n" in yaml for k, name in enumerate(CLASSES))


def test_no_photograph_is_in_both_splits(written: Path) -> None:
    names = [p.name for p in photos.PHOTOS]
    assert len(set(names)) == len(names)
    held_out = {p.name for p in photos.PHOTOS if p.split == "val"}
    assert 3 * len(held_out) >= len(names)
    used: dict[str, set[str]] = {"train": set(), "val": set()}
    for stem, sources in json.loads((written / "sources.json").read_text()).items():
        used[stem.split("/")[0]].update(sources)
    assert used["val"] <= held_out
    assert used["train"] and not used["train"] & held_out


def test_the_demo_shows_held_out_photographs_only() -> None:
    shipped = sorted((ASSETS / "photos").glob("*.jpg"))
    assert len(shipped) >= 3
    assert sum(path.stat().st_size for path in shipped) < 500_000
    held_out = {Path(p.name).stem: p for p in photos.PHOTOS if p.split == "val"}
    for path in shipped:
        difference = cv2.imread(str(path)).astype(int) - photos.read(held_out[path.stem])
        assert np.abs(difference).mean() < 6  # the same photograph, but for JPEG
        assert f"`{path.name}`" in (ASSETS / "photos" / "README.md").read_text()


def test_the_bytes_do_not_depend_on_the_number_of_workers(written: Path, tmp_path: Path) -> None:
    other = dataset.write(tmp_path / "again", train=24, val=16, imgsz=160, seed=3, workers=2).parent
    files = sorted(p.relative_to(written) for p in written.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    assert len(files) == 2 * 40 + 2
    for file in files:
        assert (written / file).read_bytes() == (other / file).read_bytes(), file


def test_a_failed_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(dataset, "picture", fail)
    with pytest.raises(RuntimeError, match="no ink"):
        dataset.write(tmp_path / "data", train=1, val=1)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keep.txt").write_text("mine")
    assert dataset.main(["--out", str(tmp_path)]) == 1
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "keep.txt").read_text() == "mine"
