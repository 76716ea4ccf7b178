"""Which pictures calibrate, how the network sees them, and when a calibrated graph may be used again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from edgeyolo.tools.model import calibration
from edgeyolo.tools.model.calibration import (
    CalibrationCache,
    calibration_array,
    calibration_digest,
    calibration_versions,
    find_images,
    graph_digest,
    letterbox_digest,
)
from numpy.typing import NDArray

from edgeyolo import _core
from edgeyolo.errors import InvalidInput, ManifestError
from precision_graphs import detector

PHOTOS = Path(__file__).resolve().parents[1] / "assets" / "photos"


def pictures(folder: Path, count: int, size: tuple[int, int] = (32, 48)) -> list[Path]:
    """PNG files named so that the order of text and the natural order differ."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"frame{i}.png" for i in range(count)]
    for i, path in enumerate(paths):
        image = np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8)
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
    return paths


# Finding pictures


def test_a_folder_in_natural_order(tmp_path: Path) -> None:
    paths = pictures(tmp_path / "a", 18)
    deeper = pictures(tmp_path / "a" / "night", 2)
    pictures(tmp_path / "a" / ".thumbs", 3)
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    assert find_images(tmp_path / "a") == paths + deeper
    assert find_images(str(tmp_path / "a" / "*.png")) == paths
    assert find_images([tmp_path / "a", *paths[:3], tmp_path / "a" / "night"]) == paths + deeper, "each once"
    assert find_images(paths, at_least=1) == paths


def test_many_pictures_are_thinned_evenly(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 33)
    assert find_images(tmp_path, at_most=17) == paths[::2]
    assert find_images(tmp_path, at_most=2, at_least=1) == [paths[0], paths[-1]]


def test_lists_and_data_sets(tmp_path: Path) -> None:
    train, val = pictures(tmp_path / "set" / "images" / "train", 20), pictures(tmp_path / "set" / "images" / "val", 17)
    listed = tmp_path / "set" / "val.txt"
    listed.write_text("# validation\n" + "".join(f"./images/val/{p.name}\n\n" for p in val))
    assert [p.resolve() for p in find_images(listed)] == val
    data = tmp_path / "data.yaml"
    for text, wanted in (
        ("path: set\ntrain: images/train\nval: images/val\nnames: {0: a}\n", train),
        ("path: set\nval: val.txt\n", val),
        (f"path: {tmp_path / 'set'}\ntrain: [images/train, images/val]\n", train + val),
        ("train: set/images/train\n", train),
    ):
        data.write_text(text)
        assert [p.resolve() for p in find_images(data)] == wanted
    data.write_text("names: {0: a}\n")
    with pytest.raises(InvalidInput, match=r"data\.yaml: expected a data set with `train:` or `val:`, found neither"):
        find_images(data)
    data.write_text("train: [")
    with pytest.raises(InvalidInput, match=r"data\.yaml: no YAML"):
        find_images(data)
    listed.write_text("images/val/frame0.png\nimages/val/gone.png\n")
    with pytest.raises(InvalidInput, match=r"1 of 2 listed pictures do not exist, the first is .*gone\.png"):
        find_images(listed)


