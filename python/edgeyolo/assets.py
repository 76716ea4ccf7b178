"""The files that ship with the package: a small traffic sign detector and photographs to try it on."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from .errors import EdgeYoloError

__all__ = ["demo_model", "demo_photos"]


def _asset_folder() -> Path:
    folder = files("edgeyolo") / "assets"
    path = Path(str(folder))
    if not path.is_dir():  # an editable install keeps the folder at the root of the repository
        path = Path(__file__).resolve().parents[2] / "assets"
    return path


def _asset(name: str) -> Path:
    path = _asset_folder() / name
    if not path.exists():
        raise EdgeYoloError(f"{path} is missing: this installation is incomplete, install the package again")
    return path


def demo_model() -> str:
    """Path of the traffic sign detector (ONNX, 640 x 640) that ships with the package."""
    return str(_asset("signs.onnx"))


def demo_photos() -> list[str]:
    """Paths of the photographs that ship with the package; none of them was used to train the demo model."""
    return [str(path) for path in sorted(_asset("photos").glob("*.jpg"))]
