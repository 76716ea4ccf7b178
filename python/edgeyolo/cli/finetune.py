"""Fine-tune a detection model on your own pictures, and redeploy it.

WEIGHTS is an Ultralytics .pt, --data a YOLO data set. Classes may be others
than the checkpoint's: those of the same name keep what they know. Labels are
checked first, and what is wrong with them is told. Weights are updated once
per 64 pictures, whatever the batch. The run folder gets best.pt, last.pt and
log.html. A run that was interrupted goes on with the same command and --resume.

  edgeyolo finetune best.pt --data data.yaml --augment fliplr=0
  edgeyolo finetune best.pt --data data.yaml --time 20m --then export,publish --to models/door
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from ..errors import EngineError
from .options import UsageError, positive
from .output import printable, say, table

if TYPE_CHECKING:
    from edgeyolo.tools.finetune import FineTune

HINT = "name the weights and the data: edgeyolo finetune best.pt --data data.yaml"
BAR = 24  # characters
LONGEST = 18  # digits: a 64-bit number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    whole, number = positive(int), positive(float)
    parser.add_argument("weights", metavar="WEIGHTS", help="an Ultralytics .pt")
    parser.add_argument("--data", metavar="DATA", required=True, help="data.yaml: path, train, val, names")
    parser.add_argument("--epochs", type=whole, metavar="N", help="(default 100; with --time: as many as fit)")
    parser.add_argument("--time", metavar="BUDGET", help="90s, 20m, 1.5h: the learning rate follows the time left")
    parser.add_argument(
        "--batch", type=auto_or(whole), default="auto", metavar="N|auto", help="pictures of a step (default auto)"
    )
    parser.add_argument("--imgsz", type=whole, metavar="N", help="side in pixels (default: as trained)")
    parser.add_argument("--optimizer", choices=("auto", "musgd", "adamw", "sgd"), default="auto", help="(default auto)")
    parser.add_argument("--lr", type=number, metavar="RATE", help="learning rate (default: that of the optimizer)")
    parser.add_argument("--freeze", type=count, default=0, metavar="N", help="the first N layers stay as they are")
    text = "half precision (default auto: fp16 on CUDA, off on a CPU)"
    parser.add_argument("--amp", choices=("auto", "fp16", "bf16", "off"), default="auto", help=text)
    text = "the last N epochs show whole pictures (default 10)"
    parser.add_argument("--close-mosaic", type=count, default=10, metavar="N", help=text)
    text = "mosaic, mixup, degrees, translate, scale, shear, perspective, fliplr, flipud, hsv_h, hsv_s, hsv_v"
    parser.add_argument("--augment", type=setting, nargs="+", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--seed", type=count, default=0, metavar="N", help="(default 0)")
    parser.add_argument("--device", default="auto", help="auto, cpu, or a GPU: 0, cuda:1 (default auto)")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default runs/finetune/WEIGHTS-DATA)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, or with the last one")
    parser.add_argument("--then", type=steps, default=(), metavar="STEPS", help="export, or export,publish")
    parser.add_argument("--to", metavar="DIR", help="the published folder (default: published, in the run folder)")
    text = "publish a model of lower mAP50-95 than WEIGHTS has on these pictures, too"
    parser.add_argument("--publish-worse", action="store_true", help=text)
    text = "of the export (default fp16)"
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp16", help=text)
    text = "unpickle a .pt that holds classes of its own, which runs its code: only for files that you trust"
    parser.add_argument("--trust", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    if args.to is not None and "publish" not in args.then:
        raise UsageError("--to DIR is for what is published: add --then export,publish")
    try:
        from edgeyolo.tools.finetune import finetune
        from edgeyolo.tools.finetune_options import seconds
    except ImportError as error:
        raise EngineError(f"fine-tuning needs edgeyolo's tools ({error}): pip install 'edgeyolo[tools]'") from error
    live = Live(sys.stderr)
    try:
        result = finetune(
            args.weights,
            args.data,
            epochs=args.epochs,
            batch=args.batch,
            imgsz=args.imgsz,
            optimizer=args.optimizer,
            lr=args.lr,
            freeze=args.freeze,
            amp=args.amp,
            seed=args.seed,
            time=None if args.time is None else seconds(args.time),
            close_mosaic=args.close_mosaic,
            augment=dict(args.augment),
            resume=args.resume,
            out=args.out,
            then=args.then,
            publish_to=args.to,
            publish_worse=args.publish_worse,
            precision=args.precision,
            device=args.device,
            trust=args.trust,
            told=live.line,
            progress=live.show,
        )
    finally:
        live.clear()
    show(result)
    if result.export is not None and not result.export.passed:
        say("the export was not verified: `edgeyolo publish` refuses it", sys.stderr)
        return 1
    if result.export is None:
        say(printable(f"next: edgeyolo export {result.best} --calib {args.data}"), sys.stderr)
    elif result.publication is None:
        asked = "publish" in args.then  # and did not happen
        line = f"edgeyolo publish {result.export.folder} --to {args.to or 'DIR'}"
        say(printable(f"to publish it all the same: {line}" if asked else f"next: {line}"), sys.stderr)
        return int(asked)
    return 0


def show(result: FineTune) -> None:
    metrics = result.metrics
    parts = [(part.name, part.labels, part.ap50, part.ap50_95) for part in metrics.classes.values()]
    parts.append(("all", sum(part[1] for part in parts), metrics.map50, metrics.map50_95))
    rows = [[name, str(labels), *(f"{ap:.4f}" if labels else "-" for ap in aps)] for name, labels, *aps in parts]
    table(["class", "labels", "AP50", "AP50-95"], rows, right=(1, 2, 3))
    say(printable(f"{result.best}  the best checkpoint; {result.folder / 'log.html'}  its curves"))
    if result.publication is not None:
        say(printable(f"{result.publication.folder}: published version {result.publication.version}"))


class Live:
    """What is being done, as one line on a terminal that is written over and over; told lines go above it.

    The bar of `output.progress` counts items alone; this one has a name that changes, and a rate.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.terminal, self.text = stream, stream.isatty(), ""

    def line(self, text: str) -> None:
        self.clear()
        say(printable(text), self.stream)
        self._write(self.text)

    def show(self, what: str, done: int, total: int, rate: float) -> None:
        full = BAR * done // max(total, 1)
        speed = f"  {rate:.0f} images/s" if rate else ""
        self.text = f"{what}  [{'#' * full}{'.' * (BAR - full)}] {done}/{total}{speed}"
        self._write(self.text)
        if done >= total:
            self.text = ""

    def clear(self) -> None:
        self._write("")

    def _write(self, text: str) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r\x1b[K{text[:width]}")
            self.stream.flush()


def auto_or(parse: Callable[[str], float]) -> Callable[[str], float | str]:
    def either(text: str) -> float | str:
        return text if text == "auto" else parse(text)

    return either


def count(text: str) -> int:
    """argparse type: a whole number from 0 up."""
    if text.isascii() and text.isdigit() and len(text) <= LONGEST:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, of {LONGEST} digits at most, found {text!r}")


def setting(text: str) -> tuple[str, float]:
    """argparse type: KEY=VALUE, a number."""
    key, _, value = text.partition("=")
    try:
        return key, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected KEY=NUMBER, such as fliplr=0, found {text!r}") from None


def steps(text: str) -> tuple[str, ...]:
    """argparse type: what follows the training."""
    chosen = tuple(part.strip() for part in text.split(","))
    if chosen in (("export",), ("export", "publish")):
        return chosen
    raise argparse.ArgumentTypeError(f"expected export or export,publish, found {text!r}")
