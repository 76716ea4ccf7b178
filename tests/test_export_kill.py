"""An export and its publish, killed: what is published stays whole, and the next run takes the work up."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from edgeyolo.tools.export import export

import edgeyolo
from edgeyolo import tools
from edgeyolo.published import read_current
from export_toy import pictures, toy
from kill_harness import killed_at_every_step, killed_at_random, python

BLUE = np.full((64, 64, 3), (255, 0, 0), np.uint8)  # BGR
FIRST = "import onnxruntime\nfrom edgeyolo.tools.export import export\nfrom edgeyolo.tools.publish import publish"
CODE = """
export({weights!r}, precision='fp32', target='onnx', calib={photos!r}, out={run!r})
publish({run!r}, {to!r}, keep=2)
"""


class Place:
    """Old weights are exported and published; new ones wait for the next run in the same folders."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = toy(folder / "old"), toy(folder / "new", scale=0.8)
        self.photos, self.run, self.to = pictures(folder / "photos"), folder / "run", folder / "to"
        self.start = folder / "start"
        self.code = CODE.format(weights=str(self.new), photos=str(self.photos), run=str(self.run), to=str(self.to))
        self.redo(self.old)
        for name in ("run", "to"):
            shutil.copytree(folder / name, self.start / name)

    def redo(self, weights: Path) -> None:
        export(weights, precision="fp32", target="onnx", calib=self.photos, out=self.run)
        tools.publish(self.run, self.to, keep=2)

    def prepare(self, _: int) -> None:
        for name, folder in (("run", self.run), ("to", self.to)):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.start / name, folder)

    def score(self) -> float:
        """Of the best detection of the published model: 1.0 by the old weights, 0.8 by the new."""
        with edgeyolo.load(self.to) as detector:
            assert detector.info()["published"]["fallback"] == ""
            found = detector(BLUE)
        assert len(found) == 3
        return round(float(found.scores[0]), 3)


def test_killed_at_every_change_to_the_file_system(tmp_path: Path) -> None:
    place = Place(tmp_path)
    seen: list[float] = []

    def check(_: int) -> None:
        seen.append(place.score())
        place.redo(place.new)
        assert place.score() == 0.8
        assert len(read_current(place.to)) == 2
        assert not list(tmp_path.rglob(".partial-*"))

    changes = killed_at_every_step(place.code, check, prepare=place.prepare, first=FIRST)
    assert changes >= 30
    assert seen[0] == 1.0 and seen[-1] == 0.8 and sorted(seen, reverse=True) == seen


@pytest.mark.slow
def test_kill_9_at_20_random_moments(tmp_path: Path) -> None:
    place = Place(tmp_path)
    seen: list[float] = []

    def check(_: int) -> None:
        seen.append(place.score())
        place.redo(place.new)
        assert place.score() == 0.8

    code = f"{FIRST}\nprint('begun', flush=True)\n{place.code}"
    assert killed_at_random(python(code), check, kills=20, seed=11, prepare=place.prepare).killed == 20
    assert seen.count(1.0) >= 5, seen
