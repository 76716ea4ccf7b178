"""The engine file: a header that Ultralytics' readers and edgeyolo's own understand, then the plan."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeyolo import _core
from edgeyolo.errors import InvalidInput, ManifestError
from edgeyolo.manifest import facts_from_header, facts_from_metadata, header_object

from ..files import replaced
from .engine_graph import NetworkGraph

__all__ = ["OURS", "complete_header", "update_engine", "write_engine"]

OURS = "edgeyolo"  # the key of what edgeyolo adds
LITERALS = ("args", "batch", "channels", "end2end", "imgsz", "names", "stride")  # Python literals in ONNX metadata


def complete_header(
    header: Mapping[str, Any], graph: NetworkGraph, size: tuple[int, int], batch: int
) -> dict[str, Any]:
    """The caller's keys, and what the graph's own metadata says where the caller says nothing, as JSON values.

    size: (height, width) that the engine is best at; batch: its largest. Raises ManifestError when class names are
    missing, when a value cannot be read back, or when header and graph contradict each other; InvalidInput for a header
    that JSON cannot hold.
    """
    facts_from_metadata(graph.metadata)  # the message for unreadable metadata
    values: dict[str, Any] = {key: literal(text) if key in LITERALS else text for key, text in graph.metadata.items()}
    values[OURS] = {}  # the graph's own is of the graph
    values |= header
    values.setdefault("task", "detect")
    values.setdefault("channels", 3)
    values["batch"] = batch
    values.setdefault("imgsz", list(size))
    try:
        values = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the header must hold JSON values only: {error}") from None
    if not isinstance(values[OURS], dict):
        raise InvalidInput(f"the header's {OURS!r} must be a mapping, found {type(values[OURS]).__name__}")
    facts = facts_from_header(values)
    if facts.names is None:
        raise ManifestError(f"{graph.path.name} names no classes; give header={{'names': {{0: ...}}}}")
    static = (graph.input_dims[2], graph.input_dims[3])
    if None not in static and facts.imgsz != static:
        raise ManifestError(f"the header says imgsz {facts.imgsz}, the input of {graph.path.name} is {static}")
    rows = graph.output_dims[1] if len(graph.output_dims) == 3 else None
    if not facts.end2end and rows is not None and rows != 4 + len(facts.names):
        raise ManifestError(
            f"the header names {len(facts.names)} classes, so a raw head has {4 + len(facts.names)} rows; "
            f"the output of {graph.path.name} has {rows}"
        )
    return values


def literal(text: str) -> Any:
    """A value of the ONNX metadata, where all is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def write_engine(path: Path, header: Mapping[str, Any], plan: bytes) -> None:
    """Writes length, header and plan, reads them back with the core's reader, and only then renames the file to `path`.

    header: JSON values; integer keys become text. Raises ManifestError when what was read back differs.
    """
    text = json.dumps(header, ensure_ascii=False, allow_nan=False)
    data = text.encode()  # the length counts bytes, and a class name may take two for one letter
    with replaced(path) as partial:
        with partial.open("wb") as file:
            file.write(struct.pack("<i", len(data)))
            file.write(data)
            file.write(plan)
        read = _core.EngineFile(partial)
        if read.header != text or read.plan_size != len(plan):
            raise ManifestError(f"{path}: the engine file cannot be read back: header and plan changed on the way")


def update_engine(path: Path, ours: Mapping[str, Any]) -> None:
    """Adds or replaces keys under "edgeyolo" in an engine's header, such as its verification record. The plan, and so
    the digest of it that the header holds, stay as they are. Raises EngineError or ManifestError for a file that is no
    engine with a header."""
    file = _core.EngineFile(path)
    if not file.header:
        raise ManifestError(f"{path}: expected an engine with a header, found a bare plan; export it again")
    header = header_object(file.header, path.name)
    header[OURS] = {**header.get(OURS, {}), **ours}
    write_engine(path, header, path.read_bytes()[-file.plan_size :])
