"""What a fine-tuning is asked for, and what follows from it: optimizer, precision, run folder, time budget."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from edgeyolo.errors import InvalidInput

from .train.augment import Augment

__all__ = ["NBS", "Amp", "FineTuneOptions", "Optimizer", "Rates", "Then", "choose_amp", "choose_folder", "choose_rates"]

Optimizer = Literal["auto", "musgd", "adamw", "sgd"]
Amp = Literal["auto", "fp16", "bf16", "off"]
Then = Literal["export", "publish"]

NBS = 64  # pictures of a weight update, as Ultralytics has it; smaller batches add up their gradients
EPOCHS = 100
MOST_EPOCHS = 1000  # with a time budget, where the time decides
MOST_STEPS = 200_000  # of a schedule whose end is not known: the table is on the device
LONG_RUN = 10_000  # updates
HSV = ("hsv_h", "hsv_s", "hsv_v")
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class FineTuneOptions:
    """The arguments of `finetune()`, which describes them. time: seconds. augment: arguments of Augment."""

    epochs: int | None = None
    batch: int | Literal["auto"] = "auto"
    imgsz: int | None = None
    optimizer: Optimizer = "auto"
    lr: float | None = None
    freeze: int = 0
    amp: Amp = "auto"
    seed: int = 0
    time: float | None = None
    close_mosaic: int = 10
    augment: Mapping[str, Any] = field(default_factory=dict)
    then: tuple[Then, ...] = ()
    publish_to: Path | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("optimizer", self.optimizer, ("auto", "musgd", "adamw", "sgd")),
            ("amp", self.amp, ("auto", "fp16", "bf16", "off")),
        ):
            if value not in allowed:
                raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, found {value!r}")
        least_of = {"epochs": 1, "batch": 1, "imgsz": 32, "freeze": 0, "seed": 0, "close_mosaic": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is None or (name == "batch" and value == "auto"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(f"{name} must be a whole number from {least} up, found {value!r}")
        for name in ("lr", "time"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidInput(f"{name} must be above 0, found {value!r}")
        if self.then not in ((), ("export",), ("export", "publish")):
            raise InvalidInput(f"then must be 'export' or 'export', 'publish'; found {', '.join(self.then)}")
        if self.publish_to is not None and "publish" not in self.then:
            raise InvalidInput("publish_to (--to) is the folder of what is published: put 'publish' into then too")
        known = {item.name for item in fields(Augment)} - {"imgsz", "seed", "pad", "hsv"} | set(HSV)
        for name, value in self.augment.items():
            if name not in known:
                raise InvalidInput(f"augment: no setting {name!r}; there are {', '.join(sorted(known))}")
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InvalidInput(f"augment: {name} must be a number, found {value!r}")
        self.augmentation(self.imgsz or 640)  # says what is wrong with a value

    def augmentation(self, imgsz: int, **more: Any) -> Augment:
        """hsv_h, hsv_s and hsv_v are one setting of Augment."""
        hsv = tuple(self.augment.get(name, default) for name, default in zip(HSV, Augment.hsv, strict=True))
        rest = {name: value for name, value in self.augment.items() if name not in HSV}
        return Augment(imgsz, seed=self.seed, hsv=hsv, **rest, **more)

    def epochs_for(self, batches: int) -> int:
        """The epochs of the run; with a time budget the most that it may have. batches: steps of an epoch."""
        if self.epochs is not None:
            return self.epochs
        return EPOCHS if self.time is None else max(1, min(MOST_EPOCHS, MOST_STEPS // batches))

    def identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that was begun, as JSON values."""
        names = ("epochs", "batch", "imgsz", "optimizer", "lr", "freeze", "amp", "seed", "close_mosaic")
        return {**{name: getattr(self, name) for name in names}, "augment": dict(self.augment)}


def seconds(text: str) -> float:
    """A time budget: "90s", "20m", "1.5h". A bare number might be meant in any of them."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smh])\s*", text.lower())
    if match is None or not float(match[1]):
        raise InvalidInput(f"expected a time such as 90s, 20m or 1.5h, found {text!r}")
    return float(match[1]) * UNITS[match[2]]


@dataclass(frozen=True)
class Rates:
    """An optimizer and the figures of its schedule. warmup_bias_lr: where the rate of the biases begins."""

    optimizer: Literal["musgd", "adamw", "sgd"]
    lr: float
    momentum: float
    warmup_bias_lr: float
    why: str


def choose_rates(options: FineTuneOptions, updates: int, classes: int, new: int = 0) -> Rates:
    """Ultralytics' rule for "auto": MuSGD for long runs, else AdamW at a rate that falls with the number of classes,
    which is safe for the few hundred updates of a usual fine-tuning. AdamW that was asked for gets that rate too.

    new: number of classes that start from nothing. Then it is MuSGD: in 80 updates AdamW had not found a new sign at
    all (200 pictures of 160 px: AP50-95 0.00 to 0.09), MuSGD had (0.86, or 0.42 with the first 11 layers frozen, which
    kept the old ones)."""
    gentle = round(0.002 * 5 / (4 + classes), 6)
    name = options.optimizer
    if name == "auto":
        long = updates > LONG_RUN
        how = "more than" if long else "at most"
        why = f"auto: {new} new classes" if new else f"auto: {updates} updates, {how} {LONG_RUN}"
        chosen = Rates("musgd", 0.01, 0.9, 0.0, why) if long or new else Rates("adamw", gentle, 0.9, 0.0, why)
    elif name == "adamw":
        chosen = Rates("adamw", gentle, 0.9, 0.0, "as asked for")
    else:
        chosen = Rates(name, 0.01, 0.937, 0.1, "as asked for")
    if options.lr is None:
        return chosen
    # The biases would begin far above a rate that was chosen to be small.
    return Rates(chosen.optimizer, options.lr, chosen.momentum, min(chosen.warmup_bias_lr, options.lr), chosen.why)


def choose_amp(amp: Amp, cuda: bool) -> Literal["fp16", "bf16", "off"]:
    """auto: fp16 on CUDA; off on a CPU, where half precision is slower."""
    if amp == "auto":
        return "fp16" if cuda else "off"
    return amp


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("resume.state", "best.pt"))


def choose_folder(out: Path | str | None, weights: Path, data: Path, resume: bool) -> Path:
    """The run folder: `out`, or runs/finetune/WEIGHTS-DATA with a number where there are others; to resume, the last.

    Raises InvalidInput for a folder that holds a run which is not to be resumed, or the weights.
    """
    if out is not None:
        folder = Path(out).expanduser()
        if not resume and holds_run(folder):
            raise InvalidInput(f"{folder} holds a run: resume it (resume, --resume), or name another folder")
    else:
        label = data.parent.resolve().name if data.stem == "data" else data.stem
        base = Path("runs") / "finetune" / f"{weights.stem}-{label}"
        folders: Sequence[Path] = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 10_000))]
        # What a run left that ended before it began, over an argument or its data, is no run.
        free = next(index for index, path in enumerate(folders) if not path.exists() or not holds_run(path))
        begun = [path for path in itertools.takewhile(Path.exists, folders) if holds_run(path)]
        folder = (begun or [base])[-1] if resume else folders[free]
    if resume and not folder.is_dir():
        raise InvalidInput(f"there is no run in {folder} to resume")
    if weights.resolve().parent == folder.resolve():
        raise InvalidInput(f"{weights} lies in the run folder, whose files are replaced: name another folder with out")
    return folder
