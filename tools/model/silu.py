"""The third step of the export, for TensorRT only: SiLU as x * (0.5 * tanh(0.5 x) + 0.5).

It is the same function, and TensorRT fuses it into the convolution before it. Where a SiLU's output is added to what it
was computed from, the fused kernel of TensorRT 10 and 11 reads the shortcut wrongly when that is a part of a tensor
concatenated later (NVIDIA/TensorRT issue 4854): boxes are ruined while class scores stay right. So those stay as they
are. A SiLU whose output *is* the shortcut is no such case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgeyolo.errors import EngineError

from ..files import replaced
from .graph import all_nodes, read_onnx, reduced_precision

__all__ = ["SiluPlan", "fuse_silu", "plan_silu"]


@dataclass(frozen=True)
class SiluPlan:
    """fused: SiLUs that become tanh; kept: those that stay, with the reason. Each is named by its Mul node, or by that
    node's output where the node has no name. In the order of the graph."""

    fused: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Silu:
    """y = x * sigmoid(x)."""

    name: str
    x: str
    y: str
    sigmoid: onnx.NodeProto
    mul: onnx.NodeProto


class Flow:
    """Which node makes each tensor of a graph, and which nodes read it."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.maker = {tensor: node for node in graph.node for tensor in node.output if tensor}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in all_nodes(graph):  # a branch or loop reads tensors of the graph around it
            for tensor in set(node.input):
                self.readers[tensor].append(node)
        self.results = {value.name for value in graph.output}

    def is_ancestor(self, tensor: str, of: str) -> bool:
        """Whether `of` was computed from `tensor`."""
        seen: set[str] = set()
        ahead = [of]
        while ahead:
            node = self.maker.get(ahead.pop())
            for before in () if node is None else node.input:
                if before == tensor:
                    return True
                if before and before not in seen:
                    seen.add(before)
                    ahead.append(before)
        return False


def plan_silu(model: onnx.ModelProto) -> SiluPlan:
    """Which SiLUs of an FP32 graph become tanh. Raises EngineError for a graph whose precision was lowered already."""
    _, plan = _plan(model)
    return plan


def fuse_silu(source: Path, out: Path) -> SiluPlan:
    """Writes `out`: `source` with the tanh form where plan_silu() says so. Names of other nodes and tensors stay.

    Raises EngineError for a file that is no valid ONNX or whose precision was lowered already.
    """
    model = read_onnx(source)
    silus, plan = _plan(model)
    graph = model.graph
    fused = set(plan.fused)
    chosen = [silu for silu in silus if silu.name in fused]
    half = _unused("silu_half", [*(tensor.name for tensor in graph.initializer), *_tensor_names(graph)])
    replacement = {silu.y: _tanh_form(silu, half) for silu in chosen}
    gone = {silu.sigmoid.output[0] for silu in chosen}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.output[0] in replacement:
            nodes += replacement[node.output[0]]
        elif not (node.op_type == "Sigmoid" and node.output[0] in gone):
            nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    described = [value for value in graph.value_info if value.name not in gone]
    if chosen:
        graph.initializer.append(numpy_helper.from_array(np.array(0.5, np.float32), half))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.value_info.extend(described)
    onnx.checker.check_model(model)
    with replaced(out) as partial:
        partial.write_bytes(model.SerializeToString(deterministic=True))
    return plan


def _plan(model: onnx.ModelProto) -> tuple[list[Silu], SiluPlan]:
    narrow = reduced_precision(model)
    if narrow is not None:
        raise EngineError(
            f"the graph is {narrow}: SiLUs are rewritten in the FP32 graph, before its precision is lowered"
        )
    flow = Flow(model.graph)
    silus = _find(model.graph, flow)
    reasons = [(silu.name, _reason_to_keep(silu, flow)) for silu in silus]
    return silus, SiluPlan(
        fused=tuple(name for name, reason in reasons if reason is None),
        kept=tuple((name, reason) for name, reason in reasons if reason is not None),
    )


def _find(graph: onnx.GraphProto, flow: Flow) -> list[Silu]:
    found = []
    for node in graph.node:
        if node.op_type != "Mul" or len(node.input) != 2:
            continue
        for x, gate in (tuple(node.input), tuple(reversed(node.input))):
            maker = flow.maker.get(gate)
            if maker is not None and maker.op_type == "Sigmoid" and maker.input[0] == x:
                found.append(Silu(node.name or node.output[0], x, node.output[0], maker, node))
                break
    return found


def _reason_to_keep(silu: Silu, flow: Flow) -> str | None:
    sigmoid = silu.sigmoid.output[0]
    if len(flow.readers[sigmoid]) > 1 or sigmoid in flow.results:
        return "its sigmoid is used elsewhere"
    for node in flow.readers[silu.y]:
        if node.op_type != "Add":
            continue
        for other in node.input:
            if other != silu.y and flow.is_ancestor(other, silu.y):
                return f"residual: {node.name or node.output[0]} adds {other}, which it was computed from"
    return None


def _tanh_form(silu: Silu, half: str) -> list[onnx.NodeProto]:
    """Four new nodes and the last Mul, which keeps its name. Tensors are named after the output, which is unique."""
    scaled, bent, halved, gate = (f"{silu.y}/{part}" for part in ("scaled", "tanh", "halved", "gate"))
    return [
        helper.make_node("Mul", [silu.x, half], [scaled], f"{silu.name}/scaled"),
        helper.make_node("Tanh", [scaled], [bent], f"{silu.name}/tanh"),
        helper.make_node("Mul", [bent, half], [halved], f"{silu.name}/halved"),
        helper.make_node("Add", [halved, half], [gate], f"{silu.name}/gate"),
        helper.make_node("Mul", [silu.x, gate], [silu.y], silu.mul.name),
    ]


def _tensor_names(graph: onnx.GraphProto) -> Iterable[str]:
    for node in all_nodes(graph):
        yield from (*node.input, *node.output)
    for value in (*graph.input, *graph.output):
        yield value.name


def _unused(name: str, taken: Iterable[str]) -> str:
    used = set(taken)
    number = 0
    while (candidate := f"{name}_{number}" if number else name) in used:
        number += 1
    return candidate
