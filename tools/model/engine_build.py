"""The calls of NVIDIA's builder: one path for TensorRT 10, TensorRT 11 and TensorRT-RTX.

`trt` is the module tensorrt or tensorrt_rtx. Networks are strongly typed: precision is a matter of the graph. DLA, on
TensorRT 10, is the exception. TensorRT itself needs a GPU even to build, and none was there while this was written: its
own lines have only been checked against the names and signatures of its Python bindings, never run. The lines that it
shares with TensorRT-RTX, whose builder needs no GPU, run in the tests.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeyolo.errors import DeviceError, EngineError, InvalidInput

from ..files import write_atomic
from .engine_graph import NetworkGraph
from .engine_options import EngineOptions, compute_capability

__all__ = ["Built", "Tensor", "build_plan", "major", "timing_cache_use"]

GIB = 1 << 30
# RTX's builder asks for a driver in passing; without one it builds all the same.
NO_DRIVER = re.compile(r"cudaError 35\b|CUDA driver version is insufficient")


@dataclass(frozen=True)
class Tensor:
    """name, shape (-1: free) and dtype ("float32", ...) of an input or output."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Built:
    """A plan and what the builder told. layers: operator of TensorRT -> dtype of its outputs -> number of layers."""

    plan: bytes = b""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    layers: dict[str, dict[str, int]] = field(default_factory=dict)
    layer_count: int = 0
    warnings: list[str] = field(default_factory=list)


def build_plan(trt: Any, graph: NetworkGraph, options: EngineOptions, workspace: int | None) -> Built:
    """workspace: bytes, or None for the builder's own limit.

    Raises EngineError with the parser's or the builder's own words, InvalidInput for options that this library does not
    have, DeviceError for a DLA core that is not there.
    """
    built = Built()
    with messages(trt) as log:
        builder = trt.Builder(log.logger)
        network, parser = parsed(trt, builder, graph, options, log)
        config = builder.create_builder_config()
        if workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
        add_profiles(builder, config, graph, options)
        if options.target == "tensorrt-rtx":
            set_compute_capabilities(trt, config, options.sm)
        else:
            set_compatibility(trt, config, options)
        if options.dla is not None:
            built.warnings += set_dla(trt, builder, config, network, options)
        cache = TimingCache(config, options.timing_cache) if timing_cache_use(options) else None
        if cache and cache.warning:
            built.warnings.append(cache.warning)
        memory = builder.build_serialized_network(network, config)
        if memory is None:
            raise EngineError(f"{library(trt)} built no engine of {graph.path.name}: {log.reason()}")
        built.plan = bytes(memory)
        built.inputs = [tensor_of(network.get_input(i)) for i in range(network.num_inputs)]
        built.outputs = [tensor_of(network.get_output(i)) for i in range(network.num_outputs)]
        built.layer_count = network.num_layers
        if options.dla is None:
            built.layers = layers_of(network)
        if cache:
            cache.save()
        built.warnings += log.warnings()
        # The parser owns the weights until the build is over, and the builder goes last: the others refer to it.
        del memory, cache, config, parser, network, builder
    if not built.plan:
        raise EngineError(f"{library(trt)} built an empty engine of {graph.path.name}")
    return built


def parsed(trt: Any, builder: Any, graph: NetworkGraph, options: EngineOptions, log: Log) -> tuple[Any, Any]:
    """The network and its parser."""
    # DLA has no strongly typed networks; 0 is what TensorRT 10 calls a weakly typed one.
    typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(0 if options.dla is not None else typed)
    parser = trt.OnnxParser(network, log.logger)
    if not parser.parse_from_file(str(graph.path)) or parser.num_errors:
        problems = [parser_error(parser.get_error(i)) for i in range(parser.num_errors)]
        raise EngineError(
            f"{library(trt)} cannot use {graph.path.name}: {'; '.join(problems) or log.reason()}. "
            "Export the model again without these operators"
        )
    if network.num_layers == 0 or network.num_outputs == 0:
        raise EngineError(f"{graph.path.name} holds no network: {library(trt)} found no layers or no outputs in it")
    return network, parser


