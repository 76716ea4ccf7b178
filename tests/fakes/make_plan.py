"""Writes engine files for the test TensorRT: a toy plan (toy_plan.hpp tells its lines) behind an Ultralytics header.

python make_plan.py toy.engine --head raw --classes 80 --imgsz 640
python make_plan.py dynamic.engine --dynamic 320 640 1280 --option differs_in_capture
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADS = ("raw", "raw_transposed", "yolov5", "end2end", "dynamic_rows")


def plan_text(
    *,
    head: str = "raw",
    classes: int = 80,
    imgsz: tuple[int, int] = (640, 640),
    batch: int = 1,
    dtype: str = "float32",
    output_dtype: str | None = None,
    dynamic: Sequence[tuple[int, int, int]] = (),
    strides: Sequence[int] = (8, 16, 32),
    rows: int = 300,
    options: Sequence[str] = (),
    **values: int | str,
) -> str:
    """The plan's text. imgsz is (height, width), pixels; dynamic holds (min, opt, max) sizes, one profile each.

    `values` are further lines of toy_plan.hpp: kernels, busy, warmups, aux_streams, scratch, streamable, budget,
    tensorrt, name.
    """
    if head not in HEADS:
        raise ValueError(f"head must be one of {', '.join(HEADS)}, found {head!r}")
    height, width = (-1, -1) if dynamic else imgsz
    lines = ["edgeyolo toy plan 1", f"input images {dtype} {batch} 3 {height} {width}"]
    for sizes in dynamic:
        lines.append("profile " + " ".join(f"{batch} 3 {size} {size}" for size in sizes))
    lines.append(f"output output0 {output_dtype or dtype} {head} {classes}")
    lines.append("strides " + " ".join(str(stride) for stride in strides))
    lines.append(f"rows {rows}")
    lines += [f"{key} {value}" for key, value in values.items()]
    if options:
        lines.append("option " + " ".join(options))
    return "\n".join(lines) + "\n"


def metadata(
    *,
    head: str = "raw",
    classes: int = 80,
    imgsz: tuple[int, int] = (640, 640),
    batch: int = 1,
    dynamic: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The header's object, with the keys that Ultralytics writes. `extra` replaces or adds keys (dla, args, ...)."""
    values: dict[str, Any] = {
        "description": "toy detector",
        "stride": 32,
        "task": "detect",
        "batch": batch,
        "imgsz": list(imgsz),
        "names": {str(index): f"class{index}" for index in range(classes)},
        "args": {"batch": batch, "dynamic": dynamic, "nms": False},
        "channels": 3,
        "end2end": head == "end2end",
    }
    values.update(extra or {})
    return values


def write_engine(path: str | Path, plan: str | bytes, header: Mapping[str, Any] | None = None) -> Path:
    """Header (none for None) and plan in one file."""
    body = plan.encode() if isinstance(plan, str) else plan
    if header is not None:
        text = json.dumps(header).encode()
        body = struct.pack("<i", len(text)) + text + body
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(body)
    temporary.replace(path)
    return path


def make(path: str | Path, *, header: bool = True, extra: Mapping[str, Any] | None = None, **arguments: Any) -> Path:
    """One call for tests: plan_text() and metadata() of the same arguments, written to `path`."""
    shared = {key: arguments[key] for key in ("head", "classes", "imgsz", "batch") if key in arguments}
    values = metadata(**shared, dynamic=bool(arguments.get("dynamic")), extra=extra) if header else None
    return write_engine(path, plan_text(**arguments), values)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an engine file for the test TensorRT.")
    parser.add_argument("path")
    parser.add_argument("--head", choices=HEADS, default="raw")
    parser.add_argument("--classes", type=int, default=80)
    parser.add_argument("--imgsz", type=int, nargs=2, default=(640, 640), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32")
    parser.add_argument("--dynamic", type=int, nargs=3, action="append", default=[], metavar=("MIN", "OPT", "MAX"))
    parser.add_argument("--strides", type=int, nargs="+", default=(8, 16, 32))
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--option", action="append", default=[], dest="options")
    parser.add_argument("--no-header", dest="header", action="store_false")
    for key in ("kernels", "busy", "warmups", "aux_streams", "scratch", "streamable", "budget"):
        parser.add_argument(f"--{key.replace('_', '-')}", type=int, dest=key)
    arguments = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    arguments["imgsz"] = tuple(arguments["imgsz"])
    make(arguments.pop("path"), **arguments)


if __name__ == "__main__":
    main()
