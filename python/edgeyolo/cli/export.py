"""Export a detection model: calibrated, verified, ready to be published.

WEIGHTS is an Ultralytics .pt or an FP32 .onnx. The run folder gets the model,
the record (export.json) and a report (report.html) with both sets of boxes.
FP16 and INT8 are calibrated on your own pictures and compared with FP32 on
others of them; what does not agree is not what comes out. A run that was
interrupted is taken up again by the same command.

  edgeyolo export best.pt --precision fp16 --calib photos/
  edgeyolo export best.pt --precision int8 --calib data.yaml --target tensorrt
  edgeyolo export best.pt --precision fp32 --target tensorrt-rtx --sm 8.9 --calib photos/
"""

from __future__ import annotations

import argparse
import sys

from ..errors import EngineError
from .options import height_width, positive
from .output import printable, progress, say, table

HINT = "name the weights: edgeyolo export best.pt --precision fp16 --calib photos/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", metavar="WEIGHTS", help="an Ultralytics .pt, or an FP32 .onnx")
    parser.add_argument("--precision", choices=("fp32", "fp16", "int8"), default="fp16", help="(default fp16)")
    text = "real pictures to calibrate and verify on: a folder, glob, .txt list or data.yaml; several may be named"
    parser.add_argument("--calib", metavar="IMAGES", nargs="+", help=text)
    text = "other pictures to verify on (default: some of --calib that do not calibrate; val of a data.yaml)"
    parser.add_argument("--verify-on", metavar="IMAGES", nargs="+", help=text)
    text = "do not judge the loss of mAP where the pictures to verify on have YOLO labels"
    parser.add_argument("--no-labels", action="store_true", help=text)
    parser.add_argument("--imgsz", type=height_width, metavar="N|HxW", help="input size (default: as trained)")
    parser.add_argument(
        "--batch", type=batch_range, default=(1, 1), metavar="N|N-M", help="images of a run (default 1)"
    )
    parser.add_argument("--dynamic", action="store_true", help="the size is free too, half to twice of imgsz")
    parser.add_argument("--head", choices=("auto", "raw", "end2end"), default="auto", help="(default auto)")
    text = "tanh form of SiLU for engines; auto: where it can be timed, and is faster (default auto)"
    parser.add_argument("--fuse-silu", choices=("auto", "on", "off"), default="auto", help=text)
    text = "(default auto: TensorRT where it runs, else onnx)"
    parser.add_argument("--target", choices=("auto", "tensorrt", "tensorrt-rtx", "onnx"), default="auto", help=text)
    parser.add_argument(
        "--sm", nargs="+", default=[], metavar="SM", help="compute capabilities for tensorrt-rtx: 8.9 12.0"
    )
    parser.add_argument("--dla", type=int, metavar="N", help="build for this DLA core (TensorRT 10 on Jetson)")
    parser.add_argument(
        "--workspace", type=positive(float), metavar="GIB", help="device memory for the builder's kernels"
    )
    parser.add_argument("--hardware-compatible", action="store_true", help="for every GPU from Ampere on, slower")
    parser.add_argument("--version-compatible", action="store_true", help="for later releases of TensorRT's major too")
    parser.add_argument("--out", metavar="DIR", help="the run folder (default runs/export/NAME-PRECISION)")
    text = "unpickle a .pt that holds classes of its own, which runs its code: only for files that you trust"
    parser.add_argument("--trust", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    try:
        from edgeyolo.tools.export import export
    except ImportError as error:
        raise EngineError(f"exporting needs edgeyolo's tools ({error}): pip install 'edgeyolo[tools]'") from error
    with progress("verifying", sys.stderr) as bar:
        started = False

        def advance(step: str, done: int, total: int) -> None:
            nonlocal started
            if not total:
                bar.line(f"{step} ...")
                return
            if not started or done == 1:
                bar.begin(total)
                started = True
            bar.advance()

        result = export(
            args.weights,
            precision=args.precision,
            calib=args.calib[0] if args.calib and len(args.calib) == 1 else args.calib,
            verify_on=args.verify_on,
            labels=not args.no_labels,
            imgsz=args.imgsz,
            batch=args.batch,
            dynamic=args.dynamic,
            head=args.head,
            fuse_silu=args.fuse_silu,
            target=args.target,
            sm=args.sm,
            dla=args.dla,
            workspace=args.workspace,
            hardware_compatible=args.hardware_compatible,
            version_compatible=args.version_compatible,
            out=args.out,
            trust=args.trust,
            told=lambda line: bar.line(printable(line)),
            progress=advance,
        )
    rows = [
        [str(result.folder / model["file"]), model["kind"], model["precision"], model["verification"]["statement"]]
        for model in result.record["models"]
    ]
    table(["model", "kind", "precision", "verification"], rows)
    for failure in result.record["models"][0]["verification"]["failures"]:
        say(printable(f"failed: {failure}"))
    if not result.passed:
        say("not verified: `edgeyolo publish` refuses it", sys.stderr)
        return 1
    say(printable(f"next: edgeyolo publish {result.folder} --to DIR"), sys.stderr)
    return 0


def batch_range(text: str) -> tuple[int, int]:
    """argparse type: "1" or "1-8"."""
    least, dash, most = text.partition("-")
    if least.isascii() and least.isdigit() and (not dash or (most.isascii() and most.isdigit())):
        values = int(least[:9]), int((most if dash else least)[:9])
        if 1 <= values[0] <= values[1]:
            return values
    raise argparse.ArgumentTypeError(f"expected a number of images, such as 1 or 1-8, found {text!r}")
