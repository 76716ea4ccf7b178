"""What an export leaves behind: the models under their published names, and export.json."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .files import digest, replaced, write_json
from .model.engine import update_engine
from .model.precision_plan import PrecisionPlan

__all__ = ["RECORD", "REFERENCE", "REPORT", "Artefact", "Made", "installed", "leave", "outcome_notes", "plain"]

RECORD, REPORT = "export.json", "report.html"


REFERENCE = {
    "passed": True,
    "statement": "graph verified",
    "precision": "fp32",
    "failures": [],
    "notes": ["the FP32 reference itself"],
}


@dataclass(frozen=True)
class Made:
    """graph: the ONNX in this precision. model: the engine of it, or the graph itself. engine: EngineFacts as JSON."""

    graph: Path
    model: Path
    plan: PrecisionPlan | None
    engine: dict[str, Any] | None


@dataclass(frozen=True)
class Artefact:
    """A model of the run: the file that a step made, and the name it gets."""

    name: str
    source: Path
    kind: str
    precision: str
    verification: dict[str, Any]


def leave(folder: Path, record: dict[str, Any], artefacts: list[Artefact], report: Path | None) -> None:
    """Puts models, report and, last, the record into the folder. `record` gets its "models" and "created"."""
    record["models"] = []
    for one in artefacts:
        target = folder / one.name
        if target != one.source:
            with replaced(target) as partial:
                shutil.copyfile(one.source, partial)
                if one.kind != "onnx":
                    update_engine(partial, _header(record, one.verification))
        record["models"].append(
            {
                "file": one.name,
                "sha256": digest(target),
                "kind": one.kind,
                "precision": one.precision,
                "verification": one.verification,
            }
        )
    if report is None:
        (folder / REPORT).unlink(missing_ok=True)  # an earlier run's, of another model
    else:
        with replaced(folder / REPORT) as partial:
            shutil.copyfile(report, partial)
    record["created"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_json(folder / RECORD, record)


def outcome_notes(last: dict[str, Any], requested: str, refused: list[dict[str, Any]]) -> list[str]:
    """What the reader of a passed run should know beside its verification. last: the attempt that it ended with."""
    done, notes = last["verification"], []
    if refused and done["passed"]:
        notes.append(f"{requested} was refused by the gate; this is {last['attempt']}")
    if done["passed"] and done["statement"] != "engine verified" and last["precision"] != "fp32":
        # Nodes in FP16 have no kernels there.
        notes.append("verified on a CPU, where ONNX Runtime computes FP16 in FP32: overflow cannot show")
    times = done.get("metrics", {}).get("milliseconds") or {}
    slower = times.get("candidate", 0.0) > 1.2 * times.get("reference", float("inf"))
    if slower and done["statement"] == "graph verified":
        notes.append(
            f"slower than FP32 on this CPU: {times['candidate']:.1f} ms a picture against {times['reference']:.1f}; "
            "this precision is for GPUs"
        )
    return notes


def _header(record: dict[str, Any], verification: dict[str, Any]) -> dict[str, Any]:
    """What the engine's own header says, under "edgeyolo": an engine may travel without its folder."""
    return {
        "precision": record["precision"],
        "weights_sha256": record["weights"]["sha256"],
        "calibration": record["calibration"],
        "silu": {key: record["silu"][key] for key in ("applied", "why")},
        "verification": {key: verification[key] for key in ("passed", "statement", "failures")},
    }


def installed(*packages: str) -> dict[str, str]:
    """Versions of what is installed; ultralytics under either of its names."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        for name in (package, f"{package}-opencv-headless"):
            with suppress(PackageNotFoundError):
                found[package] = version(name)
    return found


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Dataclass values as JSON has them."""
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
