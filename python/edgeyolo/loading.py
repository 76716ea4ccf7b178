"""From a path to a model at work: what `load()` and `Detector.swap()` share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from . import _core
from .backend import Backend, Color, LoadedModel
from .device import ONNX_SUFFIX, cuda_ordinal
from .engine import EngineModel
from .errors import DeviceError, EdgeYoloError, EngineError, InvalidInput, ManifestError
from .head import HeadKind
from .manifest import ModelFacts, facts_from_header, header_object
from .onnx_cuda import OnnxCudaModel
from .options import Settled, settle
from .published import (
    CURRENT,
    VERSIONS,
    Manifest,
    PublicKey,
    PublishedModel,
    Require,
    Version,
    is_published,
    open_version,
    read_current,
)
from .session import OnnxSession

__all__ = [
    "DEFAULT_IOU",
    "DEFAULT_SLOTS",
    "AsItIs",
    "LoadOptions",
    "Origin",
    "Running",
    "as_it_is",
    "check_file",
    "start",
    "start_current",
]

MAX_SLOTS = 16
DEFAULT_SLOTS, DEFAULT_IOU = 2, 0.7
log = logging.getLogger("edgeyolo")


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `load()`, which describes them."""

    device: str | int
    conf: float
    iou: float
    max_det: int
    classes: Iterable[int | str] | None
    agnostic: bool
    imgsz: int | Sequence[int] | None
    names: Mapping[int, str] | Sequence[str] | None
    color: Color
    head: HeadKind | None
    slots: int
    graph: Literal["auto", "off"]
    tf32: bool
    allow_cpu: bool
    require: Require | None
    public_key: PublicKey | None

    def __post_init__(self) -> None:
        if isinstance(self.classes, Iterator):  # asked again for each model that is tried, and at each swap
            object.__setattr__(self, "classes", list(self.classes))
        if self.color not in ("bgr", "rgb"):
            raise InvalidInput(f"color must be 'bgr' or 'rgb', found {self.color!r}")
        if self.graph not in ("auto", "off"):
            raise InvalidInput(f"graph must be 'auto' or 'off', found {self.graph!r}")
        if isinstance(self.slots, bool) or not isinstance(self.slots, int) or not 1 <= self.slots <= MAX_SLOTS:
            raise InvalidInput(f"slots must be 1 to {MAX_SLOTS}, found {self.slots!r}")
        if self.require is not None and self.require not in get_args(Require):
            raise InvalidInput(f"require must be one of {', '.join(get_args(Require))}, found {self.require!r}")
        if self.public_key is not None and not isinstance(self.public_key, (str, bytes, os.PathLike)):
            raise InvalidInput(
                f"public_key must be the path of a PEM file or its content, found {type(self.public_key).__name__}"
            )


AsItIs = tuple[str, int, int]
"""Id, inode and time of change of a version's folder. One that was damaged and is published again has the same id."""


def as_it_is(folder: Path, version: str) -> AsItIs:
    try:
        facts = (folder / VERSIONS / version).stat()
    except OSError:  # it is missing, or cannot be looked at
        return version, 0, 0
    return version, facts.st_ino, facts.st_mtime_ns


@dataclass(frozen=True)
class Origin:
    """The published folder that a model came from. current: the version that `current` named when it was loaded, as it
    was then.

    told: for info(): which version and file run, and what was passed over, why.
    """

    folder: Path
    current: AsItIs
    told: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Running:
    """One model at work. It never changes: swapping replaces it as a whole.

    Nobody counts its users. A call holds it while it runs, an image in work holds the backend's own memory; what nobody
    holds any more is freed by the backends' destructors, which wait for the GPU without holding up other threads.
    """

    model: LoadedModel
    settled: Settled
    backend: Backend
    color: Color
    origin: Origin | None

    def warm_up(self) -> None:
        """One grey frame, all the way. Raises what the first real one would have met."""
        self.backend.run([np.full((*self.settled.run.imgsz, 3), 114, np.uint8)], self.color, False)

    def close(self) -> None:
        self.backend.close()
        self.model.close()


