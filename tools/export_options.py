"""What an export is asked for, and what follows from it: target, pictures, attempts, profiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from edgeyolo.errors import InvalidInput

from .model.calibration import ADVICE, AT_LEAST, find_images
from .model.engine import EngineOptions, Profile, Target, check_builder, runnable
from .model.graph import Graph

__all__ = [
    "Attempt",
    "ExportOptions",
    "ExportTarget",
    "Fuse",
    "Images",
    "Precision",
    "attempts",
    "choose_folder",
    "choose_images",
    "choose_target",
    "engine_options",
    "pair",
]

Precision = Literal["fp32", "fp16", "int8"]
ExportTarget = Literal["auto", "tensorrt", "tensorrt-rtx", "onnx"]
Fuse = Literal["auto", "on", "off"]
Images = Path | str | Sequence[Path | str]

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "int8")
CALIBRATE: dict[Precision, int] = {"fp16": 32, "int8": 128}
"""Pictures to calibrate on. FP16 needs them for the range of activations alone."""
VERIFY, LEAST_VERIFY = 64, 8


@dataclass(frozen=True)
class ExportOptions:
    """The arguments of `export()`, which describes them."""

    precision: Precision = "fp16"
    imgsz: tuple[int, int] | None = None
    batch: tuple[int, int] = (1, 1)
    dynamic: bool = False
    head: Literal["auto", "raw", "end2end"] = "auto"
    fuse_silu: Fuse = "auto"
    target: ExportTarget = "auto"
    sm: tuple[str, ...] = ()
    dla: int | None = None
    workspace: float | None = None
    hardware_compatible: bool = False
    version_compatible: bool = False
    labels: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("precision", PRECISIONS),
            ("head", ("auto", "raw", "end2end")),
            ("fuse_silu", ("auto", "on", "off")),
            ("target", ("auto", "tensorrt", "tensorrt-rtx", "onnx")),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name} must be one of {', '.join(allowed)}, found {getattr(self, name)!r}")
        for name, values, most in (("imgsz", self.imgsz, 32767), ("batch", self.batch, 1024)):
            if values is not None and not all(type(value) is int and 1 <= value <= most for value in values):
                raise InvalidInput(f"{name} must be two whole numbers from 1 to {most}, found {values!r}")
        if self.batch[0] > self.batch[1]:
            raise InvalidInput(f"batch must be (least, most), found {self.batch!r}")


def pair(name: str, value: object) -> tuple[int, int]:
    """A number twice, or two of them. Raises InvalidInput for anything else."""
    values = value if isinstance(value, (tuple, list)) else (value, value)
    if len(values) != 2 or not all(isinstance(item, int) for item in values):
        raise InvalidInput(f"{name} must be a whole number, or two of them, found {value!r}")
    return values[0], values[1]


def choose_folder(out: Path | str | None, weights: Path, precision: Precision) -> Path:
    """The run folder. Raises InvalidInput where the run would replace the weights with its own file of that name."""
    folder = Path("runs") / "export" / f"{weights.stem}-{precision}" if out is None else Path(out).expanduser()
    if weights.resolve().parent == folder.resolve():
        raise InvalidInput(f"{weights} lies in the run folder, whose files are replaced: name another folder with out")
    return folder


def choose_target(options: ExportOptions) -> tuple[Target | Literal["onnx"], str]:
    """The target of this run, and why it was chosen where the caller left it open.

    Raises InvalidInput for options that belong to another target.
    """
    target, why = options.target, ""
    if target == "auto":
        ready, why = runnable("tensorrt")
        target, why = ("tensorrt", f"TensorRT runs here: {why}") if ready else ("onnx", f"no TensorRT engine: {why}")
    if target == "onnx":
        engines_only = {
            "sm": bool(options.sm),
            "dla": options.dla is not None,
            "workspace": options.workspace is not None,
            "hardware_compatible": options.hardware_compatible,
            "version_compatible": options.version_compatible,
            "fuse_silu='on'": options.fuse_silu == "on",
        }
        wrong = [name for name, given in engines_only.items() if given]
        if wrong:
            cure = "name the target: tensorrt or tensorrt-rtx" if options.target == "auto" else "leave them out"
            raise InvalidInput(f"{', '.join(wrong)}: for engines only, and the target is onnx; {cure}")
    else:
        # What contradicts itself, or is missing here, is told now, not after the calibration.
        check_builder(engine_options(target, options, None, None))
    return target, why


def engine_options(target: Target, options: ExportOptions, graph: Graph | None, folder: Path | None) -> EngineOptions:
    """graph: for the profiles of a dynamic one. folder: where the timing cache is kept."""
    profiles: tuple[Profile, ...] = ()
    if graph is not None and (graph.dynamic or graph.batch[0] != graph.batch[1]):
        least, most = graph.batch
        sides = tuple(zip(graph.smallest, graph.imgsz, graph.largest, strict=True))
        profiles = (Profile(batch=(least, most, most), height=sides[0], width=sides[1]),)
    return EngineOptions(
        target=target,
        sm=options.sm,
        dla=options.dla,
        workspace=options.workspace,
        profiles=profiles,
        hardware_compatible=options.hardware_compatible,
        version_compatible=options.version_compatible,
        timing_cache=None if folder is None or target != "tensorrt" else folder / "timing.cache",
    )


@dataclass(frozen=True)
class Attempt:
    """One way to lower the precision. keep: INT8 layers that are left in FP16. why: what made the last one fail."""

    precision: Precision
    fused: bool = False
    keep: tuple[str, ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        return self.precision + ("-mixed" if self.keep else "") + ("-fused" if self.fused else "")


def attempts(first: Attempt) -> Iterator[Attempt]:
    """The first attempt and what to fall back to, one step closer to the FP32 reference each. An INT8 one with
    `keep=("*",)` stands for "the layers where the error arises", which are known once INT8 has been tried."""
    attempt = first
    yield attempt
    if attempt.fused:
        attempt = replace(attempt, fused=False)
        yield attempt
    if attempt.precision == "int8":
        yield replace(attempt, keep=("*",))
        attempt = Attempt("fp16")
        yield attempt
    if attempt.precision == "fp16":
        yield Attempt("fp32")


@dataclass(frozen=True)
class Pictures:
    """calibration: what ranges are taken from. verification: what the gate compares. notes: for the reader."""

    calibration: tuple[Path, ...]
    verification: tuple[Path, ...]
    notes: tuple[str, ...]


def choose_images(precision: Precision, calib: Images | None, pictures: Images | None) -> Pictures:
    """Which pictures calibrate and which verify.

    calib: pictures, or a data.yaml: its `train` calibrates and its `val` verifies. pictures: those to verify on.
    Without them, pictures of `calib` that do not calibrate verify, at least a quarter; where there are fewer than 32,
    the same ones do both, and a note says so. Raises InvalidInput where the precision needs pictures and has none.
    """
    notes: list[str] = []
    if calib is None:
        if precision != "fp32":
            raise InvalidInput(
                f"{precision} is calibrated on real pictures, and none were named (calib, --calib): calibration needs "
                f"at least {AT_LEAST} pictures; {ADVICE}"
            )
        if pictures is None:
            return Pictures((), (), ("no pictures were given: the graph was compared with its weights on noise only",))
        return Pictures((), tuple(find_images(pictures, at_least=1, at_most=VERIFY, split="val")), ())
    found, wanted = find_images(calib), CALIBRATE.get(precision, 0)
    if pictures is not None:
        chosen, verification = _spread(found, wanted), find_images(pictures, at_least=1, at_most=VERIFY, split="val")
    elif _is_data_yaml(calib):
        pool, chosen = find_images(calib, split="val"), _spread(found, wanted)
        others = _without(pool, chosen)  # a data set without `val` has its `train` here
        verification = _spread(others if len(others) >= LEAST_VERIFY else pool, VERIFY)
    else:
        # A quarter is kept back to verify on, where that leaves enough for both.
        kept_back = min(VERIFY, len(found) // 4)
        enough = kept_back >= LEAST_VERIFY and wanted > 0
        chosen = _spread(found, min(wanted, len(found) - kept_back) if enough else wanted)
        verification = _spread(_without(found, chosen) if enough or not wanted else found, VERIFY)
    used = {path.resolve() for path in chosen}
    both = sum(path.resolve() in used for path in verification)
    if both:
        part = "" if both == len(verification) else f"{both} of {len(verification)} pictures: "
        notes.append(
            f"{part}verified on the pictures that it was calibrated on: give more, or others to verify on, to be surer"
        )
    return Pictures(tuple(chosen), tuple(verification), tuple(notes))


def _without(paths: Sequence[Path], taken: Sequence[Path]) -> list[Path]:
    gone = {path.resolve() for path in taken}
    return [path for path in paths if path.resolve() not in gone]


def _is_data_yaml(images: Images) -> bool:
    return isinstance(images, (str, Path)) and Path(images).suffix.lower() in (".yaml", ".yml")


def _spread(paths: Sequence[Path], most: int) -> list[Path]:
    if len(paths) <= most:
        return list(paths)
    return [paths[round(index * (len(paths) - 1) / max(1, most - 1))] for index in range(most)]
