"""Loading a published folder: what is checked before anything is loaded, what is refused, what is taken instead."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.publish import publish, write_keys

import edgeyolo
from edgeyolo import published
from edgeyolo.published import Content, open_version, read_current
from export_run import ENGINE, FAILED, NAMES, entry, onnx_model, onnx_run, rewrite, version_of, write_record
from gpu_fixtures import Gpu
from toy_model import expected, pictures, toy_engine

RED = np.full((64, 64, 3), (0, 0, 255), np.uint8)  # BGR
OTHERS = ("cat", "dog", "cow")


@pytest.fixture
def to(tmp_path: Path) -> Path:
    """One version."""
    folder = tmp_path / "to"
    publish(onnx_run(tmp_path / "run"), folder)
    return folder


@pytest.fixture
def two(to: Path, tmp_path: Path) -> Path:
    """Two: the classes of the current one have other names."""
    publish(onnx_run(tmp_path / "second", names=OTHERS), to)
    return to


def test_info_tells_what_was_chosen(to: Path) -> None:
    with edgeyolo.load(to) as detector:
        info = json.loads(json.dumps(detector.info()))
    version = version_of(to)
    assert info["model"] == str(version / "model.onnx")
    assert info["published"] == {
        "folder": str(to),
        "version": version.name,
        "current": version.name,
        "file": "model.onnx",
        "kind": "onnx",
        "precision": "fp32",
        "verification": "graph verified",
        "signature": "none",
        "skipped": [],
        "fallback": "",
    }
    assert info["swaps"] == 0


def test_a_plain_file_has_no_such_record(tmp_path: Path, colour_model: Path) -> None:
    with edgeyolo.load(colour_model) as detector:
        assert detector.info()["published"] is None
    for option in ({"require": "intact"}, {"public_key": b"key"}):
        with pytest.raises(edgeyolo.InvalidInput, match="is for published folders"):
            edgeyolo.load(colour_model, **option)


@pytest.mark.parametrize("signed", [False, True])
def test_one_byte_anywhere_is_refused_by_name(tmp_path: Path, signed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At about 100 places of each file, the first and the last among them; nothing is handed to ONNX Runtime."""
    to, key = tmp_path / "to", tmp_path / "k"
    if signed:
        write_keys(key)
    publish(onnx_run(tmp_path / "run"), to, sign_key=key if signed else None)
    loaded: list[Path] = []
    monkeypatch.setattr("edgeyolo.loading.open_file", lambda path, options: loaded.append(path))
    version = version_of(to)
    files = sorted(path for path in version.iterdir())
    assert [path.name for path in files] == ["manifest.json", *["manifest.sig"] * signed, "model.onnx"]
    for path in files:
        good = path.read_bytes()
        for place in {*range(0, len(good), max(1, len(good) // 100)), len(good) - 1}:
            bad = bytearray(good)
            bad[place] ^= 1 << (place % 8)
            path.write_bytes(bad)
            with pytest.raises(edgeyolo.ManifestError) as caught:
                edgeyolo.load(to)
            assert str(path.name) in str(caught.value), (path.name, place)
        for bad in (good[:-1], good + b"x", b""):
            path.write_bytes(bad)
            with pytest.raises(edgeyolo.ManifestError, match=path.name):
                edgeyolo.load(to)
        path.write_bytes(good)
    current = to / "current"
    good = current.read_bytes()
    for place in range(len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        current.write_bytes(bad)
        with pytest.raises(edgeyolo.ManifestError, match=r"current|expected the folder of a version"):
            edgeyolo.load(to)
    assert loaded == []


def test_what_is_loaded_is_what_was_checked(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is exchanged after it was checked, in the last moment before it is loaded."""
    import edgeyolo.loading as loading

    real = loading.open_file

    def exchanged(path: Path, options: Any) -> Any:
        assert isinstance(path, Content)
        (version_of(to) / "model.onnx").write_bytes(b"evil")
        return real(path, options)

    monkeypatch.setattr(loading, "open_file", exchanged)
    with edgeyolo.load(to) as detector:
        assert detector(RED)[0].name == "red"


def test_a_file_that_changes_while_it_is_copied_is_refused(to: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = published.Version.check

    def exchanged(self: Any) -> None:
        real(self)
        path = self.folder / "model.onnx"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(published.Version, "check", exchanged)
    with pytest.raises(edgeyolo.ManifestError, match=r"model\.onnx: it is not the file that was published"):
        edgeyolo.load(to)


def test_copies_are_given_back(two: Path) -> None:
    def copies() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if os.path.lexists(link)]
        return sum("memfd:" in str(link.readlink()) for link in links)

    gc.collect()  # of earlier tests, whose errors hold what they were about
    with edgeyolo.load(two):
        assert copies() == 0  # nor is one kept while the model is at work
    (version_of(two) / "model.onnx").write_bytes(b"damaged")
    with edgeyolo.load(two):
        assert copies() == 0


def test_a_damaged_version_gives_way_to_the_one_before_it(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    current, before = read_current(two)
    with edgeyolo.load(two) as detector:
        assert detector(RED)[0].name == "cat"
    path = two / "versions" / current / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "edgeyolo"), edgeyolo.load(two) as detector:
        assert detector(RED)[0].name == "red"
        told = detector.info()["published"]
    assert (told["version"], told["current"]) == (before, current)
    assert "model.onnx: expected" in told["fallback"]
    assert len(caplog.records) == 1 and before in caplog.text and str(path) in caplog.text
    (two / "versions" / before / "model.onnx").unlink()
    with pytest.raises(edgeyolo.ManifestError, match=rf"{current}.*none of the 1 versions before it"):
        edgeyolo.load(two)


@pytest.mark.parametrize("damage", ["id", "version", "manifest", "link"])
def test_whatever_is_wrong_with_the_current_version(two: Path, tmp_path: Path, damage: str) -> None:
    current, before = read_current(two)
    place = two / "versions" / current
    if damage == "id":
        (two / "current").write_text(f"../{current}\n{before}\n")
    elif damage == "version":
        shutil.rmtree(place)
    elif damage == "manifest":
        (place / "manifest.json").unlink()
    else:
        place.rename(tmp_path / "elsewhere")
        place.symlink_to(tmp_path / "elsewhere")
    with edgeyolo.load(two) as detector:
        assert detector.info()["published"]["version"] == before
        assert detector.info()["published"]["fallback"]


def test_a_wrong_argument_is_told_and_not_worked_around(two: Path) -> None:
    with pytest.raises(edgeyolo.InvalidInput, match="no class 'red'; it has: 0 cat"):
        edgeyolo.load(two, classes=["red"])
    with pytest.raises(edgeyolo.InvalidInput, match="require must be one of executed, verified, intact"):
        edgeyolo.load(two, require="yes")  # type: ignore[arg-type]
    with pytest.raises(edgeyolo.InvalidInput, match="public_key must be the path"):
        edgeyolo.load(two, public_key=3)  # type: ignore[arg-type]


def test_an_unverified_version_gives_way_too(to: Path, tmp_path: Path) -> None:
    run = tmp_path / "failed"
    write_record(run, [entry(onnx_model(run / "model.onnx"), FAILED)])
    publish(run, to, require="intact")
    current, before = read_current(to)
    with edgeyolo.load(to) as detector:
        told = detector.info()["published"]
        assert told["version"] == before and "2 boxes are missing" in told["fallback"]
    with edgeyolo.load(to, require="intact") as detector:
        assert detector.info()["published"]["version"] == current


def test_a_huge_manifest_is_not_read(to: Path) -> None:
    path = version_of(to) / "manifest.json"
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(edgeyolo.ManifestError, match=r"manifest\.json: expected at most 1048576 bytes, found more"):
        edgeyolo.load(to)
    (to / "current").write_bytes(b"0" * 100_000)
    with pytest.raises(edgeyolo.ManifestError, match="current: expected at most 16384 bytes, found more"):
        edgeyolo.load(to)


@pytest.mark.parametrize("name", ["model.onnx", "manifest.json", "current"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file(to: Path, tmp_path: Path, name: str, kind: str) -> None:
    """A link to the very file is refused too: it could be another one the next time."""
    path = to / name if name == "current" else version_of(to) / name
    path.rename(tmp_path / "kept")
    if kind == "link":
        path.symlink_to(tmp_path / "kept")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(edgeyolo.ManifestError, match=rf"{name}: expected a file"):
        edgeyolo.load(to)


def test_the_manifest_and_the_file_must_agree(to: Path) -> None:
    def check(message: str, **changed: Any) -> None:
        rewrite(to, lambda manifest: manifest.update(changed))
        with pytest.raises(edgeyolo.ManifestError, match=rf"model\.onnx: the manifest states {message}"):
            edgeyolo.load(to)

    good = {"names": dict(enumerate(NAMES)), "imgsz": [64, 64], "stride": 32, "head": "raw"}
    check(r"names \{0: 'cat'.*\}, the file \{0: 'red'", **{**good, "names": dict(enumerate(OTHERS))})
    check(r"names \{0: 'red'\}, the file", **{**good, "names": {0: "red"}})
    check(r"imgsz \(64, 32\), the file \(64, 64\)", **{**good, "imgsz": [64, 32]})
    check("stride 16, the file 32", **{**good, "stride": 16})
    check("the head 'end2end', the network has 'raw'", **{**good, "head": "end2end"})
    rewrite(to, lambda manifest: manifest.update(good))
    edgeyolo.load(to).close()


def test_the_manifest_names_the_classes_of_a_file_that_does_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_record(run, [entry(onnx_model(run / "model.onnx", names=None))])
    publish(run, tmp_path / "to")
    with edgeyolo.load(tmp_path / "to", classes=["red"]) as detector:
        assert detector.names == dict(enumerate(NAMES))
        assert detector.info()["names_source"] == "manifest"
        assert detector(RED)[0].name == "red"
    with edgeyolo.load(tmp_path / "to", names=OTHERS) as detector:
        assert detector(RED)[0].name == "cat"
        assert detector.info()["names_source"] == "caller"


def engine_run(run: Path, engine: dict[str, Any] | None = ENGINE, *, onnx: bool = True, **plan: Any) -> Path:
    """An engine, and behind it the ONNX file for machines that cannot run the engine."""
    path = toy_engine(run.parent / f"{run.name}.engine", extra={"names": dict(enumerate(NAMES))}, **plan)
    run.mkdir()
    models = [entry(path.rename(run / "model.engine"), engine, precision="fp16")]
    if onnx:
        models.append(entry(onnx_model(run / "model.onnx")))
    return write_record(run, models)


def test_an_engine_is_preferred_where_it_runs(gpu: Gpu, tmp_path: Path) -> None:
    to, image = tmp_path / "to", pictures(1)[0]
    publish(engine_run(tmp_path / "run"), to)
    with edgeyolo.load(to) as detector:
        info = detector.info()
        assert (info["device"], info["published"]["file"], info["published"]["skipped"]) == (
            "cuda:0",
            "model.engine",
            [],
        )
        assert info["published"]["verification"] == "engine verified"
        result, (boxes, scores, class_ids) = detector(image), expected(image)
        np.testing.assert_array_equal(result.boxes, boxes)
        np.testing.assert_array_equal(result.scores, scores)
        assert {NAMES[i] for i in class_ids} == {d.name for d in result}
    with edgeyolo.load(to, device="cpu") as detector:
        told = detector.info()["published"]
        assert told["file"] == "model.onnx"
        assert told["skipped"] == [
            {"file": "model.engine", "reason": "device='cpu': an engine runs on an NVIDIA GPU only"}
        ]


def test_the_onnx_file_follows_where_the_engine_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(engine_run(tmp_path / "run"), tmp_path / "to")
    monkeypatch.setenv("EDGEYOLO_TENSORRT_LIBRARY", str(tmp_path / "none.so"))
    with caplog.at_level(logging.WARNING, "edgeyolo"), edgeyolo.load(tmp_path / "to") as detector:
        told = detector.info()["published"]
        assert (detector.info()["device"], told["file"], told["fallback"]) == ("cpu", "model.onnx", "")
        (skipped,) = told["skipped"]
        assert skipped["file"] == "model.engine" and skipped["reason"]
        assert detector(RED)[0].name == "red"
    assert "model.onnx is used, not model.engine" in caplog.text


def test_an_engine_alone_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(engine_run(tmp_path / "run", onnx=False), tmp_path / "to")
    monkeypatch.setenv("EDGEYOLO_TENSORRT_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises((edgeyolo.EngineError, edgeyolo.DeviceError), match=r"none of its models .* model\.engine: "):
        edgeyolo.load(tmp_path / "to")


def test_an_engine_that_this_tensorrt_refuses(gpu: Gpu, tmp_path: Path) -> None:
    """Its digest is right; it is what it was when it was published."""
    run = engine_run(tmp_path / "run")
    data = (run / "model.engine").read_bytes()
    (run / "model.engine").write_bytes(data.replace(b"toy plan 1", b"toy plan 9"))
    good = json.loads((run / "export.json").read_text())["models"]
    publish(write_record(run, [entry(run / "model.engine", ENGINE), good[1]]), tmp_path / "to")
    with edgeyolo.load(tmp_path / "to") as detector:
        told = detector.info()["published"]
        assert told["file"] == "model.onnx"
        assert "/proc/self" not in told["skipped"][0]["reason"]


def test_what_an_engine_must_have_on_record(gpu: Gpu, tmp_path: Path) -> None:
    def chosen(verification: Any, **options: Any) -> tuple[str, list[Any]]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        publish(engine_run(tmp_path / "run", verification), tmp_path / "to", require="intact")
        with edgeyolo.load(tmp_path / "to", **options) as detector:
            told = detector.info()["published"]
            return told["file"], [skipped["reason"] for skipped in told["skipped"]]

    not_run = {**ENGINE, "statement": "graph verified, engine not run"}
    assert chosen(ENGINE, require="executed") == ("model.engine", [])
    assert chosen(not_run) == ("model.engine", [])
    file, (reason,) = chosen(not_run, require="executed")
    assert file == "model.onnx" and "this file was not run when it was made" in reason
    for verification, message in ((None, "no record of a verification"), (FAILED, "2 boxes are missing")):
        file, (reason,) = chosen(verification)
        assert file == "model.onnx" and message in reason
        assert chosen(verification, require="intact") == ("model.engine", [])


def test_an_open_version_reads_from_its_own_folder(two: Path) -> None:
    """Another folder is put in its place while it is open."""
    current, before = read_current(two)
    with open_version(two, current) as version:
        (two / "versions" / current).rename(two / "versions" / "aside")
        (two / "versions" / before).rename(two / "versions" / current)
        version.check()
