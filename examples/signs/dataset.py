"""Writes a YOLO data set of drawn signs: images/, labels/, data.yaml and sources.json.

    python -m examples.signs.dataset --out signs-data --train 8000 --val 800 --imgsz 640 --seed 0

Picture i of a split depends on (seed, split, i) alone, so the bytes are the same for any number of workers. The folder
appears under its name only when it is complete.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .photos import PHOTOS, Split, read
from .signs import CLASSES, render

Image = NDArray[np.uint8]

# Width over height of the pictures; the longer side is imgsz.
ASPECTS = (1.0, 4 / 3, 3 / 2, 16 / 9, 3 / 4)
PROCEDURAL = "procedural"  # the name in sources.json of a background without a photograph; training only

_photos: dict[str, Image] = {}  # per process, filled at first use


def _photo(split: Split, rng: np.random.Generator) -> tuple[str, Image]:
    chosen = [p for p in PHOTOS if p.split == split]
    photo = chosen[int(rng.integers(len(chosen)))]
    if photo.name not in _photos:
        _photos[photo.name] = read(photo)
    return photo.name, _photos[photo.name]


def crop(photo: Image, width: int, height: int, rng: np.random.Generator) -> Image:
    """A random part of a photograph at the wanted size, perhaps mirrored, tinted or blurred by magnification."""
    import cv2

    h, w = photo.shape[:2]
    # The largest window of this aspect, then at most a 2.5-fold magnification of the photograph.
    largest = min(w / width, h / height)
    scale = largest * rng.uniform(min(1.0, max(0.35, 0.4 / largest)), 1.0)
    cw, ch = max(8, int(width * scale)), max(8, int(height * scale))
    x, y = int(rng.integers(0, w - cw + 1)), int(rng.integers(0, h - ch + 1))
    method = cv2.INTER_AREA if scale > 1 else cv2.INTER_CUBIC
    part: Image = cv2.resize(photo[y : y + ch, x : x + cw], (width, height), interpolation=method)
    if rng.random() < 0.5:
        part = cv2.flip(part, 1)
    colour = part.astype(np.float32)
    if rng.random() < 0.5:  # tint: most of the textures are grey
        grey = colour.mean(axis=2, keepdims=True)
        keep = rng.uniform(0.3, 1.0)
        colour = (grey + keep * (colour - grey)) * rng.uniform(0.55, 1.3, 3)
    if rng.random() < 0.1:
        colour = colour[..., rng.permutation(3)]
    colour = colour * rng.uniform(0.6, 1.2)
    return np.asarray(np.clip(np.rint(colour), 0, 255), np.uint8)


def clutter(width: int, height: int, rng: np.random.Generator) -> Image:
    """A background without a photograph: a gradient, clouds of noise, flat polygons and lines."""
    import cv2

    a, b = rng.uniform(0, 255, 3), rng.uniform(0, 255, 3)
    scene = a + (b - a) * np.linspace(0, 1, height)[:, None, None] + np.zeros((1, width, 1))
    for cells in (4, 12, 40):
        cloud = rng.normal(0, rng.uniform(2, 22), (cells, cells, 3 if rng.random() < 0.3 else 1)).astype(np.float32)
        scene = scene + cv2.resize(cloud, (width, height), interpolation=cv2.INTER_CUBIC).reshape(height, width, -1)
    image = np.clip(scene, 0, 255).astype(np.uint8)
    for _ in range(int(rng.integers(0, 14))):
        centre, reach = rng.random(2) * (width, height), rng.uniform(0.03, 0.4) * width
        corners = centre + rng.uniform(-1, 1, (int(rng.integers(3, 6)), 2)) * reach
        colour = [float(c) for c in rng.uniform(0, 255, 3)]
        points = np.rint(corners * 16).astype(np.int32)
        if rng.random() < 0.5:
            cv2.fillPoly(image, [points], colour, cv2.LINE_AA, 4)
        else:
            cv2.polylines(image, [points], False, colour, int(rng.integers(1, 12)), cv2.LINE_AA, 4)
    return image


def background(split: Split, imgsz: int, rng: np.random.Generator) -> tuple[list[str], Image]:
    """The names of what it is made of, and the picture."""
    aspect = ASPECTS[int(rng.integers(len(ASPECTS)))]
    width, height = round(min(imgsz, imgsz * aspect)), round(min(imgsz, imgsz / aspect))
    if split == "train" and rng.random() < 0.15:
        return [PROCEDURAL], clutter(width, height, rng)
    name, photo = _photo(split, rng)
    image = crop(photo, width, height, rng)
    names = [name]
    if split == "train" and rng.random() < 0.3:  # two photographs side by side or one above the other
        other, second = _photo(split, rng)
        image = image.copy()
        part = crop(second, width, height, rng)
        if rng.random() < 0.5:
            cut = int(rng.uniform(0.2, 0.8) * width)
            image[:, cut:] = part[:, cut:]
        else:
            cut = int(rng.uniform(0.2, 0.8) * height)
            image[cut:] = part[cut:]
        names.append(other)
    return names, image


def picture(split: Split, index: int, imgsz: int, seed: int) -> tuple[list[str], bytes, str]:
    """Picture `index` of a split: what its background is made of, its JPEG bytes and the text of its label file."""
    import cv2

    rng = np.random.default_rng([seed, 0 if split == "train" else 1, index])
    names, photo = background(split, imgsz, rng)
    image, boxes, class_ids = render(photo, rng)
    done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, int(rng.integers(70, 96))])
    if not done:
        raise RuntimeError(f"OpenCV could not encode picture {index} of {split} as JPEG.")
    h, w = image.shape[:2]
    lines = []
    for (x1, y1, x2, y2), k in zip(boxes.tolist(), class_ids.tolist(), strict=True):
        lines.append(f"{k} {(x1 + x2) / 2 / w:.6f} {(y1 + y2) / 2 / h:.6f} {(x2 - x1) / w:.6f} {(y2 - y1) / h:.6f}\n")
    return names, data.tobytes(), "".join(lines)


def _write_one(task: tuple[Split, int], folder: Path, imgsz: int, seed: int) -> tuple[str, list[str]]:
    import cv2

    if multiprocessing.parent_process() is not None:
        cv2.setNumThreads(1)  # the processes are the parallelism
    split, index = task
    names, jpeg, label = picture(split, index, imgsz, seed)
    stem = f"{split}/{index:06d}"
    (folder / "images" / f"{stem}.jpg").write_bytes(jpeg)
    (folder / "labels" / f"{stem}.txt").write_text(label)
    return stem, names


def write(out: Path, *, train: int, val: int, imgsz: int = 640, seed: int = 0, workers: int = 1) -> Path:
    """Write the data set to the new folder `out`; returns the path of its data.yaml.

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError: a photograph is not installed.
    """
    if out.exists():
        raise FileExistsError(f"{out} exists: choose a new folder or delete it.")
    if min(train, val, workers) < 1 or imgsz < 64:
        raise ValueError(f"train, val, workers >= 1 and imgsz >= 64 expected; got {train}, {val}, {workers}, {imgsz}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for kind in ("images", "labels"):
            for split in ("train", "val"):
                (folder / kind / split).mkdir(parents=True)
        tasks: list[tuple[Split, int]] = [("train", i) for i in range(train)] + [("val", i) for i in range(val)]
        job = partial(_write_one, folder=folder, imgsz=imgsz, seed=seed)
        if workers == 1:
            sources = dict(map(job, tasks))
        else:  # spawned, not forked: the caller may already have started threads or CUDA
            with multiprocessing.get_context("spawn").Pool(workers) as pool:
                sources = dict(pool.imap(job, tasks, chunksize=8))
        (folder / "sources.json").write_text(json.dumps(sources, indent=0) + "\n")
        names = "".join(f"  {k}: {name}\n" for k, name in enumerate(CLASSES))
        (folder / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames:\n{names}")
        folder.chmod(0o755)
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return out / "data.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="examples.signs.dataset", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--train", type=int, default=8000, help="pictures to train on")
    parser.add_argument("--val", type=int, default=800, help="pictures over held-out photographs")
    parser.add_argument("--imgsz", type=int, default=640, help="longer side, pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    try:
        print(write(args.out, train=args.train, val=args.val, imgsz=args.imgsz, seed=args.seed, workers=args.workers))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
