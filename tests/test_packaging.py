"""The pins and markers: one line of each package for each Python, and no release that a Python has no wheel of."""

from __future__ import annotations

from pathlib import Path

import pytest

packaging = pytest.importorskip("packaging.requirements")
tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

# The last releases with wheels for Python 3.10, from the projects' own release notes.
LAST_FOR_310 = {"numpy": (2, 2), "onnxruntime": (1, 23), "scikit-image": (0, 25), "scikit-learn": (1, 7)}


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    return [line for line in lines if line and not line.startswith("#")] + [line for line in extras if "==" in line]


def active(python: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in pins():
        requirement = packaging.Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            found.setdefault(requirement.name, set()).add(str(requirement.specifier))
    return found


def test_each_python_has_one_pin_of_each_package() -> None:
    everything = {packaging.Requirement(line).name for line in pins()}
    for python in PYTHONS:
        found = active(python)
        assert set(found) == everything, f"Python {python} lacks {everything - set(found)}"
        assert all(len(versions) == 1 for versions in found.values()), f"Python {python}: {found}"


def test_python_310_gets_releases_that_it_can_install() -> None:
    for name, versions in active("3.10").items():
        for version in versions:
            numbers = tuple(int(part) for part in version.removeprefix("==").split(".")[:2])
            assert numbers <= LAST_FOR_310.get(name, numbers), f"{name} {version} has no wheel for Python 3.10"
