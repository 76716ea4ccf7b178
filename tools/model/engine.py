"""ONNX graph -> engine file, with TensorRT 10 or 11, or TensorRT-RTX.

The graph's precision is final: FP16 and INT8 stand in the graph as types and Q/DQ nodes. The TensorRT builder needs a
GPU and has never run where this was written; see engine_build.py for what was checked instead. TensorRT-RTX builds
without a GPU, in the tests too.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import edgeyolo
from edgeyolo import _core
from edgeyolo.engine import adapter_folder, tensorrt_folders
from edgeyolo.errors import DeviceError, EngineError, InvalidInput

from ..files import digest
from .engine_build import GIB, Built, Tensor, build_plan, major, timing_cache_use
from .engine_graph import NetworkGraph, check_profiles, read_graph
from .engine_header import OURS, complete_header, literal, update_engine, write_engine
from .engine_memory import check_host_memory, device_workspace
from .engine_options import EngineOptions, Profile, Target, compute_capability

__all__ = [
    "EngineFacts",
    "EngineOptions",
    "Profile",
    "Target",
    "build_engine",
    "check_builder",
    "runnable",
    "update_engine",
]

MODULES: dict[Target, str] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
INSTALL: dict[Target, str] = {
    "tensorrt": "pip install tensorrt (on Jetson it is part of JetPack)",
    "tensorrt-rtx": "pip install tensorrt_rtx_cu13",
}


@dataclass(frozen=True)
class EngineFacts:
    """What was built. precisions: dtype -> number of layer outputs; layers: the same for each kind of layer. Both are
    empty for DLA, where the builder chooses. plan_sha256 is of the plan alone. sm: compute capabilities it runs on,
    empty when only the GPU it was built on is known. timing_cache: whether one was used."""

    target: Target
    version: str
    plan_bytes: int
    plan_sha256: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: dict[str, dict[str, int]]
    layer_count: int
    precisions: dict[str, int]
    warnings: tuple[str, ...]
    gpu: dict[str, Any] | None
    sm: tuple[str, ...]
    timing_cache: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_engine(source: Path, out: Path, options: EngineOptions, header: Mapping[str, Any]) -> EngineFacts:
    """Builds `source` (.onnx: one input (batch, 3, height, width), one output) and writes `out`, whole or not at all.

    header: JSON values for the engine's header, in Ultralytics' keys (names, imgsz, stride, task, end2end, ...); what
    is not given is taken from the graph's metadata. Keys under "edgeyolo" are kept and ours added: versions, GPU,
    profiles, precision reached, SHA-256 of graph and plan.
    Raises EngineError for a graph that the library cannot build, with node and operator; InvalidInput for options that
    do not fit graph or library; DeviceError without a GPU where one is needed, or without the memory; ManifestError for
    a header that contradicts the graph.
    """
    graph = read_graph(source)
    gpu = gpu_facts()
    options = check_builder(options)
    if options.dla is not None and graph.quantized:
        raise InvalidInput(
            f"dla={options.dla}: {source.name} has QuantizeLinear nodes, which do not run on DLA; give the FP32 graph, "
            "and its ranges as dla_ranges"
        )
    stride = header.get("stride", literal(graph.metadata.get("stride", "None")))
    check_profiles(graph, options.profiles, stride if isinstance(stride, int) else None, dla=options.dla is not None)
    values = complete_header(header, graph, *best_input(graph, options))
    check_host_memory(source.stat().st_size)
    trt = load_library(options.target)
    workspace = None if options.workspace is None else int(options.workspace * GIB)
    if gpu is not None and options.target == "tensorrt":
        workspace = device_workspace(source.stat().st_size, workspace, gpu)
    built = build_plan(trt, graph, options, workspace)
    facts = facts_of(built, options, trt.__version__, gpu)
    if options.dla is not None:
        values["dla"] = options.dla
    values[OURS] = {**values[OURS], **record(facts, source, options, workspace)}
    write_engine(out, values, built.plan)
    return facts


def check_builder(options: EngineOptions) -> EngineOptions:
    """What a build needs besides its graph: a GPU, or the compute capabilities, which it fills in from the GPU. Raises
    DeviceError and InvalidInput."""
    if options.target == "tensorrt" and (missing := no_gpu()):
        raise DeviceError(
            "TensorRT builds on the GPU that the engine is for, and there is none here: "
            f"{missing}. Build on the device, or take target='tensorrt-rtx', whose builder needs no GPU"
        )
    return with_compute_capability(options, gpu_facts())


def runnable(target: Target) -> tuple[bool, str]:
    """Whether edgeyolo can run an engine of this target here, and why (not). Asks the driver and looks for the library;
    a tensorrt.Runtime is never made: without a driver it ends the process."""
    if target == "tensorrt-rtx":
        return False, "edgeyolo's runtime has no adapter for TensorRT-RTX"
    if missing := no_gpu():
        return False, missing
    try:
        return True, _core.find_tensorrt(tensorrt_folders(), adapter_folder())
    except EngineError as error:
        return False, str(error)


def no_gpu() -> str:
    """Why there is no GPU; empty when there is one."""
    try:
        return "" if _core.driver()["devices"] else "the driver finds no GPU"
    except DeviceError as error:
        return str(error)


def gpu_facts() -> dict[str, Any] | None:
    """GPU 0, on which TensorRT builds: name, compute_capability, integrated, memory and free in bytes, and the CUDA
    version that its driver supports."""
    if no_gpu():
        return None
    keys = ("name", "compute_capability", "integrated", "memory", "free")
    facts = _core.device(0)
    return {key: facts[key] for key in keys} | {"cuda": _core.driver()["cuda"]}


def with_compute_capability(options: EngineOptions, gpu: Mapping[str, Any] | None) -> EngineOptions:
    if options.target != "tensorrt-rtx":
        return options
    if not options.sm and gpu is None:
        raise InvalidInput(
            "a TensorRT-RTX engine is built for compute capabilities: name them with sm, such as sm=('8.9', '12.0'); "
            "there is no GPU here to ask"
        )
    wanted = options.sm or (str((gpu or {})["compute_capability"]),)
    return replace(options, sm=tuple(dict.fromkeys(compute_capability(text) for text in wanted)))


def load_library(target: Target) -> Any:
    try:
        trt = import_module(MODULES[target])
    except (ImportError, OSError) as error:
        raise EngineError(f"target={target!r} needs its Python package: {error}. {INSTALL[target]}") from None
    if target == "tensorrt" and major(trt) not in (10, 11):
        raise EngineError(f"expected TensorRT 10 or 11, found {trt.__version__}; install one of them")
    return trt


def best_input(graph: NetworkGraph, options: EngineOptions) -> tuple[tuple[int, int], int]:
    """((height, width), largest batch): of the graph where it is static, else of the first profile."""
    batch, _, height, width = graph.input_dims
    if batch and height and width:
        return (height, width), batch
    first = options.profiles[0]
    return (first.height[1], first.width[1]), max(profile.batch[2] for profile in options.profiles)


def facts_of(built: Built, options: EngineOptions, version: str, gpu: dict[str, Any] | None) -> EngineFacts:
    precisions: Counter[str] = Counter()
    for counts in built.layers.values():
        precisions.update(counts)
    return EngineFacts(
        target=options.target,
        version=version,
        plan_bytes=len(built.plan),
        plan_sha256=hashlib.sha256(built.plan).hexdigest(),
        inputs=tuple(built.inputs),
        outputs=tuple(built.outputs),
        layers=built.layers,
        layer_count=built.layer_count,
        precisions=dict(sorted(precisions.items())),
        warnings=tuple(built.warnings),
        gpu=None if gpu is None else {key: value for key, value in gpu.items() if key != "free"},
        sm=options.sm,
        timing_cache=timing_cache_use(options),
    )


def record(facts: EngineFacts, source: Path, options: EngineOptions, workspace: int | None) -> dict[str, Any]:
    """What the header says of the build, under "edgeyolo"."""
    return {
        "format": 1,
        "version": edgeyolo.__version__,
        "target": facts.target,
        "tensorrt": facts.version,
        "gpu": facts.gpu,
        "sm": list(facts.sm),
        "profiles": [asdict(profile) for profile in options.profiles],
        "dla": None if options.dla is None else {"core": options.dla, "precision": options.dla_precision},
        "hardware_compatible": options.hardware_compatible,
        "version_compatible": options.version_compatible,
        "workspace": workspace,
        "precisions": facts.precisions,
        "layers": facts.layers,
        "onnx_sha256": digest(source),
        "plan_sha256": facts.plan_sha256,
    }
