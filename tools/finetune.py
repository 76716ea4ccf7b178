"""Fine-tuning: a checkpoint and your pictures -> a better checkpoint, exported and published where that is asked for.

    data > augment > [forward > loss > optimizer > EMA: one step] > evaluate > checkpoint   > export > publish

The run folder holds best.pt, last.pt, the log (log.html, epochs.csv, log.jsonl), the curves of the best checkpoint, and
resume.state: a run that was killed goes on from there, with the same numbers.
"""

from __future__ import annotations

import time as clock
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from edgeyolo.errors import InvalidInput

from .export import export
from .export_gate import Gate
from .export_options import ExportOptions, Precision, choose_images
from .finetune_loop import FineTune, Loop
from .finetune_options import Amp, FineTuneOptions, Optimizer, Then, choose_folder
from .finetune_setup import Progress, Setup, Told, set_up
from .publish import publish
from .runfolder import RunFolder
from .train.log import RunLog

__all__ = ["FineTune", "finetune"]

SAVE_SECONDS = 120.0  # between two resume states within an epoch; there is one after each epoch too


def finetune(
    weights: Path | str,
    data: Path | str,
    *,
    epochs: int | None = None,
    batch: int | Literal["auto"] = "auto",
    imgsz: int | None = None,
    optimizer: Optimizer = "auto",
    lr: float | None = None,
    freeze: int = 0,
    amp: Amp = "auto",
    seed: int = 0,
    time: float | None = None,
    close_mosaic: int = 10,
    augment: Mapping[str, Any] | None = None,
    resume: bool = False,
    out: Path | str | None = None,
    then: Then | Sequence[Then] = (),
    publish_to: Path | str | None = None,
    publish_worse: bool = False,
    precision: Precision = "fp16",
    device: str | int = "auto",
    trust: bool = False,
    save_seconds: float = SAVE_SECONDS,
    told: Told | None = None,
    progress: Progress | None = None,
) -> FineTune:
    """Trains a detection model on a YOLO data set, from its weights.

    weights: an Ultralytics .pt. trust: unpickle one with layers of its own, which runs its code. data: a data.yaml; its
    classes may be others than the checkpoint's: those of the same name keep what they know.
    epochs: 100 by default. time: seconds for all but export and publish, in place of epochs or with them as the most;
    the learning rate follows the time that is left. batch: pictures of a step, "auto": the most that fit; weights are
    updated once per 64 pictures. imgsz: side in pixels, by default as trained.
    optimizer, lr: see choose_rates. freeze: the first n layers stay as they are. amp: "fp16", "bf16", "off"; "auto":
    fp16 on CUDA, off on a CPU. close_mosaic: the last epochs show whole pictures. augment: arguments of
    tools.train.augment.Augment, such as {"fliplr": 0} where a mirrored object is another one.
    out: the run folder, runs/finetune/WEIGHTS-DATA by default. resume: go on with the run in it. save_seconds: between
    two resume states within an epoch; 0: after each step.
    then: "export", "publish": in `precision`, to the folder `publish_to`, by default "published" in the run folder; a
    model of lower mAP50-95 than that of the start only if publish_worse.
    device: "auto", "cpu", 0, "cuda:1". told: called with a line of text for each decision. progress: see Progress.

    On a CPU equal arguments give equal weights, interrupted or not. Raises InvalidInput for arguments and data that
    cannot be used, ManifestError for files, DeviceError when not even one picture fits, Diverged for values that are
    not finite in full precision too.
    """
    options = FineTuneOptions(
        epochs, batch, imgsz, optimizer, lr, freeze, amp, seed, time, close_mosaic, dict(augment or {}),
        (then,) if isinstance(then, str) else tuple(then),
        None if publish_to is None else Path(publish_to).expanduser(),
    )  # fmt: skip
    weights, data, begun = Path(weights).expanduser(), Path(data).expanduser(), clock.monotonic()
    folder = choose_folder(out, weights, data, resume)
    show: Progress = progress or (lambda what, done, total, rate: None)
    title = f"{weights.name}, fine-tuned on {data.resolve().parent.name}/{data.name}"
    with RunFolder.locked(folder), RunLog(folder, title=title) as log:

        def say(line: str) -> None:
            log.told(line)
            if told is not None:
                told(line)

        setup = set_up(weights, data, options, folder, device, trust, say, show)
        to = options.publish_to or folder / "published"
        pictures = export_pictures(setup, precision, to) if options.then else {}
        loop = Loop(setup, options, folder, begun, save_seconds, log, say, show)
        if resume:
            loop.resume()
        done = loop.run()
        if "export" not in options.then:
            return done
        made = export(
            done.best, precision=precision, **pictures, imgsz=setup.imgsz, out=folder / "export", told=say,
            progress=lambda step, count, total: show(f"{step} the export", count, total, 0.0),
        )  # fmt: skip
        done = replace(done, export=made)
        if "publish" not in options.then:
            return done
        why = made.statement if not made.passed else "" if publish_worse else done.worse()
        if why:
            say(f"not published: {why}")
            return done
        done = replace(done, publication=publish(made.folder, to))
        say(f"published in {to}")
        return done


def export_pictures(setup: Setup, precision: Precision, to: Path) -> dict[str, Any]:
    """calib and verify_on for export(): the pictures that the label check accepted. Raises now what export() and
    publish() would raise after the training."""
    if to.exists() and not to.is_dir():
        raise InvalidInput(f"{to} is to become a published folder, and is a file: name another one")
    ExportOptions(precision=precision)
    chosen = {"calib": list(setup.data.pictures), "verify_on": list(setup.val.pictures)}
    if precision == "fp32":
        del chosen["calib"]
    Gate(choose_images(precision, chosen.get("calib"), chosen["verify_on"]).verification).check_labels(setup.names)
    return chosen
