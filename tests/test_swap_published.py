"""Detector.swap() and published folders: following what is current, refusing what is bad."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from edgeyolo.tools.publish import publish, rollback, write_keys

import edgeyolo
from edgeyolo.published import read_current
from export_run import NAMES, entry, onnx_model, onnx_run, write_record

OTHERS = ("cat", "dog", "cow")
RED = np.full((64, 64, 3), (0, 0, 255), np.uint8)  # BGR


def family(result: edgeyolo.Detections) -> tuple[str, ...]:
    """The names that the result speaks of; each result is of one model as a whole."""
    found = tuple(result.names[i] for i in range(3))
    assert found in (NAMES, OTHERS)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    publish(onnx_run(tmp_path / "run0"), tmp_path / "door")
    yield tmp_path / "door"


def test_a_published_folder_is_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with edgeyolo.load(folder) as detector:
        assert detector.swap() is False
        publish(onnx_run(tmp_path / "run1", names=OTHERS), folder)
        assert family(detector(RED)) == NAMES
        assert detector.swap() is True
        assert family(detector(RED)) == OTHERS
        assert detector.info()["published"]["version"] == read_current(folder)[0]
        with monkeypatch.context() as patch:
            patch.setattr("edgeyolo.detector.start_current", lambda *_: pytest.fail("nothing is new"))
            assert detector.swap() is False
        rollback(folder)
        assert detector.swap() is True
        assert (family(detector(RED)), detector.info()["swaps"]) == (NAMES, 2)


def test_asking_is_cheap(folder: Path) -> None:
    with edgeyolo.load(folder) as detector:
        started = time.perf_counter()
        for _ in range(100):
            assert detector.swap() is False
        assert (time.perf_counter() - started) / 100 < 0.005


def test_a_bad_version_is_refused_once_and_the_next_good_one_taken(folder: Path, tmp_path: Path) -> None:
    with edgeyolo.load(folder) as detector:
        bad = publish(onnx_run(tmp_path / "run1", names=OTHERS), folder).version
        path = folder / "versions" / bad / "model.onnx"
        good = path.read_bytes()
        path.write_bytes(good[:-1])
        with pytest.raises(edgeyolo.ManifestError, match=r"model\.onnx: expected"):
            detector.swap()
        assert detector.swap() is False, "what failed is not tried again every second"
        assert family(detector(RED)) == NAMES
        with pytest.raises(edgeyolo.ManifestError, match=r"model\.onnx: expected"):
            detector.swap(folder)  # by name it is
        path.write_bytes(good)
        assert detector.swap(folder) is True
        assert (family(detector(RED)), detector.swap()) == (OTHERS, False)


def test_a_wrong_argument_says_nothing_about_the_version(folder: Path, tmp_path: Path) -> None:
    with edgeyolo.load(folder) as detector:
        publish(onnx_run(tmp_path / "run1", names=OTHERS), folder)
        with pytest.raises(edgeyolo.InvalidInput, match="conf must be between 0 and 1, found 7"):
            detector.swap(conf=7)
        assert (detector.swap(), family(detector(RED)), detector.swap()) == (True, OTHERS, False)


def test_an_interrupted_swap_says_nothing_about_the_version(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with edgeyolo.load(folder) as detector:
        publish(onnx_run(tmp_path / "run1", names=OTHERS), folder)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("edgeyolo.detector.start_current", interrupt)
            detector.swap()
        assert (detector.swap(), family(detector(RED)), detector.swap()) == (True, OTHERS, False)


def test_a_version_that_was_passed_over_is_not_tried_again(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = publish(onnx_run(tmp_path / "run1", names=OTHERS), folder).version
    (folder / "versions" / bad / "model.onnx").unlink()
    with caplog.at_level(logging.ERROR, "edgeyolo"), edgeyolo.load(folder) as detector:
        assert family(detector(RED)) == NAMES
        assert detector.swap() is False
        publish(onnx_run(tmp_path / "run2", names=OTHERS, notes=["again"]), folder)
        assert detector.swap() is True
        assert detector.info()["published"]["fallback"] == ""


def test_a_damaged_version_that_is_published_again_is_taken(folder: Path, tmp_path: Path) -> None:
    run = onnx_run(tmp_path / "run1", names=OTHERS)
    with edgeyolo.load(folder) as detector:
        bad = publish(run, folder).version
        (folder / "versions" / bad / "model.onnx").write_bytes(b"")
        with pytest.raises(edgeyolo.ManifestError):
            detector.swap()
        assert detector.swap() is False
        assert publish(run, folder).version == bad
        assert (detector.swap(), family(detector(RED)), detector.swap()) == (True, OTHERS, False)
        assert publish(run, folder).version == bad  # it is whole: nothing changes
        assert detector.swap() is False


def test_what_is_required_is_required_of_the_next_one_too(tmp_path: Path) -> None:
    public, to = write_keys(tmp_path / "k"), tmp_path / "to"
    publish(onnx_run(tmp_path / "run0"), to, sign_key=tmp_path / "k")
    with edgeyolo.load(to, public_key=public) as detector:
        with pytest.raises(edgeyolo.InvalidInput, match=r"current version is signed, .*--sign.*--unsigned"):
            publish(onnx_run(tmp_path / "run1", names=OTHERS), to)
        assert detector.swap() is False
        publish(onnx_run(tmp_path / "run1", names=OTHERS), to, unsigned=True)
        with pytest.raises(edgeyolo.ManifestError, match="the version is not signed"):
            detector.swap()
        publish(onnx_run(tmp_path / "run1", names=OTHERS), to, sign_key=tmp_path / "k")
        assert detector.swap() is True
        run = tmp_path / "run2"
        write_record(run, [entry(onnx_model(run / "model.onnx"), None)])
        publish(run, to, sign_key=tmp_path / "k", require="intact")
        with pytest.raises(edgeyolo.EngineError, match="no record of a verification"):
            detector.swap()
        assert family(detector(RED)) == OTHERS


def test_swap_without_a_model_needs_a_published_folder(colour_model: Path, folder: Path) -> None:
    with edgeyolo.load(colour_model) as detector:
        with pytest.raises(edgeyolo.InvalidInput, match="name the new one"):
            detector.swap()
        assert detector.swap(folder) is True
        assert detector.swap() is False
        assert family(detector(RED)) == NAMES


def test_the_folder_is_found_from_elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with edgeyolo.load("door") as detector:
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        publish(onnx_run(tmp_path / "run1", names=OTHERS), folder)
        assert detector.swap() is True