def start(model: str | os.PathLike[str], options: LoadOptions) -> Running:
    """Loads a model file, or what a published folder holds; there the last good version when the current one is not."""
    path = checked_path(model)
    if is_published(path):
        return start_published(path, options)
    if not path.is_file():
        found = f"a folder at {path} without '{CURRENT}' and '{VERSIONS}'" if path.is_dir() else f"nothing at {path}"
        raise EngineError(f"expected a model file or a published folder, found {found}")
    for name in ("require", "public_key"):
        if getattr(options, name) is not None:
            raise InvalidInput(f"{name}= is for published folders, and {path} is a file: publish it first")
    return start_file(path, options)


def start_current(model: str | os.PathLike[str], options: LoadOptions) -> Running:
    """The same without a second choice: the current version or its error."""
    path = checked_path(model)
    if not is_published(path):
        return start(path, options)
    current = read_current(path)[0]
    return start_version(path, current, current, options)


def checked_path(model: object) -> Path:
    if not isinstance(model, (str, os.PathLike)):
        raise InvalidInput(f"expected the path of a model file, found {type(model).__name__}")
    return Path(model).expanduser()


def open_file(path: Path, options: LoadOptions) -> LoadedModel:
    ordinal = cuda_ordinal(options.device, path)
    graph = options.graph == "auto"
    if ordinal is None:
        return OnnxSession(path)
    if path.suffix.lower() == ONNX_SUFFIX:
        return OnnxCudaModel(
            path,
            device=ordinal,
            slots=options.slots,
            graph=graph,
            tf32=options.tf32,
            allow_cpu=options.allow_cpu,
        )
    return EngineModel(path, device=ordinal, slots=options.slots, graph=graph)


def start_file(path: Path, options: LoadOptions) -> Running:
    model = open_file(path, options)
    try:
        settled = settle_with(model, options)
        return Running(model, settled, model.start(settled.run), options.color, None)
    except BaseException:
        model.close()
        raise


def settle_with(model: LoadedModel, options: LoadOptions) -> Settled:
    settled = settle(
        model,
        conf=options.conf,
        iou=options.iou,
        max_det=options.max_det,
        classes=options.classes,
        agnostic=options.agnostic,
        imgsz=options.imgsz,
        names=options.names,
        head=options.head,
    )
    for note in without_effect(model, settled, options):
        settled.notes.append(note)
        log.warning("%s: %s", model.path.name, note)
    return settled


def without_effect(model: LoadedModel, settled: Settled, options: LoadOptions) -> list[str]:
    """What was asked for, other than by default, and cannot engage on this model."""
    engine = isinstance(model, EngineModel)
    on_cpu = "on the CPU a frame runs in the calling thread, in float32" if model.device == "cpu" else ""
    built_in = "an engine has its precision built in" if engine else ""
    no_gpu = "only an .onnx model can run on the CPU instead" if engine else ""
    own_nms = "the network suppresses duplicates itself" if settled.run.head.kind == "end2end" else ""
    asked = (
        (f"slots={options.slots}", options.slots != DEFAULT_SLOTS, on_cpu),
        ("graph='off'", options.graph == "off", on_cpu),
        ("tf32=False", not options.tf32, on_cpu or built_in),
        ("allow_cpu=True", options.allow_cpu, no_gpu),
        (f"iou={options.iou:g}", options.iou != DEFAULT_IOU, own_nms),
        ("agnostic=True", options.agnostic, own_nms),
    )
    return [f"{name} has no effect: {why}" for name, given, why in asked if given and why]


def start_published(folder: Path, options: LoadOptions) -> Running:
    """The current version, or else the first of those before it that holds together, meets what is required and runs
    here. Raises the current version's error when none does."""
    versions = read_current(folder)
    errors: list[EdgeYoloError] = []
    for version in versions:
        try:
            running = start_version(folder, version, versions[0], options, fallback=str(errors[0]) if errors else "")
        except InvalidInput:  # the caller's mistake, in any version
            raise
        except EdgeYoloError as error:
            errors.append(error)
            continue
        if errors:
            log.warning("%s: version %s is used in place of the current one: %s", folder, version, errors[0])
        return running
    if len(errors) > 1:
        raise type(errors[0])(f"{errors[0]} (and none of the {len(errors) - 1} versions before it can be used)")
    raise errors[0]