def test_too_few_pictures_are_refused_with_a_number(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    number = r"needs at least 16 pictures, found {} in .*64 to 512 pictures"
    with pytest.raises(InvalidInput, match=number.format(0)):
        find_images(tmp_path / "empty")
    with pytest.raises(InvalidInput, match=number.format(0)):
        find_images([])
    pictures(tmp_path / "few", 15)
    with pytest.raises(InvalidInput, match=number.format(15)):
        find_images(tmp_path / "few")
    with pytest.raises(InvalidInput, match="gone: no such folder or file; calibration needs at least 16 pictures"):
        find_images(tmp_path / "gone")
    (tmp_path / "clip.mp4").write_bytes(b"video")
    with pytest.raises(InvalidInput, match=r"clip\.mp4: expected a folder, a data\.yaml"):
        find_images(tmp_path / "clip.mp4")


# What the network sees


def by_opencv(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float32]:
    """Centred letterbox, border 114, written with OpenCV alone."""
    scale = min(height / image.shape[0], width / image.shape[1])
    h, w = round(image.shape[0] * scale), round(image.shape[1] * scale)
    canvas = np.full((height, width, 3), 114, np.uint8)
    top, left = round((height - h) / 2 - 0.1), round((width - w) / 2 - 0.1)
    canvas[top : top + h, left : left + w] = cv2.resize(image, (w, h), interpolation=cv2.INTER_LINEAR)
    return np.asarray(canvas[:, :, ::-1].transpose(2, 0, 1).astype(np.float32) / np.float32(255))


@pytest.mark.parametrize("imgsz", [(640, 640), (256, 384), (64, 96)])
def test_pictures_are_letterboxed_as_at_run_time(imgsz: tuple[int, int]) -> None:
    paths = sorted(PHOTOS.glob("*.jpg"))
    found = calibration_array(paths, imgsz)
    assert found.shape == (len(paths), 3, *imgsz) and found.dtype == np.float32
    for path, planes in zip(paths, found, strict=True):
        image = cv2.imread(str(path))
        wanted = np.empty((3, *imgsz), np.float32)
        _core.LetterboxPool().run(image, wanted)
        np.testing.assert_array_equal(planes, wanted)
        np.testing.assert_allclose(planes, by_opencv(image, *imgsz), rtol=0, atol=1e-6)


def test_unreadable_pictures_are_told(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 6)
    paths[1].write_bytes(paths[1].read_bytes()[:-20])
    paths[4].write_text("not a picture")
    with pytest.raises(InvalidInput, match=r"2 of 6 calibration pictures cannot .*frame1\.png.*truncated") as told:
        calibration_array(paths, (64, 64))
    assert "frame4.png: not a picture" in str(told.value)
    unreadable: list[tuple[Path, str]] = []
    found = calibration_array(paths, (64, 64), unreadable=unreadable)
    assert [path for path, _ in unreadable] == [paths[1], paths[4]] and "truncated" in unreadable[0][1]
    np.testing.assert_array_equal(found, calibration_array([paths[i] for i in (0, 2, 3, 5)], (64, 64)))
    np.testing.assert_array_equal(calibration_array(paths[:1] + paths[2:4], (64, 64), limit=2), found[[0, 2]])
    with pytest.raises(InvalidInput, match="needs at least 16 pictures, none could be read"):
        calibration_array([paths[1]], (64, 64), unreadable=[])


# The key


@pytest.fixture
def key_parts(tmp_path: Path) -> dict[str, Any]:
    source = detector(tmp_path / "d.onnx", imgsz=64)
    return {
        "weights_sha256": "0" * 64,
        "images": pictures(tmp_path / "pictures", 4),
        "imgsz": (64, 64),
        "precision": "int8",
        "versions": calibration_versions(),
        "graph": graph_digest(source),
        "options": {"rest": "fp16", "method": "max", "keep": []},
    }


def test_nothing_changed_is_a_hit(key_parts: dict[str, Any], tmp_path: Path) -> None:
    key = calibration_digest(**key_parts)
    assert key == calibration_digest(**key_parts) and len(key) == 64
    for path in key_parts["images"]:  # names and times are not what was calibrated on
        os.utime(path, (1, 1))
    moved = [path.rename(tmp_path / f"moved{i}.png") for i, path in enumerate(key_parts["images"])]
    assert calibration_digest(**{**key_parts, "images": moved}) == key


def test_anything_changed_is_a_miss(key_parts: dict[str, Any]) -> None:
    keys = [calibration_digest(**key_parts)]

    def changed(**parts: Any) -> None:
        keys.append(calibration_digest(**{**key_parts, **parts}))

    changed(weights_sha256="1" + "0" * 63)
    changed(imgsz=(64, 96))
    changed(precision="fp16")
    changed(graph="f" * 64)
    changed(options={"rest": "fp32", "method": "max", "keep": []})
    changed(images=key_parts["images"][:3])
    changed(images=key_parts["images"][::-1])
    for name in key_parts["versions"]:
        changed(versions={**key_parts["versions"], name: "0.0.1"})
    image = cv2.imread(str(key_parts["images"][2]))
    image[5, 7, 1] ^= 1  # one bit of one pixel
    key_parts["images"][2].write_bytes(cv2.imencode(".png", image)[1].tobytes())
    changed()
    assert len(set(keys)) == len(keys)


Pool = _core.LetterboxPool  # before any test puts another in its place


class OtherLetterbox:
    """The core's with one instruction set, and then one thing about it changed."""

    def __init__(self, change: str = "", isa: str | None = None) -> None:
        self.change = change
        self.isa = isa
        self.pool = Pool()

    def run(self, image: NDArray[np.uint8], out: NDArray[np.float32]) -> _core.Letterbox:
        geometry = self.pool.run(image, out, "rgb" if self.change == "channels" else "bgr", self.isa)
        if self.change == "border":
            out[out == np.float32(114) / 255] = np.float32(113) / 255
        elif self.change == "place":
            out[:] = np.roll(out, 1, axis=1)
        elif self.change == "scale":
            out *= 255
        return geometry


def test_another_letterbox_is_a_miss(key_parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [calibration_digest(**key_parts)]
    for change in ("border", "place", "scale", "channels"):
        monkeypatch.setattr(calibration._core, "LetterboxPool", lambda change=change: OtherLetterbox(change))
        keys.append(calibration_digest(**key_parts))
    assert len(set(keys)) == 5
    monkeypatch.setattr(calibration._core, "LetterboxPool", OtherLetterbox)
    assert calibration_digest(**key_parts) == keys[0]


def test_the_letterbox_is_the_same_on_every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = letterbox_digest((64, 96))
    assert digest != letterbox_digest((96, 64))
    for isa in _core.isas():
        monkeypatch.setattr(calibration._core, "LetterboxPool", lambda isa=isa: OtherLetterbox(isa=isa))
        assert letterbox_digest((64, 96)) == digest


def test_graph_digest(tmp_path: Path) -> None:
    path = detector(tmp_path / "d.onnx", imgsz=64)
    digest = graph_digest(path)
    model = onnx.load(str(path))
    model.metadata_props.add(key="date", value="2026-01-01")
    onnx.save(model, str(path))
    assert graph_digest(path) == digest, "the time of the export changes nothing"
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    weight.flat[3] = np.nextafter(weight.flat[3], np.float32(np.inf))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weight, model.graph.initializer[0].name))
    onnx.save(model, str(path))
    assert graph_digest(path) != digest, "one weight by one bit"
    onnx.save(onnx.load(str(detector(tmp_path / "e.onnx", imgsz=256, head="end2end"))), str(path))
    assert graph_digest(path) != digest


