"""Find objects in pictures, folders, videos or cameras.

One line per picture on stdout. A file that cannot be read has a line of its
own, the run goes on, and the exit code is 1. Ctrl-C ends a run early: each file
that was written until then is kept and is whole.

Of a folder every file is tried, and its outcome reported: label files (.txt)
beside the pictures are errors. DIR/*.jpg takes the pictures alone.

Pictures of --save keep their format; those that it cannot hold in colour or at
their size (.pgm, very large .webp) are saved as .png.

The document of --json (with "-" on stdout; the lines then go to stderr):
  schema: "edgeyolo.detect/1"; edgeyolo: its version; model: path;
  names: {id: name}; settings: {conf, iou, max_det, classes, agnostic};
  frames: a list of {source, path, index, timestamp in seconds or null} with
    either error: a sentence,
    or image_size: [width, height], timings_ms: {stage: milliseconds},
       detections: a list of {box: [x1, y1, x2, y2] in pixels of the picture,
       score, class_id, name};
  complete: false when the run was interrupted.

Label files of --txt have one line per object, `class cx cy w h conf`, the box
as shares of the picture's width and height. Those of a video are numbered by
the frames of the saved video, from 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..address import redacted
from ..errors import SourceError
from .files import JsonDocument
from .options import (
    UsageError,
    add_device,
    add_imgsz,
    add_reading,
    class_keys,
    fraction,
    placed,
    positive,
    reading,
    seconds,
    usable_folder,
)
from .output import Progress, progress, say
from .results import Keeper, NotSavedError, ResultFolder
from .window import Window

if TYPE_CHECKING:
    from ..detector import Detector
    from ..source import Source

HINT = "SOURCE comes before --classes, which takes every word after it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="picture, folder, glob, video, camera (0, /dev/video0) or address")
    add(
        "--model",
        metavar="MODEL",
        help="an .onnx, .engine or .plan file, or a published folder (default: the traffic signs that ship here)",
    )
    add("--conf", type=fraction, default=0.25, metavar="C", help="a box's score is above it (default 0.25)")
    add("--iou", type=fraction, default=0.7, metavar="U", help="boxes that overlap more are one (default 0.7)")
    add("--max-det", type=positive(int), default=300, metavar="N", help="boxes per picture at most (default 300)")
    add("--classes", nargs="+", type=class_keys, metavar="CLASS", help="report these ids or names only (give it last)")
    add("--agnostic", action="store_true", help="boxes of different classes suppress each other too")
    add_imgsz(parser)
    add_device(parser)
    add_reading(parser)
    text = "of a camera or stream: every frame, later and later where they come faster than they can be looked at"
    add("--every-frame", action="store_true", help=text)
    text = "open a camera or stream that is lost again, for so many seconds (default 0; inf: for ever)"
    add("--reconnect", type=seconds, default=0.0, metavar="SECONDS", help=text)
    add("--save", type=usable_folder, metavar="DIR", help="write the drawn pictures and videos there")
    add("--txt", action="store_true", help="write label files beside the saved pictures")
    add("--json", metavar="FILE", help="write every result into one JSON document (- for stdout)")
    add("--show", action="store_true", help="show each picture in a window; q or Escape ends the run")
    add("--quiet", "-q", action="store_true", help="no line for what could be read, only for errors")


def run(args: argparse.Namespace) -> int:
    import edgeyolo

    check_usage(args)
    if not args.model:
        say("model: the traffic sign detector that ships with edgeyolo (give --model for yours)", sys.stderr)
    model = args.model or edgeyolo.demo_model()
    options = {name: getattr(args, name) for name in ("conf", "iou", "max_det", "classes", "agnostic")}
    if args.classes:
        options["classes"] = [key for keys in args.classes for key in keys]
    with contextlib.ExitStack() as stack:
        detector = stack.enter_context(
            edgeyolo.load(model, imgsz=args.imgsz, **placed(args), **reading(args), **options)
        )
        document = None
        if args.json:
            head = {
                "schema": "edgeyolo.detect/1",
                "edgeyolo": edgeyolo.__version__,
                "model": model,
                "names": {str(key): name for key, name in detector.names.items()},
                "settings": options,
            }
            document = stack.enter_context(JsonDocument(None if args.json == "-" else Path(args.json), head))
        keeper = Keeper(
            Progress(sys.stderr if args.json == "-" else sys.stdout),
            document=document,
            folder=ResultFolder(args.save, labels=args.txt) if args.save else None,
            window=stack.enter_context(Window()) if args.show else None,
            quiet=args.quiet,
        )
        stack.callback(keeper.report)
        with progress("detect", keeper.lines.stream) as keeper.lines:
            keeper.lines.begin(len(args.sources))
            for source in args.sources:
                if not keeper.closed:
                    detect(source, detector, keeper, live_options(source, args))
    return 1 if keeper.errors else 0


def detect(source: str, detector: Detector, keeper: Keeper, live: dict[str, Any]) -> None:
    """One SOURCE from its first to its last frame. What cannot be read is told, and the run goes on."""
    import edgeyolo

    name = source if os.path.lexists(source) else redacted(source)
    try:
        with edgeyolo.open(source, **live) as frames, contextlib.ExitStack() as stack:
            stack.callback(tell_dropped, name, frames, keeper)
            keeper.lines.unfold(frames.total)
            if frames.left_out:
                keeper.lines.aside(f"{name}: {left_out(frames.left_out)}")
            for frame in frames:
                if frame.image is None:
                    keeper.fail(name, frame.error or SourceError("no picture"), frame)
                else:
                    try:
                        keeper.keep(name, frame, detector(frame.image, timings=True))
                    except NotSavedError as error:
                        keeper.fail(name, error, frame)
                keeper.lines.advance()
                if keeper.closed:
                    break
    except SourceError as error:
        keeper.fail(name, error)
        keeper.lines.advance()
    finally:
        keeper.end_of_source()


def live_options(source: str, args: argparse.Namespace) -> dict[str, Any]:
    """Of several sources those that are live take them."""
    if os.path.exists(source) and not source.startswith("/dev/"):
        return {}
    return {"latest": False if args.every_frame else None, "reconnect": args.reconnect}


def tell_dropped(name: str, frames: Source, keeper: Keeper) -> None:
    if frames.dropped:
        keeper.lines.aside(f"{name}: {frames.dropped} frames came while others were in work, and were left out")


def left_out(files: Sequence[Path]) -> str:
    names = [file.name for file in files[:3]] + ["..."] * (len(files) > 3)
    count = "1 other file" if len(files) == 1 else f"{len(files)} other files"
    return f"{count}, neither picture nor video, left out: {', '.join(names)}"


def check_usage(args: argparse.Namespace) -> None:
    """What can be known before the model is loaded."""
    if args.every_frame and args.reconnect:
        raise UsageError("--reconnect goes with the newest frame: leave --every-frame out")
    if args.txt and not args.save:
        raise UsageError("--txt writes label files beside the saved pictures: give --save DIR too")
    if args.json and args.json != "-":
        path = args.json
        if os.path.exists(path) and not os.path.isfile(path):
            raise UsageError(f"--json: expected the name of a file, but {path} is none; `--json -` writes to stdout")
    if args.save:
        # os.path answers False for what it cannot look at; the source's own error comes when its turn does.
        for source in map(Path, args.sources):
            folder = source if os.path.isdir(source) else source.parent
            named = os.path.exists(source) or set("*?[") & set(source.name)
            if named and os.path.realpath(args.save) == os.path.realpath(folder):
                raise UsageError(f"--save {args.save} is the folder of the source {source}: choose another folder")
