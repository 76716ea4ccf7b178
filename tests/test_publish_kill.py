"""Publishing that is killed: what is current is always whole, and the next run completes it or starts clean."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeyolo.tools.publish import publish, rollback
from onnx import numpy_helper

import edgeyolo
from edgeyolo.published import open_version, read_current
from export_run import entry, onnx_run, write_record
from kill_harness import killed_at_every_step, killed_at_random, python

RED = np.full((64, 64, 3), (0, 0, 255), np.uint8)  # BGR
CODE = "publish({run!r}, {to!r}, keep=2)"


def whole(to: Path, possible: set[str]) -> str:
    """`current` names a version that loads and answers; so do all that it lists. Returns it."""
    history = read_current(to)
    assert set(history) <= possible
    for version in history:
        with open_version(to, version) as opened:
            opened.check()
    with edgeyolo.load(to) as detector:
        told = detector.info()["published"]
        assert (told["version"], told["fallback"]) == (history[0], "")
        assert [round(score, 2) for score in detector(RED).scores.tolist()] == [1.0, 0.75, 0.5]
    return history[0]


def clean(to: Path) -> None:
    assert not list(to.rglob(".partial-*"))
    assert {path.name for path in (to / "versions").iterdir()} == set(read_current(to))


def heavy(run: Path, megabytes: int, seed: int) -> Path:
    """The same network with ballast, so that a kill meets it at work."""
    onnx_run(run)
    model = onnx.load(run / "model.onnx")
    ballast = np.random.default_rng(seed).integers(0, 255, megabytes << 20, np.uint8)
    model.graph.initializer.append(numpy_helper.from_array(ballast, "ballast"))
    onnx.save(model, run / "model.onnx")
    return write_record(run, [entry(run / "model.onnx")])


def test_killed_at_every_change_to_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions are there, keep=2, and a third comes: it is copied, made current, and the first is removed."""
    start, to = tmp_path / "start", tmp_path / "to"
    runs = [onnx_run(tmp_path / f"run{i}", notes=[str(i)]) for i in range(3)]
    old = {publish(run, start, keep=2).version for run in runs[:2]}
    new = publish(runs[2], tmp_path / "elsewhere").version
    seen: list[str] = []

    def prepare(_: int) -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(start, to)

    def check(_: int) -> None:
        seen.append(whole(to, {*old, new}))
        done = publish(runs[2], to, keep=2)  # the next run
        assert done.version == new and done.changed is (seen[-1] != new)
        assert whole(to, {*old, new}) == new
        clean(to)

    steps = killed_at_every_step(
        CODE.format(run=str(runs[2]), to=str(to)),
        check,
        prepare=prepare,
        first="import onnxruntime\nfrom edgeyolo.tools.publish import publish",
    )
    assert steps >= 15
    # Killed early the old one is current, killed late the new one: the switch is one moment in between.
    switched = seen.index(new)
    assert 5 < switched < steps
    assert all(version == new for version in seen[switched:])
    assert all(version in old for version in seen[:switched])


def test_a_first_publish_killed_at_every_change(tmp_path: Path) -> None:
    to, run = tmp_path / "to", onnx_run(tmp_path / "run")
    seen: list[bool] = []

    def check(_: int) -> None:
        seen.append((to / "current").exists())
        if seen[-1]:
            whole(to, {read_current(to)[0]})
        else:  # nothing to load, told; never a half
            with pytest.raises(edgeyolo.EdgeYoloError, match=r"current: expected a file|without 'current'|nothing at"):
                edgeyolo.load(to)
        publish(run, to)
        whole(to, {read_current(to)[0]})
        clean(to)

    killed_at_every_step(
        CODE.format(run=str(run), to=str(to)),
        check,
        prepare=lambda _: shutil.rmtree(to, ignore_errors=True),
        first="import onnxruntime\nfrom edgeyolo.tools.publish import publish",
    )
    assert seen[0] is False and seen[-1] is True


def test_a_rollback_killed_at_every_change(tmp_path: Path) -> None:
    start, to = tmp_path / "start", tmp_path / "to"
    a, b = (publish(onnx_run(tmp_path / str(i), notes=[str(i)]), start).version for i in range(2))

    def prepare(_: int) -> None:
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(start, to)

    def check(_: int) -> None:
        if whole(to, {a, b}) == b:
            assert rollback(to).version == a
        assert whole(to, {a, b}) == a

    steps = killed_at_every_step(
        f"rollback({str(to)!r})", check, prepare=prepare, first="from edgeyolo.tools.publish import rollback"
    )
    assert steps >= 2


@pytest.mark.slow
def test_kill_9_at_20_random_moments(tmp_path: Path) -> None:
    """16 MiB each, two runs in turn: what is killed may be copying, checking, switching or removing."""
    to = tmp_path / "to"
    runs = [heavy(tmp_path / name, 16, seed) for seed, name in enumerate("ab")]
    versions = [publish(run, to, keep=2).version for run in runs]
    turn = tmp_path / "turn"
    outcomes: list[str] = []

    def prepare(number: int) -> None:
        """Old and new are the only versions, the old one is current."""
        for path in (to / "versions").iterdir():
            shutil.rmtree(path)
        (to / "current").unlink()
        publish(runs[number % 2], to, keep=2)
        turn.write_text(str(runs[1 - number % 2]))

    def check(number: int) -> None:
        old, new = versions[number % 2], versions[1 - number % 2]
        found = whole(to, {old, new})
        outcomes.append("new" if found == new else "old")
        publish(runs[1 - number % 2], to, keep=2)
        assert whole(to, {old, new}) == new
        assert read_current(to) == (new, old)
        clean(to)

    code = (
        "import onnxruntime\nfrom pathlib import Path\nfrom edgeyolo.tools.publish import publish\n"
        f"run = Path({str(turn)!r}).read_text()\nprint('begun', flush=True)\npublish(run, {str(to)!r}, keep=2)"
    )
    kills = killed_at_random(python(code), check, kills=20, seed=7, prepare=prepare)
    assert kills.killed == 20
    assert outcomes[0] == "new"  # the whole run, by which the others are timed
    assert outcomes.count("old") >= 5, outcomes  # kills did meet it at work
