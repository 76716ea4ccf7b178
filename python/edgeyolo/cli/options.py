"""The values that options take, checked while the command line is read, and the options that commands share."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from ..head import HeadKind
from ..published import Require

__all__ = [
    "UsageError",
    "add_device",
    "add_imgsz",
    "add_json",
    "add_reading",
    "class_keys",
    "fraction",
    "height_width",
    "placed",
    "positive",
    "reading",
    "seconds",
    "usable_folder",
]


class UsageError(Exception):
    """The command was called in a way that cannot work: exit code 2."""


def add_device(parser: argparse.ArgumentParser) -> None:
    text = "where the network runs: cpu, a GPU (0, cuda:1), or auto, the default: GPU 0 for engines, else the CPU"
    parser.add_argument("--device", default="auto", help=text)
    text = "an .onnx model on a GPU: products in full float32, slower and closer to the CPU's than TF32"
    parser.add_argument("--no-tf32", action="store_false", dest="tf32", help=text)
    text = "an .onnx model on a GPU: run what ONNX Runtime has no GPU kernels for on the CPU, instead of refusing it"
    parser.add_argument("--allow-cpu", action="store_true", help=text)


def placed(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `load()` that `add_device()` asks for."""
    return {name: getattr(args, name) for name in ("device", "tf32", "allow_cpu")}


def add_imgsz(parser: argparse.ArgumentParser) -> None:
    text = "size of the network's input, of a model with a dynamic one"
    parser.add_argument("--imgsz", type=height_width, metavar="N|HxW", help=text)


def add_reading(parser: argparse.ArgumentParser) -> None:
    """What the model's file or folder does not say by itself, or has to prove. See `reading()`."""
    text = "class names, from 0 on: a text file with one on each line, or the names with commas between them"
    parser.add_argument("--names", type=class_names, metavar="FILE|A,B,C", help=text)
    text = "layout of the network's output, where its shape does not tell"
    parser.add_argument("--head", choices=get_args(HeadKind), help=text)
    text = "what a published model must have on record (default verified)"
    parser.add_argument("--require", choices=get_args(Require), help=text)
    text = "a PEM file: a published model must be signed with the private half of this Ed25519 key"
    parser.add_argument("--public-key", metavar="FILE", help=text)


def reading(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `load()` that `add_reading()` asks for."""
    return {name: getattr(args, name) for name in ("names", "head", "require", "public_key")}


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")


def class_keys(text: str) -> list[int | str]:
    """argparse type: classes by their ids or names, with commas between them."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise argparse.ArgumentTypeError(f"expected ids or names, found {text!r}")
    return [int(word) if word.isdecimal() else word for word in words]


def class_names(text: str) -> list[str]:
    """argparse type: the lines of a file, or words between commas."""
    path = Path(text)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else text.split(",")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
    names = [line.strip() for line in lines]
    while names and not names[-1]:
        names.pop()
    if not names or not all(names):
        raise argparse.ArgumentTypeError(f"expected a name for each class, found {names!r}")
    if len(names) == 1 and (path.suffix or len(path.parts) > 1):
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return names


def fraction(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    with contextlib.suppress(ValueError):
        if 0.0 <= (value := float(text)) <= 1.0:
            return value
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, found {text!r}")


def seconds(text: str) -> float:
    """argparse type: a number of seconds, 0 or more; inf is one."""
    with contextlib.suppress(ValueError):
        if (value := float(text)) >= 0:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds, 0 or more, found {text!r}")


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """argparse type: a finite number above 0."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) < float("inf"):
                return value
        raise argparse.ArgumentTypeError(f"expected a {'whole ' * (kind is int)}number above 0, found {text!r}")

    return parse


def height_width(text: str) -> tuple[int, int]:
    """argparse type: N (a square) or HxW, in pixels."""
    parts = text.lower().split("x")
    if len(parts) in (1, 2) and all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        return int(parts[0]), int(parts[-1])
    raise argparse.ArgumentTypeError(f"expected N or HxW in pixels, such as 640 or 480x640, found {text!r}")


def usable_folder(text: str) -> Path:
    """argparse type: a folder that exists or can be made; a file in its place is wrong usage."""
    folder = Path(text)
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{text}: {reason}") from None
    for place in (folder, *folder.parents):
        if place.is_dir():
            if os.access(place, os.W_OK):
                return folder
            raise argparse.ArgumentTypeError(f"{place} is a folder without permission to write")
        if place.exists() or place.is_symlink():
            raise argparse.ArgumentTypeError(f"expected a folder, but {place} is a file; choose another name")
    return folder
