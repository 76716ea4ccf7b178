"""The pictures of a training run: what is stored, where, and in which order it is handed out."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from edgeyolo.tools.train.data import TrainData, take_room
from numpy.typing import NDArray

from edgeyolo.errors import InvalidInput
from media import photo

cv2 = pytest.importorskip("cv2")

SIZE = 64
SHAPES = [(48, 67), (80, 30), (64, 64), (20, 31), (33, 64)]  # height, width


def pictures_in(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, (height, width) in enumerate(SHAPES):
        paths.append(folder / f"{i}.png")
        assert cv2.imwrite(str(paths[-1]), photo(height, width))
    return paths


def labels_of(count: int) -> list[NDArray[np.float64]]:
    return [np.array([[i, 0.5, 0.5, 0.1 * (k + 1), 0.2] for k in range(i % 3)]).reshape(-1, 5) for i in range(count)]


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return pictures_in(tmp_path / "images")


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_pictures_are_resized_rgb_in_the_corner(
    paths: list[Path], tmp_path: Path, place: Literal["device", "host", "disk"]
) -> None:
    data = TrainData(paths, labels_of(5), SIZE, place=place, folder=tmp_path / "run")
    assert data.place == place
    assert data.nbytes == 5 * SIZE * SIZE * 3
    indices = np.array([4, 0, 0, 2, 1, 3])
    pixels, slots = data.fetch(indices)
    assert pixels.dtype == torch.uint8
    assert pixels.shape[1:] == (SIZE, SIZE, 3)
    expected_sizes = [(64, 46), (24, 64), (64, 64), (64, 42), (64, 33)]  # rounded up: 48 * 64 / 67 = 45.9
    assert data.sizes.tolist() == [list(size) for size in expected_sizes]
    for index, slot in zip(indices, slots, strict=True):
        width, height = expected_sizes[index]
        read = cv2.imread(str(paths[index]))
        wanted = cv2.resize(read, (width, height), interpolation=cv2.INTER_LINEAR)[:, :, ::-1]
        np.testing.assert_array_equal(pixels[slot, :height, :width].numpy(), wanted)


def test_labels_are_found_by_picture(paths: list[Path]) -> None:
    data = TrainData(paths, labels_of(5), SIZE)
    assert data.counts.tolist() == [0, 1, 2, 0, 1]
    for i, rows in enumerate(labels_of(5)):
        np.testing.assert_array_equal(data.labels[data.first[i] : data.first[i] + data.counts[i]], rows)


@pytest.mark.parametrize("place", ["device", "disk"])
def test_unreadable_pictures_are_left_out_and_told(
    paths: list[Path], tmp_path: Path, place: Literal["device", "disk"]
) -> None:
    paths[1].write_bytes(paths[1].read_bytes()[:200])
    for reused in (False, place == "disk"):
        data = TrainData(paths, labels_of(5), SIZE, place=place, folder=tmp_path / "run")
        assert data.reused == reused
        assert [p.name for p in data.pictures] == ["0.png", "2.png", "3.png", "4.png"]
        assert [file for file, _ in data.problems] == [paths[1]]
        assert data.problems[0][1].startswith("the PNG file is truncated")
        pixels, slots = data.fetch(np.array([1]))  # what was picture 2
        wanted = cv2.imread(str(paths[2]))[:, :, ::-1]
        np.testing.assert_array_equal(pixels[slots[0]].numpy(), wanted)
        assert data.counts.tolist() == [0, 2, 0, 1]


def test_no_readable_picture_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_text("text")
    with pytest.raises(InvalidInput, match=r"none of the 1 pictures can be read; the first: .*a\.png"):
        TrainData([file], [np.zeros((0, 5))], SIZE)
    with pytest.raises(InvalidInput, match="found none"):
        TrainData([], [], SIZE)
    with pytest.raises(InvalidInput, match="expected labels for each of the 1 pictures, found 0"):
        TrainData([file], [], SIZE)


# ------------------------------------------------------------------------------------------------ places
def test_what_does_not_fit_goes_to_the_disk(paths: list[Path], tmp_path: Path) -> None:
    need = 5 * SIZE * SIZE * 3
    assert TrainData(paths, labels_of(5), SIZE, budget_bytes=need).place == "device"
    data = TrainData(paths, labels_of(5), SIZE, budget_bytes=need - 1, folder=tmp_path / "run")
    assert data.place == "disk"
    assert [p.suffix for p in sorted((tmp_path / "run").iterdir())] == [".json", ".u8"]
    with pytest.raises(InvalidInput, match="name a folder"):
        TrainData(paths, labels_of(5), SIZE, budget_bytes=need - 1)
    with pytest.raises(InvalidInput, match="place is"):
        TrainData(paths, labels_of(5), SIZE, place="gpu")  # type: ignore[arg-type]


def test_the_disk_cache_is_reused_until_something_changes(paths: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    seen: list[tuple[int, int]] = []

    def load(size: int = SIZE) -> TrainData:
        seen.clear()
        return TrainData(
            paths,
            labels_of(5),
            size,
            place="disk",
            folder=folder,
            progress=lambda done, total: seen.append((done, total)),
        )

    first = load()
    assert not first.reused
    assert seen == [(i, 5) for i in (1, 2, 3, 4, 5)]
    again = load()
    assert again.reused
    assert seen == []
    assert torch.equal(again.store, first.store)
    assert again.sizes.tolist() == first.sizes.tolist()
    assert not load(32).reused
    for file in folder.glob("*.u8"):
        file.write_bytes(file.read_bytes()[:-1])  # cut short, as a full disk leaves it
    assert not load().reused
    for record in folder.glob("*.json"):
        record.write_text('{"key": 1}')
    assert not load().reused
    assert load().reused
    assert cv2.imwrite(str(paths[0]), np.zeros((40, 40, 3), np.uint8))
    changed = load()
    assert not changed.reused
    assert changed.sizes[0].tolist() == [64, 64]


def test_the_digest_names_the_data(paths: list[Path]) -> None:
    labels = labels_of(5)
    same = TrainData(paths, labels, SIZE).digest
    assert TrainData(paths, labels_of(5), SIZE).digest == same
    assert TrainData(paths, labels, 32).digest != same
    assert TrainData(paths[::-1], labels, SIZE).digest != same
    labels[1][0, 1] += 1e-9
    assert TrainData(paths, labels, SIZE).digest != same


# ------------------------------------------------------------------------------------------------ order
def chained(batches: Iterable[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def test_an_epoch_hands_out_each_picture_once_and_can_be_resumed(paths: list[Path]) -> None:
    data = TrainData(paths, labels_of(5), SIZE)
    batches = [b.tolist() for b in data.batches(3, 2, seed=7)]
    assert [len(b) for b in batches] == [2, 2, 1]
    assert sorted(chained(batches)) == [0, 1, 2, 3, 4]
    assert [b.tolist() for b in data.batches(3, 2, seed=7)] == batches
    assert [b.tolist() for b in data.batches(3, 2, seed=7, start=2)] == batches[1:]
    assert [b.tolist() for b in data.batches(3, 1, seed=7, start=2)] == [[i] for i in chained(batches[1:])]
    assert list(data.batches(3, 2, seed=7, start=5)) == []
    orders = {tuple(chained(b.tolist() for b in data.batches(epoch, 2, seed))) for epoch in range(4) for seed in (7, 8)}
    assert len(orders) == 8


def test_the_last_batch_is_kept_filled_or_dropped(paths: list[Path]) -> None:
    data = TrainData(paths, labels_of(5), SIZE)
    kept = [b.tolist() for b in data.batches(0, 3)]
    assert [len(b) for b in kept] == [3, 2]
    assert [b.tolist() for b in data.batches(0, 3, last="drop")] == kept[:1]
    assert [b.tolist() for b in data.batches(0, 3, last="fill")] == [kept[0], [*kept[1], kept[0][0]]]
    assert [len(b) for b in data.batches(0, 12, last="fill")] == [12]
    with pytest.raises(InvalidInput, match="batch is at least 1"):
        list(data.batches(0, 0))


def test_a_full_disk_is_told_and_leaves_nothing(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(InvalidInput, match=r"run: the pictures need 0 MiB there.*: No space left on device; free some"):
        TrainData(paths, labels_of(5), SIZE, place="disk", folder=folder)
    assert not list(folder.iterdir())


def test_the_cache_has_its_blocks_before_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    take_room(file, 1 << 20)
    assert file.stat().st_size == 1 << 20 <= file.stat().st_blocks * 512


def test_a_picture_that_goes_while_others_are_decoded(paths: list[Path]) -> None:
    def gone(done: int, total: int) -> None:
        if done == total:
            paths[2].unlink()

    data = TrainData(paths, labels_of(5), SIZE, place="device", progress=gone)
    assert len(data) == 5 and data.digest
    again = TrainData(paths, labels_of(5), SIZE, place="device")
    assert len(again) == 4 and again.digest != data.digest
    assert again.problems == [(paths[2], "cannot be read: No such file or directory")]