def parser_error(error: Any) -> str:
    """One error with the node's name and operator, which its own description often leaves out ("false")."""
    text = " ".join(str(error.desc()).split())
    code = getattr(error.code(), "name", str(error.code()))
    if error.node() < 0 or not error.node_operator():
        return f"{text} ({code})"
    return f"node {error.node_name()!r} ({error.node_operator()}): {text} ({code})"


def add_profiles(builder: Any, config: Any, graph: NetworkGraph, options: EngineOptions) -> None:
    if not graph.dynamic:
        return
    for profile in options.profiles:
        smallest, best, largest = profile.shapes()
        added = builder.create_optimization_profile()
        added.set_shape(graph.input, smallest, best, largest)
        if config.add_optimization_profile(added) < 0:
            raise EngineError(f"the builder refused the profile {smallest}, {best}, {largest} for {graph.input!r}")


def set_compute_capabilities(trt: Any, config: Any, wanted: Sequence[str]) -> None:
    """RTX only. Set explicitly: what it targets otherwise is not documented."""
    known = trt.ComputeCapability.__members__
    targets = []
    for text in wanted:
        number = compute_capability(text)
        if f"SM{number}" not in known:
            raise InvalidInput(
                f"{library(trt)} builds nothing for sm_{number}; it knows "
                f"{', '.join(name.lower().replace('sm', 'sm_') for name in known if name.startswith('SM'))}"
            )
        if known[f"SM{number}"] not in targets:
            targets.append(known[f"SM{number}"])
    config.num_compute_capabilities = len(targets)
    for index, target in enumerate(targets):
        if not config.set_compute_capability(target, index):
            raise EngineError(f"{library(trt)} refused the compute capability {target.name}")


def set_compatibility(trt: Any, config: Any, options: EngineOptions) -> None:
    """TensorRT only."""
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        # A lean runtime inside the plan is code that the plan's reader would have to allow; edgeyolo opens an installed
        # one instead.
        config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)


def set_dla(trt: Any, builder: Any, config: Any, network: Any, options: EngineOptions) -> list[str]:
    """TensorRT 10 only. The ranges that calibration on real images gave stand in for an IInt8Calibrator: the builder
    takes them from the tensors, and needs no GPU buffers and no second run over the images. Returns warnings."""
    if major(trt) != 10:
        raise InvalidInput(
            f"dla={options.dla}: {library(trt)} has strongly typed networks only, which do not run on DLA; "
            "take TensorRT 10, or leave dla out"
        )
    if options.dla is None or options.dla >= builder.num_DLA_cores:
        raise DeviceError(f"dla={options.dla}: this device has {builder.num_DLA_cores} DLA cores; leave dla out")
    config.default_device_type = trt.DeviceType.DLA
    config.DLA_core = options.dla
    config.set_flag(trt.BuilderFlag.GPU_FALLBACK)  # DLA lacks some layers of every YOLO network
    config.set_flag(trt.BuilderFlag.FP16)
    if options.dla_precision != "int8":
        return []
    config.set_flag(trt.BuilderFlag.INT8)
    names, bare = set(), 0
    for tensor in tensors_of(network):
        names.add(tensor.name)
        if tensor.name not in options.dla_ranges:
            bare += 1
            continue
        bound = max(abs(value) for value in options.dla_ranges[tensor.name])
        if bound > 0 and not tensor.set_dynamic_range(-bound, bound):
            raise EngineError(f"{library(trt)} refused the range {bound:g} of the tensor {tensor.name!r}")
    if not names & options.dla_ranges.keys():
        raise InvalidInput(
            f"none of the {len(options.dla_ranges)} dla_ranges names a tensor of the network; they must come from the "
            "same graph"
        )
    return [f"{bare} of {len(names)} tensors have no range and stay in FP16"] if bare else []


def tensors_of(network: Any) -> Iterator[Any]:
    for index in range(network.num_inputs):
        yield network.get_input(index)
    for _, tensor in layer_outputs(network):
        yield tensor


