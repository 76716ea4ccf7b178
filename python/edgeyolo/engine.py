"""TensorRT engine files: what their header says, and the plan loaded on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import _core
from .backend import RunOptions
from .backend_engine import EngineBackend
from .errors import EdgeYoloError, ManifestError
from .manifest import ModelFacts, facts_from_header, header_object

__all__ = ["EngineModel", "adapter_folder", "dla_core_of", "tensorrt_folders"]

OURS = "edgeyolo"  # the header's key for what edgeyolo adds
CLOSED = "this model was closed: load it again"


class EngineModel:
    """One engine on one GPU. See backend.LoadedModel.

    header: the JSON object in front of the plan; empty where there is none. Raises EngineError when the file, TensorRT
    or the adapter for it cannot be used, DeviceError without a driver or device, ManifestError when it is no detector.
    """

    backend = "tensorrt"

    def __init__(self, path: Path, *, device: int, slots: int, graph: bool) -> None:
        self.path = path
        self.device = f"cuda:{device}"
        self._slots, self._graph = slots, graph
        file = _core.EngineFile(path)
        self.header = header_object(file.header, path.name) if file.header else {}
        ours = self.header.get(OURS)
        self._ours: Mapping[str, Any] = ours if isinstance(ours, dict) else {}
        self._facts = facts_from_header(self.header)
        self.dla_core = dla_core_of(self.header)
        engine = _core.LoadedEngine(
            file,
            device=device,
            folders=tensorrt_folders(),
            adapters=adapter_folder(),
            dla_core=-1 if self.dla_core is None else self.dla_core,
            plugins=self._ours.get("plugins") is True,
        )
        self._engine: _core.LoadedEngine | None = engine
        outputs = [tensor for tensor in engine.tensors if not tensor["input"]]
        if len(outputs) != 1:
            raise ManifestError(
                f"{path.name}: expected one output, the boxes of a detection network; found "
                f"{[tensor['name'] for tensor in outputs]}. Export it with one merged detection output"
            )
        self._input = next(tensor for tensor in engine.tensors if tensor["input"])
        self.input_shape: list[Any] = list(self._input["shape"])
        batch, _, height, width = self.input_shape
        self.batch = batch if batch > 0 else None
        self.size = (height, width) if height > 0 and width > 0 else None

    def facts(self) -> ModelFacts:
        """What the header states; without a size in it, that of the engine's own optimization profile."""
        if self._facts.imgsz is None:
            return replace(self._facts, imgsz=self._open().default_target)
        return self._facts

    def output_shape(self, imgsz: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of one image's output; rows is -1 where each image decides it. Raises InvalidInput for a size
        that no optimization profile allows."""
        batch = self.batch or self._input["profiles"][0]["opt"][0]
        shape = self._open().output_shape(imgsz, batch)
        if len(shape) == 3:
            shape = shape[1:]
        if len(shape) != 2:
            raise ManifestError(
                f"{self.path.name}: expected an output of the shape (batch, rows, columns), found {shape}"
            )
        return shape[0], shape[1]

    def start(self, options: RunOptions) -> EngineBackend:
        return EngineBackend(
            self._open(),
            options,
            slots=self._slots,
            graph=self._graph,
            dla=self.dla_core is not None,
            embedded_nms=self._facts.embedded_nms,
        )

    def info(self) -> dict[str, Any]:
        engine = self._open()
        return {
            "backend": self.backend,
            "backend_version": engine.tensorrt_version,
            "tensorrt": engine.tensorrt,
            "device": self.device,
            "device_name": engine.device_name,
            "input": {key: self._input[key] for key in ("name", "shape", "dtype")},
            "header": "ours" if self._ours else "Ultralytics" if self.header else "none",
            "plan_digest": engine.plan_digest,
            "verified": self._ours.get("verified") or "no record",
        }

    def close(self) -> None:
        self._engine = None

    def _open(self) -> _core.LoadedEngine:
        if self._engine is None:
            raise EdgeYoloError(CLOSED)
        return self._engine


def dla_core_of(header: Mapping[str, Any]) -> int | None:
    """The DLA core that an engine was built for, by its header; None when it was built for the GPU."""
    value = header.get("dla")
    if value is None or value is False:
        return None
    if isinstance(value, str) and value.isascii() and value.isdigit():
        value = int(value)
    if isinstance(value, int) and 0 <= value < 8:
        return 0 if value is True else value
    raise ManifestError(
        f"the header's 'dla' must be the number of a DLA core, found {value!r}; export the engine again"
    )


def adapter_folder() -> str:
    """Where _trt10.so and _trt11.so stand: beside the core."""
    return str(Path(_core.__file__).parent)


def tensorrt_folders() -> list[str]:
    """Where pip puts TensorRT's libraries; the packages are looked up, not imported."""
    folders = []
    for name in ("tensorrt_libs", "tensorrt_lean_libs"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folders.append(str(Path(spec.origin).parent))
    return folders
