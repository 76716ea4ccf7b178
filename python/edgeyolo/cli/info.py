"""Show what a model is and how it would run here."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .options import add_device, add_json, add_reading, placed, reading
from .output import say, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="an .onnx, .engine or .plan file, or a published folder")
    add_device(parser)
    add_reading(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    import edgeyolo

    with edgeyolo.load(args.model, **placed(args), **reading(args)) as detector:
        facts = detector.info()
    if args.json:
        say(json.dumps(facts, indent=2, default=str))
    else:
        table(("property", "value"), [(key.replace("_", " "), words(key, value)) for key, value in facts.items()])
    return 0


def words(key: str, value: Any) -> str:
    """A value of `Detector.info()` in one cell."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {words(name, inner)}" for name, inner in value.items()) or "none"
    if key in ("imgsz", "shape"):
        return " x ".join(str(side) for side in value)
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return "no" if key == "published" else "unknown"
    return str(value) or "none"
