"""The run folder: a step is taken over exactly where nothing that has a say in it has changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from edgeyolo.tools.runfolder import RunFolder, Step

from edgeyolo.errors import InvalidInput


def work(folder: Path, text: str, inputs: dict[str, object] | None = None) -> Step:
    with RunFolder.locked(folder) as run:

        def make(files: tuple[Path, ...]) -> dict[str, object]:
            files[0].write_text(text)
            return {"text": text}

        return run.step("write", ["out.txt"], inputs or {"a": 1}, make)


def test_a_step_is_done_once(tmp_path: Path) -> None:
    first = work(tmp_path / "run", "one")
    again = work(tmp_path / "run", "two")
    assert (first.reused, again.reused) == (False, True)
    assert again.facts == {"text": "one"} and again.seconds == first.seconds
    assert again.files[0].read_text() == "one"


def test_what_makes_it_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    work(folder, "one")
    assert not work(folder, "two", {"a": 2}).reused  # another input
    assert not work(folder, "three").reused  # and back again: the file is of another input
    (folder / "out.txt").write_text("thref")
    assert not work(folder, "four").reused  # a file that was changed
    (folder / "out.txt").unlink()
    assert not work(folder, "five").reused
    record = folder / "steps" / "write.json"
    record.write_text(record.read_text()[:-20])
    assert not work(folder, "six").reused  # half a record
    record.write_text("[]")
    assert not work(folder, "seven").reused
    assert work(folder, "eight").facts == {"text": "seven"}


def test_a_step_that_fails_leaves_nothing_to_take_over(tmp_path: Path) -> None:
    work(tmp_path, "one")
    with RunFolder.locked(tmp_path) as run, pytest.raises(RuntimeError):
        run.step("write", ["out.txt"], {"a": 2}, lambda files: (_ for _ in ()).throw(RuntimeError))
    assert not work(tmp_path, "two").reused


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with RunFolder.locked(tmp_path / "run"), pytest.raises(InvalidInput, match="another run is at work in this folder"):
        work(tmp_path / "run", "not now")
    work(tmp_path / "run", "free again")


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="expected a folder for the run, found a file"):
        work(tmp_path / "file", "one")


def test_leftovers_of_a_killed_run_go(tmp_path: Path) -> None:
    work(tmp_path, "one")
    for place in (tmp_path, tmp_path / "steps"):
        (place / ".partial-abc.onnx").write_text("half")
    assert work(tmp_path, "two").reused
    assert not list(tmp_path.rglob(".partial-*"))