def layer_outputs(network: Any) -> Iterator[tuple[Any, Any]]:
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        for output in range(layer.num_outputs):
            tensor = layer.get_output(output)
            if tensor is not None:
                yield layer, tensor


def layers_of(network: Any) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for layer, tensor in layer_outputs(network):
        counts.setdefault(layer.type.name.lower(), Counter())[dtype_name(tensor.dtype)] += 1
    return {kind: dict(sorted(found.items())) for kind, found in sorted(counts.items())}


def tensor_of(tensor: Any) -> Tensor:
    return Tensor(tensor.name, tuple(tensor.shape), dtype_name(tensor.dtype))


def dtype_name(dtype: Any) -> str:
    name = str(dtype.name).lower()
    return {"float": "float32", "half": "float16", "bf16": "bfloat16"}.get(name, name)


def major(trt: Any) -> int:
    """10 or 11; 1 is TensorRT-RTX."""
    return int(trt.__version__.split(".")[0])


def library(trt: Any) -> str:
    name = "TensorRT-RTX" if hasattr(trt, "ComputeCapability") else "TensorRT"
    return f"{name} {trt.__version__}"


def timing_cache_use(options: EngineOptions) -> bool:
    """TensorRT-RTX times nothing while it builds: its timing cache calls are there, and do nothing."""
    return options.timing_cache is not None and options.target == "tensorrt"


class TimingCache:
    """The timings of kernels on this GPU: with them a second build takes a fraction of the time."""

    def __init__(self, config: Any, path: Path | None) -> None:
        assert path is not None
        self._config, self._path = config, path
        self.warning = ""
        saved = path.read_bytes() if path.is_file() else b""
        self._cache = config.create_timing_cache(saved)
        # False: timings of another GPU or another version are not taken.
        if self._cache is None or not config.set_timing_cache(self._cache, False):
            self.warning = f"the timing cache {path.name} is of another GPU or version, or damaged: started anew"
            self._cache = config.create_timing_cache(b"")
            config.set_timing_cache(self._cache, False)

    def save(self) -> None:
        write_atomic(self._path, bytes(self._config.get_timing_cache().serialize()))


class Log:
    """What the library logs during one build. `logger` is shared by all builds: the library keeps the first one that
    it is given for as long as anything made with it lives, and ignores later ones."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self.lines: list[tuple[str, str]] = []  # severity, text

    def reason(self) -> str:
        """Every error of the build, for an exception."""
        errors = [text for severity, text in self.lines if severity in ("ERROR", "INTERNAL_ERROR")]
        telling = [text for text in errors if not NO_DRIVER.search(text)] or errors
        return "; ".join(dict.fromkeys(telling)) or (
            "it gave no reason, perhaps because another library has set its logger; try it in a new process"
        )

    def warnings(self) -> list[str]:
        """Warnings of a build that went well, and errors that did not stop it: each once, with its count."""
        texts = Counter(t for s, t in self.lines if s != "VERBOSE" and s != "INFO" and not NO_DRIVER.search(t))
        return [text if count == 1 else f"{text} ({count} times)" for text, count in texts.items()]


BUILDS = threading.Lock()


@contextmanager
def messages(trt: Any) -> Iterator[Log]:
    """One build at a time: messages carry no sign of the build that they belong to."""
    with BUILDS:
        logger = shared_logger(trt)
        log = Log(logger)
        logger.lines = log.lines
        try:
            yield log
        finally:
            logger.lines = []


@functools.cache
def shared_logger(trt: Any) -> Any:
    names: Mapping[int, str] = {int(value): name for name, value in trt.ILogger.Severity.__members__.items()}

    class Collector(trt.ILogger):  # type: ignore[misc]  # a class of the bindings
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[str, str]] = []

        # Called from the library's own threads: an exception here would end the process.
        def log(self, severity: Any, message: str) -> None:
            self.lines.append((names.get(int(severity), "ERROR"), " ".join(message.split())))

    return Collector()
