"""The command line: `edgeyolo detect`, wrong usage, and failures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import edgeyolo
from cli_helpers import RED, names, write_video
from conftest import solid
from edgeyolo.cli import main
from edgeyolo.cli.files import VideoFile

pytest_plugins = ("cli_fixtures",)


# detect: outcomes and exit codes


def test_a_folder_reports_every_file(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", str(folder), "--model", model, "--conf", "0.3"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [str(folder / name) for name in names(folder)]
    assert "error: the JPEG file is truncated" in lines[0]
    assert re.fullmatch(r".*b_good\.png  64x64  3 red  \d+\.\d ms", lines[1])
    assert "error: the file is empty" in lines[2]
    assert "error: not a picture" in lines[3]
    assert err.splitlines()[-1] == "edgeyolo: error: 3 of 4 could not be read"


def test_good_files_exit_0(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", str(folder / "b_good.png"), "--model", model, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("1 read, 3 objects found")


def test_a_missing_source_does_not_end_the_run(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(folder / "b_good.png")
    assert main(["detect", "nowhere.jpg", good, str(folder / "*.gif"), good, "--model", model]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nowhere.jpg  error: no such file")
    assert "3 red" in lines[1]
    assert "error: no file matches" in lines[2]
    assert "3 red" in lines[3]


def test_a_source_with_an_impossible_name_does_not_end_the_run(
    model: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, loop = str(folder / "b_good.png"), tmp_path / "loop"
    loop.symlink_to(loop)
    sources = ["n" * 300, good, "9" * 5000, f"{loop}/x.png", "~nobody-has-this-name/x.png", good]
    arguments = ["--model", model, "--save", str(tmp_path / "out")]
    assert main(["detect", *sources, *arguments]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [" error: " in line for line in lines] == [True, False, True, True, True, False]
    assert "File name too long" in lines[0] and "symbolic links" in lines[3]


def test_the_default_model_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", str(folder / "b_good.png")]) == 0
    assert capsys.readouterr().err.splitlines()[0] == (
        "model: the traffic sign detector that ships with edgeyolo (give --model for yours)"
    )


def test_a_bare_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: edgeyolo") and "detect" in err and "doctor" in err


def test_json_equals_the_results_of_python(model: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "new" / "results.json"
    arguments = ["--model", model, "--conf", "0.3", "--classes", "red", "2", "--json", str(target)]
    assert main(["detect", str(folder), "nowhere.jpg", *arguments]) == 1
    document = json.loads(target.read_text())
    frames = document.pop("frames")
    assert document == {
        "schema": "edgeyolo.detect/1",
        "edgeyolo": edgeyolo.__version__,
        "model": model,
        "names": {"0": "red", "1": "green light", "2": "blue"},
        "settings": {"conf": 0.3, "iou": 0.7, "max_det": 300, "classes": ["red", 2], "agnostic": False},
        "complete": True,
    }
    detector = edgeyolo.load(model, conf=0.3, classes=["red", 2])
    expected: list[dict[str, Any]] = []
    for frame in edgeyolo.open(folder):
        item = {"source": str(folder), "path": frame.path, "index": frame.index, "timestamp": frame.timestamp}
        outcome = {"error": str(frame.error)} if frame.image is None else detector(frame.image).to_dict()
        expected.append(item | outcome)
    for frame in frames:
        timings = frame.pop("timings_ms", None)
        assert timings is None or set(timings) == {"letterbox", "network", "postprocess", "total"}
    missing = frames.pop()
    assert frames == expected
    assert [d["score"] for d in frames[1]["detections"]] == [1.0, 0.75, 0.5]
    assert [d["box"] for d in frames[1]["detections"]] == [[5, 5, 15, 15], [25, 5, 35, 15], [5, 25, 15, 35]]
    assert missing["source"] == "nowhere.jpg" and missing["index"] is None and "no such file" in missing["error"]


def test_json_on_stdout_is_alone_there(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", str(folder), "--model", model, "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert len(json.loads(out)["frames"]) == 4
    assert "b_good.png  64x64" in err


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--max-det", "1"], "1 red"),
        (["--classes", "blue"], "nothing found"),
        (["--classes", "0"], "3 red"),
        (["--classes", "2,0"], "3 red"),
        (["--classes", "blue, red"], "3 red"),
        (["--conf", "0.6"], "2 red"),
        (["--imgsz", "64x64", "--iou", "0.5", "--agnostic", "--device", "cpu"], "3 red"),
    ],
)
def test_options_reach_the_detector(
    model: str, folder: Path, arguments: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", str(folder / "b_good.png"), "--model", model, *arguments]) == 0
    assert f"  {found}  " in capsys.readouterr().out


# detect: files


def test_saved_pictures_and_labels(model: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["detect", str(folder), "--model", model, "--conf", "0.3", "--save", str(out), "--txt"]) == 1
    assert names(out) == ["b_good.png", "b_good.txt"]
    image = solid(64, 64, RED)
    drawn = edgeyolo.draw(image, edgeyolo.load(model, conf=0.3)(image))
    assert np.array_equal(cv2.imread(str(out / "b_good.png")), drawn)
    assert (out / "b_good.txt").read_text() == (
        "0 0.156250 0.156250 0.156250 0.156250 1.000000\n"
        "0 0.468750 0.156250 0.156250 0.156250 0.750000\n"
        "0 0.156250 0.468750 0.156250 0.156250 0.500000\n"
    )


def test_equal_names_are_kept_apart(model: str, tmp_path: Path) -> None:
    for name, width in (("a/x.png", 64), ("b/x.png", 65), ("c/x.bmp", 66), ("c/x.png", 67)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), solid(width, 64, RED))
    out = tmp_path / "out"
    sources = [str(tmp_path / name) for name in "abc"]
    for _ in range(2):  # a second run replaces the files of the first
        assert main(["detect", *sources, "--model", model, "--save", str(out)]) == 0
        assert names(out) == ["x-2.png", "x-3.png", "x.bmp", "x.png"]
    widths = {name: cv2.imread(str(out / name)).shape[1] for name in names(out)}
    assert widths == {"x.png": 64, "x-2.png": 65, "x.bmp": 66, "x-3.png": 67}
    labelled = tmp_path / "labelled"
    assert main(["detect", str(tmp_path / "c"), "--model", model, "--save", str(labelled), "--txt"]) == 0
    assert names(labelled) == ["x-2.png", "x-2.txt", "x.bmp", "x.txt"]


def test_a_video_is_saved_as_a_video(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    write_video(clips / "one.mp4", 30, 12.0)
    write_video(clips / "two.mp4", 3, 50.0, (96, 64))
    out = tmp_path / "out"
    assert main(["detect", str(clips), "--model", model, "--save", str(out), "--txt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 33
    assert lines[4].startswith(f"{clips / 'one.mp4'} #4  64x64  3 red")
    for name, frames, rate, width in (("one.mp4", 30, 12.0, 64), ("two.mp4", 3, 50.0, 96)):
        capture = cv2.VideoCapture(str(out / name))
        assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(rate)
        assert capture.get(cv2.CAP_PROP_FRAME_WIDTH) == width
        assert sum(capture.read()[0] for _ in range(frames + 1)) == frames
        capture.release()
    labels = [f"one_{i:06d}.txt" for i in range(30)] + [f"two_{i:06d}.txt" for i in range(3)]
    assert names(out) == sorted(["one.mp4", "two.mp4", *labels])


def test_a_video_refuses_what_opencv_would_drop(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "v.mp4")
    for index in range(12):
        video.add(solid(64, 64, RED), index / 25)
    with pytest.raises(edgeyolo.EdgeYoloError, match="began at 64x64, a frame has 32x64"):
        video.add(solid(32, 64, RED), 12 / 25)
    assert len(names(tmp_path)) == 1 and names(tmp_path)[0].startswith(".")
    video.close()
    assert names(tmp_path) == ["v.mp4"]
    unwritable = VideoFile(tmp_path / "v.xyz")
    unwritable.add(solid(64, 64, RED), 0.0)
    with pytest.raises(edgeyolo.EdgeYoloError, match="cannot write such a video"):
        unwritable.close()
    assert names(tmp_path) == ["v.mp4"]


def test_a_source_is_never_written_over(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "b_good.png").read_bytes()
    for source in (folder, folder / "b_good.png", folder / "*.png"):
        assert main(["detect", str(source), "--model", model, "--save", str(folder)]) == 2
    # A glob over folders is known only when its files come.
    above = folder.parent / "*" / "*.png"
    assert main(["detect", str(above), "--model", model, "--save", str(folder)]) == 2
    assert "would write over the source" in capsys.readouterr().err.splitlines()[-1]
    assert (folder / "b_good.png").read_bytes() == before


def test_a_failed_write_leaves_nothing(
    model: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main(["detect", str(folder / "b_good.png"), "--model", model, "--save", str(out)]) == 1
    assert names(out) == []
    assert capsys.readouterr().err.splitlines()[-1].endswith("No space left on device")


# wrong usage and failures: one line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["detekt"], "invalid choice: 'detekt'"),
        (["detect"], "SOURCE"),
        (["detect", "--classes", "red", "x.png"], "SOURCE comes before --classes, which takes every word after it"),
        (["detect", "x", "--save", "{long}"], "File name too long"),
        (["demo", "--save", "{long}"], "File name too long"),
        (["detect", "x", "--conf", "1.5"], "expected a number from 0 to 1, found '1.5'"),
        (["detect", "x", "--iou", "nan"], "expected a number from 0 to 1, found 'nan'"),
        (["detect", "x", "--max-det", "0"], "expected a whole number above 0"),
        (["detect", "x", "--imgsz", "640x"], "expected N or HxW in pixels"),
        (["detect", "x", "--save", "{model}"], "is a file"),
        (["detect", "x", "--save", "{model}/out"], "is a file"),
        (["detect", "x", "--txt"], "give --save DIR too"),
        (["detect", "x", "--json", "/dev/null"], "`--json -` writes to stdout"),
        (["detect", "x", "--json", "{folder}"], "expected the name of a file"),
        (["detect", "x", "--model", "{model}", "--classes", "zebra"], "0 red, 1 green light, 2 blue"),
        (["detect", "x", "--model", "{model}", "--classes", "3"], "no class 3"),
        (["detect", "x", "--model", "{model}", "--classes", "1,"], "expected ids or names, found '1,'"),
        (["detect", "x", "--model", "{model}", "--imgsz", "128"], "fixed input"),
        (["detect", "", "--model", "{model}"], "empty text"),
        (["bench", "{model}", "--frames", "-1"], "expected a whole number above 0"),
        (["bench", "{model}", "--fps", "inf"], "expected a number above 0"),
        (["bench", "{model}", "--size", "0x5"], "expected N or HxW"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    arguments: list[str], message: str, model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part.format(model=model, folder=folder, long="n" * 300) for part in arguments]) == 2
    assert_one_error(capsys, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["detect", "x", "--model", "missing.onnx"], "missing.onnx"),
        (["detect", "x", "--model", "{folder}"], "a folder"),
        (["detect", "x", "--model", "{text}"], "text.onnx"),
        (["detect", "x", "--model", "{model}", "--device", "tpu"], "tpu"),
        (["info", "missing.onnx"], "missing.onnx"),
        (["bench", "missing.onnx"], "missing.onnx"),
        (["bench", "{model}", "--source", "missing.png"], "missing.png"),
        (["bench", "{model}", "--source", "{folder}/c_empty.jpg"], "the file is empty"),
    ],
)
def test_a_failure_is_one_line_and_exit_1(
    arguments: list[str], message: str, model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = folder.parent / "text.onnx"
    text.write_text("no model")
    assert main([part.format(model=model, folder=folder, text=text) for part in arguments]) == 1
    assert_one_error(capsys, message)


def assert_one_error(capsys: pytest.CaptureFixture[str], message: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("edgeyolo: error: ")
    assert message in err


def test_show_needs_a_display(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["detect", "x", "--model", model, "--show"]) == 2
    assert "DISPLAY" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "info", "x.onnx"], ["info", "x.onnx", "--debug"]])
def test_debug_shows_the_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("edgeyolo: error: ")


def test_an_unexpected_error_is_one_line_too(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(edgeyolo, "load", lambda *_, **__: 1 / 0)
    assert main(["info", model]) == 1
    assert_one_error(capsys, "ZeroDivisionError: division by zero (unexpected")


def test_odd_file_names_stay_on_one_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    picture = cv2.imencode(".png", solid(64, 64, RED))[1].tobytes()
    for name in (b"a\nb.png", b"bad\xff.png", b"esc\x1b[31m.png", "straße [red].png".encode()):
        (folder / os.fsdecode(name)).write_bytes(picture)
    out = tmp_path / "out"
    assert main(["detect", str(folder), "--model", model, "--save", str(out), "--json", str(out / "r.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert not any("\x1b" in line for line in lines)
    assert any("a\\nb.png" in line for line in lines)
    assert any("straße [red].png" in line for line in lines)
    paths = [frame["path"] for frame in json.loads((out / "r.json").read_text())["frames"]]
    assert sorted(map(os.fsencode, paths)) == sorted(os.fsencode(folder / name) for name in names(folder))
    assert len(names(out)) == 5


def test_a_password_is_not_printed(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "r.json"
    assert main(["detect", "rtsp://me:secret@127.0.0.1:1/x", "--model", model, "--json", str(target)]) == 1
    out, err = capsys.readouterr()
    assert "rtsp://me:***@127.0.0.1:1/x  error: " in out
    assert "secret" not in out + err + target.read_text()


def test_help_and_version_are_light() -> None:
    program = (
        "import sys\nfrom edgeyolo.cli import main\n"
        "assert main(['--help']) == 0 and main(['detect', '--help']) == 0 and main(['--version']) == 0\n"
        "heavy = {'cv2', 'onnxruntime', 'rich', 'torch', 'onnx', 'ultralytics', 'supervision'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"edgeyolo {edgeyolo.__version__}"
