"""A training's files: the model as an Ultralytics checkpoint, and all that a killed run needs to go on.

Both are written whole or not at all: whoever is killed while saving leaves the file from before.

    loaded = load_for_training(path, names)             # an Ultralytics .pt -> a model to train
    save_checkpoint(folder / "best.pt", step.ema.model, names, imgsz=640)
    save_resume(folder / "resume.state", {"step": step.state_dict(), "rng": rng_state()}, run=facts)
    state = load_resume(folder / "resume.state", run=facts)
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from edgeyolo import __version__
from edgeyolo.errors import InvalidInput, ManifestError

from ..files import replaced, write_atomic
from ..metrics import Metrics
from ..model.checkpoint import layer_class
from ..model.weights import open_weights
from .classes import set_classes

__all__ = [
    "Loaded",
    "load_for_training",
    "load_resume",
    "rng_state",
    "save_checkpoint",
    "save_resume",
    "set_rng_state",
]

FORMAT = "edgeyolo-resume"
VERSION = 1
MAX_HEADER = 1 << 20  # bytes
CACHED = ("anchors", "strides", "shape")  # a head keeps the grid of the last picture


@dataclass(frozen=True)
class Loaded:
    """A model to train. model: an Ultralytics DetectionModel, FP32, in training mode, on the CPU. names: its classes.
    known: those that the file has. stride: image sides are multiples of it. imgsz: (height, width) it was trained for,
    None when it is not told. sha256: of the file. lines: what was done to it."""

    model: Any = field(repr=False, compare=False)
    names: dict[int, str]
    known: dict[int, str]
    stride: int
    imgsz: tuple[int, int] | None
    sha256: str
    lines: tuple[str, ...]


def load_for_training(path: Path | str, names: Mapping[int, str] | None = None, *, trust: bool = False) -> Loaded:
    """Opens a checkpoint without running what it names (see model/checkpoint.py) and makes it trainable.

    names: the classes to train, by default its own; see classes.set_classes for what becomes of the others.
    trust: unpickle one with layers of its own, which runs its code.
    Raises InvalidInput or ManifestError for what is no detection checkpoint or cannot be trained any more.
    """
    path = Path(path)
    if path.suffix != ".pt":
        raise InvalidInput(f"{path}: training starts from an Ultralytics checkpoint (.pt), found {path.suffix!r}")
    weights = open_weights(path, trust=trust)
    model, head = weights.model, weights.model.model[-1]
    if type(head).__name__ != "Detect":
        raise ManifestError(f"{path}: expected a Detect head to train, found {type(head).__name__}")
    if weights.heads == ("end2end",) or not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        raise ManifestError(f"{path}: it was saved fused for inference, without its norms; hand in the one as trained")
    lines = set_classes(model, names) if names is not None else [f"{len(weights.names)} classes, its own"]
    model.names = {int(key): str(name) for key, name in model.names.items()}
    model.criterion = None
    model.args = _default_args()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".dfl." not in name)  # the DFL's weights are the numbers 0 ... reg_max - 1
    return Loaded(
        model.train(), dict(model.names), dict(weights.names), weights.stride, weights.default_imgsz, weights.sha256,
        tuple(lines),
    )  # fmt: skip


def _default_args() -> Any:
    """Ultralytics' defaults: the loss reads its gains there."""
    from ultralytics.cfg import get_cfg

    return get_cfg()


