"""What comes before the loop of a fine-tuning: labels checked, memory planned, pictures decoded, rates chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from edgeyolo.errors import InvalidInput

from .dataset import LabelReport, check_labels, read_data
from .files import digest_of, write_atomic
from .finetune_options import EPOCHS, NBS, FineTuneOptions, Rates, choose_amp, choose_rates
from .train.augment import Augment
from .train.checkpoint import Loaded, load_for_training
from .train.data import Place, TrainData
from .train.loss import bucket
from .train.memory import free_memory, memory_plan, model_facts
from .train.norm_silu import have_triton
from .train.watch import out_of_memory

__all__ = ["Progress", "Setup", "Told", "set_up"]

DEFAULT_IMGSZ = 640

Told = Callable[[str], None]
Progress = Callable[[str, int, int, float], None]
"""(what is being done, done, of all, images per second or 0)."""


@dataclass(frozen=True)
class Setup:
    """model: a new copy of the checkpoint's, with the classes of the data. reminders: what is told again at the end.
    identity: what a resumed run must have in
    common with this one, as JSON values."""

    model: Callable[[], Any]
    names: dict[int, str]
    imgsz: int
    device: torch.device
    data: TrainData
    augment: Augment
    val: LabelReport
    data_name: str
    batch: int
    amp: Literal["fp16", "bf16", "off"]
    epochs: int
    rates: Rates
    reminders: tuple[str, ...]
    identity: dict[str, Any]


def set_up(
    weights: Path, file: Path, options: FineTuneOptions, folder: Path, device: str | int, trust: bool, say: Told,
    show: Progress,
) -> Setup:  # fmt: skip
    """Tells every decision. Raises InvalidInput and ManifestError for what cannot be used."""
    where = torch_device(device)
    given = read_data(file)
    loaded = load_for_training(weights, given.names, trust=trust)
    imgsz = image_size(options.imgsz, loaded)
    for line in (*given.notes, *loaded.lines):
        say(line)
    train = labels("train", given.train, given.names, folder, say)
    # A picture that cannot be read would end a validation: these are few, so all of each file is looked at.
    val = labels("val", given.val, given.names, folder, say, decode=True)
    amp = choose_amp(options.amp, where.type == "cuda")
    facts = model_facts(loaded.model, amp=amp, fused_norm=where.type == "cuda" and have_triton())
    plan = memory_plan(facts, options.batch, imgsz, len(train.pictures), free_memory(where))
    say(str(plan))
    data = decode(train, imgsz, where, plan.place, folder, say, show)
    epochs = options.epochs_for(-(-len(data) // plan.batch))
    # Whatever a time budget makes of it, the rule is for the epochs that were asked for, as Ultralytics has it.
    updates = -(-len(data) // max(plan.batch, NBS)) * (options.epochs or EPOCHS)
    new = len(set(given.names.values()) - set(loaded.known.values()))
    rates = choose_rates(options, updates, len(given.names), new)
    say(described(options, imgsz, where, amp, epochs))
    say(f"{rates.optimizer}, learning rate {rates.lr:g} ({rates.why}); weights are updated once per {NBS} pictures")
    return Setup(
        model=lambda: copy.deepcopy(loaded.model),
        names=given.names,
        imgsz=imgsz,
        device=where,
        data=data,
        augment=options.augmentation(imgsz, pad=bucket),
        val=val,
        data_name=file.name,
        batch=plan.batch,
        amp=amp,
        epochs=epochs,
        rates=rates,
        reminders=tuple(filter(None, (left_out("train", train, len(data)), left_out("val", val, len(val.pictures))))),
        identity={
            "weights": loaded.sha256,
            "classes": {str(key): name for key, name in given.names.items()},
            "train": data.digest,
            "val": digest_of(
                [[p.name, p.stat().st_size, r.tolist()] for p, r in zip(val.pictures, val.labels, strict=True)]
            ),
            "options": options.identity(),
        },
    )


def torch_device(name: str | int) -> torch.device:
    """ "auto", "cpu", "cuda", "cuda:1", or the number of a GPU."""
    there = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if there else "cpu")
    text = f"cuda:{name}" if str(name).isdecimal() else str(name)
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"device must be auto, cpu, or a GPU such as 0 or cuda:0; found {name!r}")
    if device.type == "cuda" and (not there or (device.index or 0) >= torch.cuda.device_count()):
        raise InvalidInput(f"device {name!r}: torch finds {torch.cuda.device_count()} GPUs here; use cpu or auto")
    return device


def described(options: FineTuneOptions, imgsz: int, device: torch.device, amp: str, epochs: int) -> str:
    """What was asked for and chosen, as a line of the log."""
    closed = min(options.close_mosaic, epochs)
    whole = f"the last {closed} of {epochs} epochs" if closed < epochs else "all epochs"
    changed = ", ".join(f"{key}={value:g}" for key, value in options.augment.items()) or "as Ultralytics has it"
    return (
        f"{imgsz} pixels on {device}, amp {amp}, seed {options.seed}, {options.freeze} layers frozen; "
        f"augmentation {changed}; {whole} without mosaic (close_mosaic)"
    )


def image_size(asked: int | None, loaded: Loaded) -> int:
    """A square, as large as the longer side that the checkpoint was trained for."""
    if asked is None:
        longer = max(loaded.imgsz or (DEFAULT_IMGSZ,))
        return -(-longer // loaded.stride) * loaded.stride
    if asked % loaded.stride:
        raise InvalidInput(f"imgsz must be a multiple of the stride {loaded.stride}, found {asked}")
    return asked


def labels(
    split: str, pictures: Sequence[Path], names: dict[int, str], folder: Path, say: Told, *, decode: bool = False
) -> LabelReport:
    """Tells the first problems; all of them are in the run folder, labels-SPLIT.txt."""
    report = check_labels(pictures, names, decode=decode)
    for line in f"{split}: {report.table()}".splitlines():
        say(line)
    if report.problems:
        file = folder / f"labels-{split}.txt"
        write_atomic(file, "".join(f"{problem}\n" for problem in report.problems))
        say(f"all of these: {file}")
    return report


def left_out(split: str, report: LabelReport, used: int) -> str:
    gone = report.found - used
    return f"{split}: {gone} of {report.found} pictures were left out, see labels-{split}.txt" if gone else ""


def decode(
    report: LabelReport, imgsz: int, device: torch.device, place: Place, folder: Path, say: Told, show: Progress
) -> TrainData:
    """The pictures, decoded once; where they do not fit after all, in the next place. Those that decoding finds to be
    broken are told."""
    order: tuple[Place, ...] = ("device", "host", "disk") if device.type == "cuda" else ("device", "disk")
    places = order[order.index(place) :]
    for here in places:
        try:
            data = TrainData(
                report.pictures, report.labels, imgsz, device=device, place=here, folder=folder,
                progress=lambda done, total: show("decoding", done, total, 0.0),
            )  # fmt: skip
            break
        except Exception as error:
            if here == places[-1] or not out_of_memory(error):
                raise
            say(f"too little memory for the pictures ({here}): they go elsewhere")
    say(f"{len(data)} pictures, decoded in {data.seconds:.1f} s ({data.place})")
    for file, why in data.problems:
        say(f"{file}: {why}: picture left out")
    return data
