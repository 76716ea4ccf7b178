"""One slot of the ONNX Runtime backend: a session, its stream and memory, and when it runs as a CUDA graph.

| model | path |
| --- | --- |
| fixed input shape | a graph, captured while loading |
| dynamic batch | a graph for each number of images, captured at its third use, at most 8: none can be dropped |
| an output as long as the image decides | no graph; the few rows come to the host and are finished there |
| a network that is not wholly on the GPU, or a capture that fails or does not repeat the eager run | no graph |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .backend import Color, Found, Milliseconds, RunOptions
from .errors import DeviceError, EdgeYoloError, EngineError
from .onnx_network import EAGER, OnnxNetwork, OnnxTensors

__all__ = ["NetworkPlan", "NetworkSlot"]

MAX_GRAPHS = 8
CAPTURED_AT_USE = 3  # of one number of images, where that number is free
TRIES = 3  # of a capture: an allocation in another thread of the process can spoil one
POISON = 0xEE
CLOSED = "this detector was closed: load the model again"


@dataclass(frozen=True)
class NetworkPlan:
    """What all slots of a detector share. batch: images per run, None for any number. no_graph: why none is tried."""

    path: Path
    tensors: OnnxTensors
    device: int
    batch: int | None
    tf32: bool
    no_graph: str = ""
    network: type[OnnxNetwork] = OnnxNetwork


@dataclass
class Shape:
    """One number of images per run: its binding, and its graph where there is one."""

    places: int
    binding: Any
    input: _core.GpuMemory
    output: _core.GpuMemory | None
    uses: int = 0
    graph: int = EAGER
    given_up: bool = False


@dataclass
class Counts:
    captures: int = 0
    failed_tries: int = 0
    replays: int = 0
    enqueued: int = 0
    fallbacks: int = 0
    capture_ms: float = 0.0
    device_bytes: int = 0
    reasons: list[str] = field(default_factory=list)


class NetworkSlot:
    """For one batch of images at a time. open(), prepare(), finish() and close() in the slot's own thread."""

    def __init__(self, plan: NetworkPlan, options: RunOptions, most: int, *, warn: Callable[[str], None]) -> None:
        self._plan, self._options, self._most, self._warn = plan, options, most, warn
        self._shapes: dict[int, Shape] = {}
        self._memory: dict[int, tuple[_core.GpuMemory, _core.GpuMemory | None]] = {}
        self._halves: _core.Halves | None = None
        self._network: OnnxNetwork | None = None
        self._counts = Counts(reasons=[plan.no_graph] if plan.no_graph else [])
        self._graphs_wanted = not plan.no_graph
        self._failures = 0  # of the capture that is due
        self._thread = contextlib.ExitStack()  # what the slot's thread is under
        self._numbers_given = 0  # to graphs; 0 itself is ONNX Runtime's default
        self.providers: list[str] = []

    def open(self) -> None:
        """Builds the session; runs a model of a fixed batch once, and captures it."""
        self._thread.enter_context(_core.CurrentDevice(self._plan.device))
        self.prepare(self._plan.batch or 1)

    def needs_preparation(self, places: int) -> bool:
        """Whether prepare() is due before a run with so many images."""
        shape = self._shapes.get(places)
        return shape is None or self._due(shape)

    def prepare(self, places: int) -> None:
        """Memory and first run for a new number of images, and the capture when it is time. No image is in work. After
        an error the session is gone, or the shape unknown: the next call makes them again."""
        if self._network is None:
            self._build()
        shape = self._shapes.get(places)
        if shape is None:
            shape = self._bind(places)
        while self._due(shape):
            if self._capture(shape):
                break
            shape = self._shapes[places]

    def begin(self, images: Sequence[Any], color: Color, places: int) -> list[tuple[int, int]]:
        """Puts the images into the network's input, in the caller's thread. Returns their sizes, (width, height)."""
        return self._open_halves().begin(list(images), color, self._shapes[places].input.address, places)

    def finish(self, places: int, sizes: Sequence[tuple[int, int]], started: float | None) -> list[Found]:
        """Runs the network on what begin() brought, and fetches the results. started: when its call began, for
        timings."""
        halves, shape, clock = self._open_halves(), self._shapes[places], time.perf_counter
        marks = []
        try:
            if started is not None:
                halves.wait()
                marks.append(clock())
            self._run(shape)
            if started is not None:
                marks.append(clock())
            if shape.output is not None:
                results = halves.finish(shape.output.address)
            else:
                results = self._finish_on_host(shape, sizes)
                halves.release()
        except EdgeYoloError:
            with contextlib.suppress(DeviceError):  # the first error is the one to tell
                halves.release()
            raise
        timings: Milliseconds | None = None
        if started is not None:
            read, ran = marks
            end = clock()
            timings = {
                "letterbox": (read - started) * 1e3,  # with the upload
                "network": (ran - read) * 1e3,
                "postprocess": (end - ran) * 1e3,
                "total": (end - started) * 1e3,
            }
        return [Found(*arrays, size, timings) for arrays, size in zip(results, sizes, strict=True)]

    def close(self) -> None:
        """Again: nothing."""
        self._drop()
        self._thread.close()

    def graph_facts(self) -> dict[str, Any]:
        """The same keys as of a TensorRT engine's graphs."""
        counts = self._counts
        return {
            "path": "graph" if self._graphs_wanted else "eager",
            "reason": "; ".join(counts.reasons),
            "captures": counts.captures,
            "failed_tries": counts.failed_tries,
            "replays": counts.replays,
            "enqueued": counts.enqueued,
            "executed": 0,
            "fallbacks": counts.fallbacks,
            "graphs": self._graphs_held(),
            "capture_ms": counts.capture_ms,
            "device_bytes": counts.device_bytes,
        }

    @property
    def device_bytes(self) -> int:
        """Of the network's input and output."""
        return sum(memory.bytes for pair in list(self._memory.values()) for memory in pair if memory is not None)

    def _run(self, shape: Shape) -> None:
        self._open_network().run(shape.binding, shape.graph)
        shape.uses += 1
        if shape.graph == EAGER:
            self._counts.enqueued += 1
        else:
            self._counts.replays += 1

    def _finish_on_host(self, shape: Shape, sizes: Sequence[tuple[int, int]]) -> list[Any]:
        head, (height, width) = self._options.head, self._options.imgsz
        options = self._options
        post = _core.Postprocessor(
            **options.thresholds(),
        )
        outputs = self._open_network().output(shape.binding)
        return [
            post.run(rows, head.kind, options.classes, _core.Letterbox(size, (width, height)))
            for rows, size in zip(outputs, sizes, strict=False)
        ]

    def _due(self, shape: Shape) -> bool:
        """Whether a shape is to be captured now."""
        if not self._graphs_wanted or shape.graph != EAGER or shape.given_up:
            return False
        if self._plan.batch is not None:
            return True
        return shape.uses + 1 >= CAPTURED_AT_USE and self._graphs_held() < MAX_GRAPHS

    def _graphs_held(self) -> int:
        return sum(shape.graph != EAGER for shape in list(self._shapes.values()))

    def _build(self) -> None:
        """A stream and a session on it, or neither."""
        try:
            self._build_parts()
        except BaseException:
            self._drop()
            raise

    def _build_parts(self) -> None:
        plan, options = self._plan, self._options
        self._halves = _core.Halves(
            plan.device,
            imgsz=options.imgsz,
            batch=self._most,
            input=plan.tensors.input_dtype.name,
            output=plan.tensors.output_dtype.name,
            head=options.head.kind,
            # The anchors are the columns of a raw head. Without fixed rows finish() is not called.
            rows=plan.tensors.columns if options.head.kind == "raw" else plan.tensors.rows or 1,
            classes=options.classes,
            **options.thresholds(),
        )
        stream = self._halves.stream
        with _core.CaptureLock():
            try:
                self._network = self._make_network(stream, self._graphs_wanted)
            except DeviceError as error:
                if not self._graphs_wanted:
                    raise
                # ONNX Runtime refuses a network that is not wholly on the GPU; or it fails without a graph as well.
                self._network = self._make_network(stream, False)
                self._give_up(str(error))
        self.providers = self._network.providers

    def _make_network(self, stream: int, graph: bool) -> OnnxNetwork:
        plan = self._plan
        return plan.network(plan.path, plan.tensors, device=plan.device, stream=stream, graph=graph, tf32=plan.tf32)

    def _bind(self, places: int) -> Shape:
        """Memory for so many images, and the first run with it, for which ONNX Runtime allocates."""
        network, (height, width) = self._open_network(), self._options.imgsz
        inputs, outputs = self._memory_for(places)
        address = None if outputs is None else outputs.address
        shape = Shape(places, network.bind((places, 3, height, width), inputs.address, address), inputs, outputs)
        with _core.CaptureLock():
            network.run(shape.binding)
        self._shapes[places] = shape
        return shape

    def _memory_for(self, places: int) -> tuple[_core.GpuMemory, _core.GpuMemory | None]:
        """One pair for all numbers of images up to a power of two: a graph keeps its addresses, so none can grow."""
        room = places if self._plan.batch is not None else min(self._most, 1 << (places - 1).bit_length())
        if room not in self._memory:
            tensors, (height, width) = self._plan.tensors, self._options.imgsz
            inputs = _core.GpuMemory(self._plan.device, room * 3 * height * width * tensors.input_dtype.itemsize)
            outputs = None
            if tensors.rows is not None:
                bytes_each = tensors.rows * tensors.columns * tensors.output_dtype.itemsize
                outputs = _core.GpuMemory(self._plan.device, room * bytes_each)
            self._memory[room] = (inputs, outputs)
        return self._memory[room]

    def _capture(self, shape: Shape) -> bool:
        """Whether the shape is settled: captured, or given up. Otherwise the slot was built anew: try again."""
        counts = self._counts
        self._numbers_given += 1
        graph = self._numbers_given
        try:
            with _core.CaptureLock():
                begun, free = time.perf_counter(), _core.device(self._plan.device)["free"]
                self._open_network().run(shape.binding, graph)
                milliseconds = (time.perf_counter() - begun) * 1e3
                taken = max(0, free - _core.device(self._plan.device)["free"])
                differing = self._self_check(shape, graph)
        except EdgeYoloError as error:
            self._start_over(error)
            return False
        self._failures = 0
        if differing:
            shape.given_up = True
            self._give_up(differing)
            return True
        shape.graph = graph
        counts.captures += 1
        counts.capture_ms += milliseconds
        counts.device_bytes += taken
        return True

    def _start_over(self, error: EdgeYoloError) -> None:
        """After a capture that failed: it leaves stream and session in a state that only new ones are free of."""
        self._counts.failed_tries += 1
        self._failures += 1
        if self._failures >= TRIES:
            self._give_up(f"the capture failed {self._failures} times: {error}")
        with contextlib.suppress(DeviceError):
            self._open_halves().release()  # a stream must not end while it captures
        uses = {places: known.uses for places, known in self._shapes.items()}
        self._drop()
        self._build()
        for places, count in uses.items():
            self._bind(places).uses = count

    def _self_check(self, shape: Shape, graph: int) -> str:
        """Why the graph is not to be trusted; empty when it repeats eager runs, bit for bit."""
        rng, (height, width) = np.random.default_rng(0), self._options.imgsz
        for _ in range(2):
            images = [rng.integers(0, 256, (height, width, 3), np.uint8) for _ in range(shape.places)]
            first, second, replayed = (self._raw_output(shape, images, run) for run in (EAGER, EAGER, graph))
            if np.array_equal(first, second):
                if not np.array_equal(first, replayed):
                    return "the graph's results differ from the network's"
                continue
            # Two eager runs span what this network varies by; a replay of something else is far outside of it.
            values = [self._numbers(raw) for raw in (first, second, replayed)]
            spread = distance(values[0], values[1])
            if not min(distance(values[0], values[2]), distance(values[1], values[2])) <= 8 * spread < np.inf:
                return "two runs of the network differ, and the graph's results differ by more"
            note = f"nondeterministic network: two runs differ by up to {spread:.3g}"
            if note not in self._counts.reasons:
                self._counts.reasons.append(note)
        return ""

    def _raw_output(self, shape: Shape, images: list[NDArray[np.uint8]], graph: int) -> NDArray[np.uint8]:
        """The bytes that the network leaves for these images. The output is overwritten first: stale ones show."""
        halves, output, tensors = self._open_halves(), shape.output, self._plan.tensors
        assert output is not None and tensors.rows is not None  # data-dependent outputs are not captured
        output.fill(POISON)
        halves.begin(images, "bgr", shape.input.address, shape.places)
        halves.wait()
        self._open_network().run(shape.binding, graph)
        halves.release()
        return output.read(shape.places * tensors.rows * tensors.columns * tensors.output_dtype.itemsize)

    def _numbers(self, raw: NDArray[np.uint8]) -> NDArray[np.float64]:
        return raw.view(self._plan.tensors.output_dtype).astype(np.float64)

    def _give_up(self, reason: str) -> None:
        self._graphs_wanted = False
        self._counts.fallbacks += 1
        self._counts.reasons.append(reason)
        self._warn(f"{self._plan.path.name} runs without a CUDA graph: {reason}")

    def _drop(self) -> None:
        """Frees everything. The session goes first: its graphs have the memory's addresses."""
        self._shapes.clear()
        network, self._network = self._network, None
        if network is not None:
            with _core.CaptureLock():
                network.close()
        halves, self._halves = self._halves, None
        if halves is not None:
            halves.close()
        memory, self._memory = self._memory, {}
        for pair in memory.values():
            for part in pair:
                if part is not None:
                    part.close()
        self._counts.device_bytes = 0

    def _open_halves(self) -> _core.Halves:
        if self._halves is None:
            raise EngineError(CLOSED)
        return self._halves

    def _open_network(self) -> OnnxNetwork:
        if self._network is None:
            raise EngineError(CLOSED)
        return self._network


def distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Largest difference; infinite where only one of two is a number."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.where(same, 0.0, np.where(np.isnan(difference), np.inf, difference)).max(initial=0.0))
