"""The command line in processes of its own: signals, closed pipes, terminals."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import cv2
import pytest

import edgeyolo
from cli_helpers import COMMAND, names, without, write_video
from edgeyolo.cli import main

pytest_plugins = ("cli_fixtures",)


def test_ctrl_c_keeps_what_was_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = write_video(tmp_path / "clip.mp4", 20, 10.0)
    out = tmp_path / "out"
    open_source = edgeyolo.open

    class Interrupted(edgeyolo.Source):
        def __init__(self, source: edgeyolo.Source) -> None:
            self.source, self.total, self.left_out = source, source.total, source.left_out
            self._newest = None

        def __next__(self) -> edgeyolo.Frame:
            frame = next(self.source)
            if frame.index == 7:
                raise KeyboardInterrupt
            return frame

        def close(self) -> None:
            self.source.close()

    monkeypatch.setattr(edgeyolo, "open", lambda source, **options: Interrupted(open_source(source, **options)))
    assert main(["detect", str(clip), "--model", model, "--save", str(out), "--json", str(out / "r.json")]) == 1
    assert names(out) == ["clip.mp4", "r.json"]
    document = json.loads((out / "r.json").read_text())
    assert document["complete"] is False
    assert [frame["index"] for frame in document["frames"]] == list(range(7))
    capture = cv2.VideoCapture(str(out / "clip.mp4"))
    assert sum(capture.read()[0] for _ in range(20)) == 7
    capture.release()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "edgeyolo: error: interrupted; what was finished until then is kept"
    )


def start_and_stop(model: str, many: Path, out: Path, number: signal.Signals) -> tuple[int, str]:
    """Runs detect on many pictures and sends a signal after the third line."""
    arguments = ["detect", str(many), "--model", model, "--save", str(out), "--txt", "--json", str(out / "r.json")]
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        while not (out / "2.txt").exists():
            assert process.poll() is None
            select.select([process.stdout], [], [], 0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_cleanly(model: str, many: Path, tmp_path: Path, number: signal.Signals) -> None:
    out = tmp_path / "out"
    code, err = start_and_stop(model, many, out, number)
    assert code == 1
    assert "Traceback" not in err
    assert "interrupted" in err.splitlines()[-1]
    assert not any(name.startswith(".") for name in names(out))
    document = json.loads((out / "r.json").read_text())
    assert document["complete"] is False
    # The signal may come between the third picture's label file and its item in the document.
    assert 2 <= len(document["frames"]) < 3000
    for frame in document["frames"]:
        assert (out / Path(frame["path"]).name).exists()


def test_a_killed_run_leaves_no_half_file(model: str, many: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "r.json").write_text("from an earlier run")
    code, _ = start_and_stop(model, many, out, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert (out / "r.json").read_text() == "from an earlier run"
    for name in names(out):
        if name.startswith("."):
            continue
        if name.endswith(".png"):
            assert cv2.imread(str(out / name)).shape == (240, 320, 3)
        elif name.endswith(".txt"):
            assert len((out / name).read_text().splitlines()) >= 1


def test_a_closed_pipe_is_no_error_message(model: str, many: Path) -> None:
    detect = subprocess.Popen([*COMMAND, "detect", str(many), "--model", model], stdout=-1, stderr=-1, text=True)
    assert detect.stdout is not None and detect.stderr is not None
    first = detect.stdout.readline()
    detect.stdout.close()
    err = detect.stderr.read()
    detect.stderr.close()
    assert detect.wait(60) == 1
    assert first.startswith(str(many))
    assert "Traceback" not in err and "BrokenPipe" not in err


def plain(text: str) -> str:
    """What a terminal shows, without colours; each redrawing of a line as a line of its own."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def test_a_terminal_gets_a_bar_and_whole_lines(model: str, folder: Path, terminal: Any) -> None:
    code, shown = terminal(f"from edgeyolo.cli import main; exit(main({['detect', str(folder), '--model', model]}))")
    assert code == 1
    assert "\x1b[" in shown and "━" in shown
    assert re.search(rf"^{re.escape(str(folder))}/b_good\.png  64x64  3 red  \d+\.\d ms$", plain(shown), re.MULTILINE)


def test_a_terminal_without_rich_gets_plain_lines(model: str, folder: Path, terminal: Any) -> None:
    hide = f"import sys\n{without('rich')}\nfrom edgeyolo.cli import main\n"
    code, shown = terminal(hide + f"exit(main({['detect', str(folder), '--model', model]}))")
    assert code == 1
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 6  # four files, the summary, the error
    code, shown = terminal(hide + f"exit(main({['info', model]}))")
    assert code == 0 and "\x1b" not in shown and "64 x 64" in shown


def test_tables_fit_80_columns(model: str, terminal: Any) -> None:
    for arguments in (["info", model], ["doctor"], ["bench", model, "--frames", "2"]):
        code, shown = terminal(f"from edgeyolo.cli import main; exit(main({arguments}))")
        assert code == 0
        rows = [line for line in plain(shown).splitlines() if line.startswith(" ")]
        assert rows and max(map(len, rows)) <= 80


def test_a_pipe_gets_no_escape_codes(model: str, folder: Path) -> None:
    environment = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1"}
    for arguments in (["info", model], ["doctor"], ["detect", str(folder), "--model", model]):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, check=False, env=environment)
        assert b"\x1b" not in done.stdout + done.stderr
        assert done.stdout.decode("ascii")


def in_shell(redirection: str, *arguments: str, unbuffered: str = "") -> tuple[int, str, str]:
    """Runs the command with its streams redirected or closed by a shell."""
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}  # an empty one counts as none
    line = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lose_the_text_and_nothing_else(
    model: str, folder: Path, tmp_path: Path, redirection: str
) -> None:
    target = tmp_path / "r.json"
    good = str(folder / "b_good.png")
    code, out, err = in_shell(redirection, "detect", good, "--model", model, "--json", str(target))
    assert code == 0 and "Traceback" not in err and "Error" not in err
    assert (out == "") is (">&-" in redirection.split())
    assert len(json.loads(target.read_text())["frames"][0]["detections"]) == 3
    for arguments, expected in ((("--version",), 0), (("info", "missing.onnx"), 1), (("detekt",), 2)):
        code, _, err = in_shell(redirection, *arguments)
        assert code == expected and "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_one_line_and_exit_1(model: str, folder: Path, unbuffered: str) -> None:
    for arguments in (
        ["--version"],
        ["--help"],
        ["info", model],
        ["detect", str(folder / "b_good.png"), "--json", "-"],
    ):
        code, _, err = in_shell(">/dev/full", *arguments, unbuffered=unbuffered)
        assert code == 1
        assert err.splitlines()[-1] == "edgeyolo: error: stdout: No space left on device"
        assert "Traceback" not in err and "Exception ignored" not in err
    code, _, err = in_shell("2>/dev/full", "info", "missing.onnx", unbuffered=unbuffered)
    assert (code, err) == (1, "")
