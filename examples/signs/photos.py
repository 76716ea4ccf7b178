"""The photographs behind the signs: which installed package holds each, its licence, and the split that it belongs to.

Only photographs whose licence is stated by the package that installs them are used. A photograph belongs to one split
as a whole: the validation split and the demo show backgrounds that training has never seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Photo:
    name: str
    package: str  # import name of the package that installs it
    folder: str  # inside that package
    split: Split
    licence: str  # as the package states it


PHOTOS: tuple[Photo, ...] = (
    Photo("astronaut.png", "skimage", "data", "train", "public domain (NASA)"),
    Photo("camera.png", "skimage", "data", "train", "CC0 (Lav Varshney)"),
    Photo("cell.png", "skimage", "data", "train", "CC0"),
    Photo("clock_motion.png", "skimage", "data", "train", "public domain (Stefan van der Walt)"),
    Photo("coins.png", "skimage", "data", "train", "no known copyright restrictions (Brooklyn Museum)"),
    Photo("grass.png", "skimage", "data", "train", "CC0 (CC0Textures)"),
    Photo("gravel.png", "skimage", "data", "train", "CC0 (CC0Textures)"),
    Photo("hubble_deep_field.jpg", "skimage", "data", "train", "public domain (NASA)"),
    Photo("ihc.png", "skimage", "data", "train", "no known copyright restrictions"),
    Photo("retina.jpg", "skimage", "data", "train", "CC0"),
    Photo("flower.jpg", "sklearn", "datasets/images", "train", "CC BY 2.0 (vultilion)"),
    Photo("brick.png", "skimage", "data", "val", "CC0 (CC0Textures)"),
    Photo("chelsea.png", "skimage", "data", "val", "CC0 (Stefan van der Walt)"),
    Photo("coffee.png", "skimage", "data", "val", "CC0 (Rachel Michetti)"),
    Photo("rocket.jpg", "skimage", "data", "val", "public domain (SpaceX)"),
    Photo("text.png", "skimage", "data", "val", "public domain"),
    Photo("china.jpg", "sklearn", "datasets/images", "val", "CC BY 2.0 (danielbuechele)"),
)
INSTALL = {"skimage": "pip install scikit-image==0.26.0", "sklearn": "pip install scikit-learn==1.9.1"}


def locate(photo: Photo) -> Path:
    """Path of an installed photograph. The package is found, not imported.

    Raises:
        FileNotFoundError: the package is not installed, or holds no such file.
    """
    spec = find_spec(photo.package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(root) / photo.folder / photo.name
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"photograph {photo.name} was not found in package {photo.package}: {INSTALL[photo.package]}"
    )


def read(photo: Photo) -> NDArray[np.uint8]:
    """The photograph, uint8 (H, W, 3) BGR."""
    import cv2

    data = np.frombuffer(locate(photo).read_bytes(), np.uint8)
    image = cv2.imdecode(data, cv2.IMREAD_COLOR)
    if image is None:
        raise ValueError(f"{locate(photo)} is no picture that OpenCV can read: reinstall {photo.package}.")
    return np.asarray(image, np.uint8)
