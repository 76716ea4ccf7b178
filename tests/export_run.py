"""The folder of an export run, as `edgeyolo publish` takes it, without an export; versions that are changed by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from edgeyolo.published import read_current, version_id
from models import mean_colour, ultralytics_metadata

NAMES = ("red", "green", "blue")
PASSED = {"passed": True, "statement": "graph verified", "precision": "fp32", "metrics": {}, "failures": []}
FAILED = {**PASSED, "passed": False, "failures": ["2 boxes are missing"]}
ENGINE = {**PASSED, "statement": "engine verified"}


def onnx_model(path: Path, *, names: tuple[str, ...] | None = NAMES, size: int = 64) -> Path:
    """See models.mean_colour: anchor i scores i quarters of the mean of each channel."""
    metadata = None if names is None else ultralytics_metadata(dict(enumerate(names)), (size, size))
    path.parent.mkdir(parents=True, exist_ok=True)
    return mean_colour(path, size=(size, size), metadata=metadata)


def entry(path: Path, verification: dict[str, Any] | None = PASSED, **changed: Any) -> dict[str, Any]:
    """A model of the record."""
    kind = "onnx" if path.suffix == ".onnx" else "tensorrt"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "file": path.name,
        "sha256": digest,
        "kind": kind,
        "precision": "fp32",
        "verification": verification,
        **changed,
    }


def record(models: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "edgeyolo": "0.1.0",
        "models": models,
        "imgsz": [64, 64],
        "batch": [1, 1],
        "head": "raw",
        "names": {str(index): name for index, name in enumerate(NAMES)},
        "stride": 32,
        "weights": {"file": "best.pt", "sha256": "0" * 64},
        "graph": {"file": "graph.onnx", "sha256": "1" * 64},
        "calibration": None,
        "silu": {"requested": "auto", "applied": False, "why": "the target is onnx"},
        "versions": {"onnx": "1.23.2"},
        "gpu": None,
        "notes": [],
        "created": "2030-01-02T03:04:05+00:00",
        **changed,
    }


def write_record(run: Path, models: list[dict[str, Any]], **changed: Any) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "export.json").write_text(json.dumps(record(models, **changed)), encoding="utf-8")
    return run


def onnx_run(run: Path, *, names: tuple[str, ...] = NAMES, **changed: Any) -> Path:
    """A run of one ONNX model. Two runs with other names, or other notes, are two versions."""
    model = onnx_model(run / "model.onnx", names=names)
    stated = {str(index): name for index, name in enumerate(names)}
    return write_record(run, [entry(model)], **{"names": stated, **changed})


def version_of(folder: Path, place: int = 0) -> Path:
    return folder / "versions" / read_current(folder)[place]


def rewrite(folder: Path, change: Any) -> Path:
    """Changes the current version's manifest and gives the version the id that it then has, as an attacker could."""
    old = version_of(folder)
    manifest = json.loads((old / "manifest.json").read_text())
    text = change(manifest)
    data = text if isinstance(text, bytes) else json.dumps(manifest).encode()
    (old / "manifest.json").write_bytes(data)
    signature = (old / "manifest.sig").read_bytes() if (old / "manifest.sig").exists() else None
    new = old.with_name(version_id(data, signature))
    old.rename(new)
    (folder / "current").write_text(new.name + "\n")
    return new