# The cache


KEY, OTHER = "a" * 64, "b" * 64


def test_cache(tmp_path: Path) -> None:
    cache = CalibrationCache(tmp_path / "cache")
    graph, out = tmp_path / "graph.onnx", tmp_path / "out.onnx"
    graph.write_bytes(bytes(range(256)))
    assert cache.load(KEY, out) is None and not out.exists()
    cache.save(KEY, graph, {"precision": "int8", "casts": 3})
    assert cache.load(OTHER, out) is None and not out.exists()
    assert cache.load(KEY, out) == {"precision": "int8", "casts": 3}
    assert out.read_bytes() == graph.read_bytes()
    graph.write_bytes(b"a second calibration")
    cache.save(KEY, graph, {"precision": "fp16"})
    assert cache.load(KEY, out) == {"precision": "fp16"} and out.read_bytes() == b"a second calibration"
    assert sorted(p.name for p in cache.folder.iterdir()) == [f"{KEY}.json", f"{KEY}.onnx"]
    for wrong in ("", "../" + KEY, KEY[:-1], KEY[:-1] + "/"):
        with pytest.raises(InvalidInput, match="expected a digest of 64 hexadecimal digits"):
            cache.load(wrong, out)


@pytest.mark.parametrize("part", ["onnx", "json"])
def test_a_changed_byte_in_the_cache_is_told_by_name(tmp_path: Path, part: str) -> None:
    cache = CalibrationCache(tmp_path / "cache")
    graph, out = tmp_path / "graph.onnx", tmp_path / "out.onnx"
    graph.write_bytes(bytes(range(64)))
    cache.save(KEY, graph, {"precision": "int8"})
    entry = cache.folder / f"{KEY}.{part}"
    whole = entry.read_bytes()
    refused = 0
    for at in range(len(whole)):
        entry.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        try:
            plan = cache.load(KEY, out)
        except ManifestError as error:
            refused += 1
            assert KEY in str(error)
            assert not out.exists()
        else:  # white space between the JSON values, nothing else
            assert part == "json" and plan == {"precision": "int8"} and out.read_bytes() == graph.read_bytes()
            out.unlink()
    assert refused == len(whole) or (part == "json" and refused > 0.9 * len(whole))
    entry.write_bytes(whole)
    (cache.folder / f"{KEY}.onnx").unlink()
    with pytest.raises(ManifestError, match="missing, although"):
        cache.load(KEY, out)


def test_a_record_of_another_key_is_refused(tmp_path: Path) -> None:
    cache, graph = CalibrationCache(tmp_path), tmp_path / "graph.onnx"
    graph.write_bytes(b"graph")
    cache.save(KEY, graph, {})
    for suffix in ("onnx", "json"):
        (tmp_path / f"{KEY}.{suffix}").rename(tmp_path / f"{OTHER}.{suffix}")
    with pytest.raises(ManifestError, match=f"not the record of calibration {OTHER}"):
        cache.load(OTHER, tmp_path / "out.onnx")


def test_a_kill_between_graph_and_record_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, graph = CalibrationCache(tmp_path / "cache"), tmp_path / "graph.onnx"
    graph.write_bytes(b"graph")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(calibration, "write_json", killed)
        cache.save(KEY, graph, {})
    assert cache.load(KEY, tmp_path / "out.onnx") is None
    cache.save(KEY, graph, {"precision": "int8"})
    assert cache.load(KEY, tmp_path / "out.onnx") == {"precision": "int8"}