def save_checkpoint(
    path: Path | str,
    model: Any,
    names: Mapping[int, str],
    *,
    imgsz: int | tuple[int, int],
    data: str = "",
    metrics: Metrics | None = None,
    epoch: int | None = None,
) -> tuple[str, ...]:
    """Writes a .pt that `ultralytics.YOLO(path)` opens; returns lines about what is unusual in it, mostly none.

    model: the averaged one (`step.ema.model`); it is not changed. imgsz: pixels, or (height, width). data: the name of
    the data set. metrics, epoch: go on record. The weights are FP16, as Ultralytics stores them; FP32 where FP16 cannot
    hold one. Equal arguments give equal bytes: no date, no path.
    Raises InvalidInput for weights that are not finite, layers that others cannot open, names that do not fit.
    """
    from ultralytics import __version__ as ultralytics_version

    wanted = {int(key): str(name) for key, name in sorted(names.items())}
    head = model.model[-1]
    if list(wanted) != list(range(int(head.nc))):
        raise InvalidInput(f"expected names for the {int(head.nc)} classes of the model, found {len(wanted)}")
    plain, lines = _plain_copy(model)
    sides = [imgsz, imgsz] if isinstance(imgsz, int) else list(imgsz)
    args = {
        "task": "detect",
        "mode": "train",
        "data": data,
        "imgsz": sides[0] if sides[0] == sides[1] else sides,
        "single_cls": False,
    }
    plain.names, plain.nc, plain.args, plain.task = wanted, len(wanted), dict(args), "detect"
    checkpoint = {
        "epoch": -1,  # finished, as far as Ultralytics is concerned: what goes on is the resume state
        "best_fitness": None,
        "model": plain,
        "ema": None,
        "updates": None,
        "optimizer": None,
        "train_args": args,
        "train_metrics": {} if metrics is None else _ultralytics_metrics(metrics),
        "train_results": {},
        "version": ultralytics_version,
        "edgeyolo": {"version": __version__, "epoch": epoch},
    }
    buffer = io.BytesIO()  # torch.save() to a path puts the path's name into the file
    torch.save(checkpoint, buffer)
    write_atomic(Path(path), buffer.getvalue())
    return lines


def _plain_copy(model: Any) -> tuple[Any, tuple[str, ...]]:
    """A copy on the CPU with nothing in it but layers of PyTorch and Ultralytics, each tensor with its own memory."""
    made = copy.deepcopy(model).eval().requires_grad_(False)
    for name, layer in made.named_modules():
        kind = type(layer)
        if layer_class(f"{kind.__module__}.{kind.__qualname__}") is not kind:
            raise InvalidInput(
                f"{name}: a layer of {kind.__module__}.{kind.__qualname__}, which Ultralytics cannot open; "
                "save the averaged model (step.ema.model)"
            )
        for key in vars(layer):
            if key.endswith("_hooks"):
                setattr(layer, key, OrderedDict())
    for key in CACHED:
        vars(made.model[-1]).pop(key, None)
    for key in ("criterion", "pt_path"):
        vars(made).pop(key, None)
    floats = [
        (name, t)
        for name, t in (*made.named_parameters(), *made.named_buffers())
        if t.is_floating_point() and t.numel()
    ]
    peaks = torch.stack([t.abs().max().double() for _, t in floats]).tolist()  # of NaN and anything, max is NaN
    bad = next((name for (name, _), peak in zip(floats, peaks, strict=True) if not math.isfinite(peak)), None)
    if bad is not None:
        raise InvalidInput(f"{bad} holds NaN or infinity: nothing is saved, the file from before stays")
    largest = torch.finfo(torch.float16).max
    wide = next((name for (name, _), peak in zip(floats, peaks, strict=True) if peak > largest), None)
    made = made.float() if wide is not None else made.half()
    made = made.cpu()
    for _, t in (*made.named_parameters(), *made.named_buffers()):
        t.data = t.data.clone(memory_format=torch.contiguous_format)
    return made, (f"saved as FP32: {wide} has a value beyond FP16's {largest:g}",) if wide is not None else ()