def start_version(folder: Path, version: str, current: str, options: LoadOptions, *, fallback: str = "") -> Running:
    """The version's first model that meets what is required and runs here. fallback: why it is not the current one."""
    require, seen = options.require or "verified", as_it_is(folder, current)
    skipped: list[tuple[PublishedModel, EdgeYoloError]] = []
    with open_version(folder, version, public_key=options.public_key) as opened:
        opened.check()
        for model in opened.manifest.models:
            try:
                running = start_model(opened, model, require, options)
            except (DeviceError, EngineError) as error:
                skipped.append((model, error))
                continue
            told = {
                "folder": str(folder),
                "version": version,
                "current": current,
                "file": model.file,
                "kind": model.kind,
                "precision": model.precision,
                "verification": model.statement or "no record",
                "signature": opened.signature,
                "skipped": [{"file": passed.file, "reason": str(reason)} for passed, reason in skipped],
                "fallback": fallback,
            }
            for passed, reason in skipped:
                log.warning("%s: %s is used, not %s: %s", opened.folder, model.file, passed.file, reason)
            return replace(running, origin=Origin(folder.absolute(), seen, told))
    reasons = "; ".join(f"{model.file}: {reason}" for model, reason in skipped)
    kind = type(skipped[0][1]) if len(skipped) == 1 else EngineError
    raise kind(f"{opened.folder}: none of its models can be used here: {reasons}")


def start_model(version: Version, model: PublishedModel, require: Require, options: LoadOptions) -> Running:
    """Raises EngineError and DeviceError for a model that cannot be used here, where another of the version may be."""
    if lacking := model.lacks(require):
        raise EngineError(f"{lacking}; verify it, or load with require='intact'")
    if model.kind != "onnx" and options.device == "cpu":
        raise DeviceError("device='cpu': an engine runs on an NVIDIA GPU only")
    content, path = version.content(model), version.folder / model.file
    try:
        loaded = open_file(content, options)
        try:
            running = start_checked(loaded, version.manifest, options)
        except BaseException:
            loaded.close()
            raise
    except EdgeYoloError as error:
        raise type(error)(str(error).replace(str(content), model.file)) from error
    loaded.path = path
    return running


def start_checked(loaded: LoadedModel, manifest: Manifest, options: LoadOptions) -> Running:
    """With the manifest's word for what the file does not state. Raises ManifestError where the two disagree."""
    facts, stated = loaded.facts(), manifest.facts
    check_agreement(loaded.path, facts, loaded.size, manifest)
    unnamed = options.names is None and facts.names is None
    unsized = options.imgsz is None and loaded.size is None
    completed = replace(
        options,
        names=stated.names if unnamed else options.names,
        imgsz=stated.imgsz if unsized else options.imgsz,
    )
    settled = settle_with(loaded, completed)
    if unnamed:
        settled = replace(settled, names_source="manifest")
    if options.head is None and settled.run.head.kind != manifest.head:
        raise ManifestError(
            f"{loaded.path.name}: the manifest states the head {manifest.head!r}, the network has "
            f"{settled.run.head.kind!r}; publish the model again"
        )
    return Running(loaded, settled, loaded.start(settled.run), options.color, None)


def check_file(path: Path, manifest: Manifest) -> None:
    """What publishing checks of a file: that it can be read, and agrees with the manifest. Needs no GPU: of an engine
    the header alone is read. Raises EngineError and ManifestError."""
    if path.suffix.lower() == ONNX_SUFFIX:
        session = OnnxSession(path)
        check_agreement(path, session.facts(), session.size, manifest)
    else:
        text = _core.EngineFile(path).header
        check_agreement(path, facts_from_header(header_object(text, path.name) if text else {}), None, manifest)


def check_agreement(path: Path, facts: ModelFacts, size: tuple[int, int] | None, manifest: Manifest) -> None:
    """size: of the network's input where it is fixed. What a file does not state agrees with anything."""
    stated = manifest.facts
    for name, inside, outside in (
        ("names", facts.names, stated.names),
        ("imgsz", size or facts.imgsz, stated.imgsz),
        ("stride", facts.stride, stated.stride),
    ):
        if inside is not None and outside is not None and inside != outside:
            raise ManifestError(
                f"{path.name}: the manifest states {name} {outside}, the file {inside}; publish the model again"
            )