def _ultralytics_metrics(metrics: Metrics) -> dict[str, float | None]:
    """Under the names of Ultralytics' trainer, of which the last picks the best checkpoint."""

    def number(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    _, precision, recall, _ = metrics.curve.best()
    return {
        "metrics/precision(B)": precision,
        "metrics/recall(B)": recall,
        "metrics/mAP50(B)": number(metrics.map50),
        "metrics/mAP50-95(B)": number(metrics.map50_95),
        "fitness": number(metrics.map50_95),
    }


def save_resume(path: Path | str, state: Mapping[str, Any], *, run: Mapping[str, Any]) -> None:
    """Writes the state of a run: dicts, lists and tuples of tensors, numbers, texts and bytes, given back bit by bit.

    run: JSON values that say which run it is (digest of the data, of the weights, options); load_resume compares them.
    Raises InvalidInput, naming the place, for a value of another kind: reading it back would have to run code.
    """
    _check_plain(state, "state")
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = buffer.getbuffer()
    header = {
        "format": FORMAT,
        "version": VERSION,
        "edgeyolo": __version__,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "run": dict(run),
    }
    line = json.dumps(header, ensure_ascii=True, allow_nan=False).encode() + b"\n"
    if len(line) > MAX_HEADER:
        raise InvalidInput(f"run: expected at most {MAX_HEADER} bytes of JSON, found {len(line)}")
    with replaced(Path(path)) as partial, partial.open("wb") as file:
        file.write(line)
        file.write(content)


def load_resume(path: Path | str, *, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What save_resume() was given, on the CPU. Nothing of the file is run.

    run: has to be that of the saved run, key by key. None: any run.
    Raises ManifestError for a file that is missing, damaged, foreign or of another version; InvalidInput, saying what
    differs, for another run.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: no state to resume from: {error.strerror or error}") from None
    line = data[:MAX_HEADER].partition(b"\n")[0]
    header = _header(path, line)
    content = memoryview(data)[len(line) + 1 :]
    if hashlib.sha256(content).hexdigest() != header.get("sha256"):
        raise ManifestError(f"{path}: the state is damaged ({len(content)} of {header.get('bytes')} bytes); begin anew")
    saved = header.get("run")
    if run is not None and isinstance(saved, dict):
        _check_run(path, saved, json.loads(json.dumps(dict(run))))
    try:
        return dict(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except Exception as error:  # whatever a file that was forged causes
        raise ManifestError(
            f"{path}: the state holds more than data and is not read: {type(error).__name__}"
        ) from error


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ManifestError(f"{path}: expected a state that a finetune run saved, found another file")
    if header.get("version") != VERSION:
        raise ManifestError(
            f"{path}: a state of version {header.get('version')!r}, this edgeyolo ({__version__}) reads {VERSION}; "
            f"resume with edgeyolo {header.get('edgeyolo')} or begin anew"
        )
    return header


def _check_run(path: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    then, here = _flat(saved), _flat(now)
    missing = "nothing"
    differ = [
        f"{key}: {then.get(key, missing)!r:.60} then, {here.get(key, missing)!r:.60} now"
        for key in sorted(then.keys() | here.keys())
        if then.get(key, missing) != here.get(key, missing)
    ]
    if differ:
        raise InvalidInput(
            f"{path}: the state of another run ({'; '.join(differ)}): resume with what it was begun with, or begin anew"
        )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"options": {"batch": 8}} -> {"options.batch": 8}"""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _check_plain(value: Any, where: str) -> None:
    if value is None or type(value) in (bool, int, float, str, bytes, torch.Tensor):
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in (str, int):
                raise InvalidInput(f"{where}: expected keys that are texts or numbers, found {type(key).__name__}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    else:
        raise InvalidInput(f"{where}: expected tensors, numbers, texts and containers, found {type(value).__name__}")


def rng_state() -> dict[str, Any]:
    """The state of the process's random generators: Python's, NumPy's, PyTorch's on the CPU and on each GPU."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    words = torch.from_numpy(np.asarray(keys).astype(np.int64))
    return {
        "python": random.getstate(),
        "numpy": [str(kind), words, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts back what rng_state() gave. Raises InvalidInput when the number of GPUs is another."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(state["cuda"]) != gpus:
        raise InvalidInput(f"the state was saved with {len(state['cuda'])} GPUs, here are {gpus}: resume on as many")
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if gpus:
        torch.cuda.set_rng_state_all(state["cuda"])
