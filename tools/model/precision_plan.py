"""What a converted graph computes in which precision, and why: read from the graph itself, not from the wish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import onnx
from onnx import TensorProto

from .precision_graph import WEIGHTED, Ranges, tensor_types

__all__ = ["NodePrecision", "PrecisionPlan", "read_plan"]

NAMES = {
    int(TensorProto.FLOAT): "fp32",
    int(TensorProto.FLOAT16): "fp16",
    int(TensorProto.BFLOAT16): "bf16",
    int(TensorProto.DOUBLE): "fp64",
}
ORDER = ("int8", "fp16", "bf16", "fp32", "fp64")
INSERTED = ("Cast", "QuantizeLinear", "DequantizeLinear")
LISTED = 8  # names of one reason, activation ranges


@dataclass(frozen=True)
class NodePrecision:
    """dtype: "int8", "fp16", "fp32"; "-" where no float is computed. reason: why it is wider than asked for, or ""."""

    name: str
    op: str
    dtype: str
    reason: str


@dataclass(frozen=True)
class PrecisionPlan:
    """precision: what was asked for. nodes: those of the source graph, in its order. counts: operator -> dtype ->
    nodes. ranges: tensor -> (smallest, largest) value on the calibration pictures. casts, qdq: Cast nodes that the
    conversion added, and Q/DQ pairs."""

    precision: str
    nodes: list[NodePrecision]
    counts: dict[str, dict[str, int]]
    ranges: Ranges
    casts: int
    qdq: int
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; from_dict() reads them."""
        return {**asdict(self), "ranges": {name: list(pair) for name, pair in self.ranges.items()}}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> PrecisionPlan:
        return cls(
            precision=value["precision"],
            nodes=[NodePrecision(**node) for node in value["nodes"]],
            counts={op: dict(by) for op, by in value["counts"].items()},
            ranges={name: (low, high) for name, (low, high) in value["ranges"].items()},
            casts=value["casts"],
            qdq=value["qdq"],
            options=dict(value["options"]),
        )

    def by_reason(self) -> dict[str, list[str]]:
        """Nodes wider than asked for, by why they are, most common first."""
        groups: dict[str, list[str]] = {}
        for node in self.nodes:
            if node.reason:
                groups.setdefault(f"{node.dtype}: {node.reason}", []).append(node.name)
        return dict(sorted(groups.items(), key=lambda item: -len(item[1])))

    def table(self) -> str:
        """Text to print: counts per operator, nodes that stay wider and why, the largest activations."""
        totals = Counter(node.dtype for node in self.nodes if node.dtype != "-")
        columns = [dtype for dtype in ORDER if totals[dtype]]
        wide = max(map(len, (*self.counts, "operator", "all")), default=0)
        told = f"{self.precision}: {sum(totals.values())} nodes, {self.casts} casts added, {self.qdq} Q/DQ pairs"
        lines = [told, "", f"{'operator':<{wide}}" + "".join(f"{dtype:>7}" for dtype in columns)]
        for op, by in sorted(self.counts.items(), key=lambda item: (-sum(item[1].values()), item[0])):
            lines.append(f"{op:<{wide}}" + "".join(f"{by.get(dtype, 0) or '':>7}" for dtype in columns))
        lines.append(f"{'all':<{wide}}" + "".join(f"{totals[dtype]:>7}" for dtype in columns))
        lines += ["", f"wider than {self.precision.split('+')[0]}, and why"]
        for reason, names in self.by_reason().items():
            more = f", and {len(names) - LISTED} more" if len(names) > LISTED else ""
            lines.append(f"  {len(names):>4} {reason}: {', '.join(names[:LISTED])}{more}")
        lines += ["", f"largest activations of {len(self.ranges)} tensors"]
        for name, (low, high) in sorted(self.ranges.items(), key=lambda item: -max(map(abs, item[1])))[:LISTED]:
            lines.append(f"  {low:>10.4g} .. {high:<10.4g} {name}")
        return "\n".join(lines)


def read_plan(
    precision: str,
    source: onnx.ModelProto,
    converted: onnx.ModelProto,
    ranges: Ranges,
    reasons: Mapping[str, str],
    options: Mapping[str, Any],
) -> PrecisionPlan:
    """reasons: node -> why it was meant to stay wider. A wider node without one is told as the converter's choice."""
    types = tensor_types(converted)
    producers = {name: node for node in converted.graph.node for name in node.output}
    now = {node.name: node for node in converted.graph.node}
    lowest = precision.split("+")[0]
    nodes = []
    for node in source.graph.node:
        if node.op_type in ("Constant", "Cast"):
            continue
        dtype = _reached(now[node.name], types, producers) if node.name in now else "-"
        reason = ""
        if dtype != "-" and ORDER.index(dtype) > ORDER.index(lowest):
            reason = reasons.get(node.name) or _converters_choice(node, lowest)
        nodes.append(NodePrecision(node.name, node.op_type, dtype, reason))
    counts: dict[str, dict[str, int]] = {}
    for entry in nodes:
        if entry.dtype != "-":
            by = counts.setdefault(entry.op, {})
            by[entry.dtype] = by.get(entry.dtype, 0) + 1
    before, after = (Counter(node.op_type for node in model.graph.node) for model in (source, converted))
    casts, qdq = (after[op] - before[op] for op in INSERTED[:2])
    return PrecisionPlan(precision, nodes, counts, dict(ranges), casts, qdq, dict(options))


def _converters_choice(node: onnx.NodeProto, lowest: str) -> str:
    if lowest != "int8":
        return f"{node.op_type} has no FP16 form in this opset"
    if node.op_type in WEIGHTED:
        return "left by the converter: too few channels, or a product with a single row"
    return "only weighted layers, and sums and pooling beside them, are quantised"


def _reached(node: onnx.NodeProto, types: Mapping[str, int], producers: Mapping[str, onnx.NodeProto]) -> str:
    """int8 where every float input of the node comes out of a DequantizeLinear, else the type that it computes in."""
    floats = [name for name in node.input if types.get(name) in NAMES and node.op_type not in ("Shape", "Size")]
    if not floats:
        floats = [name for name in node.output if types.get(name) in NAMES]
        return NAMES[types[floats[0]]] if floats else "-"
    # A bias stays as it is: the product is added up in 32 bits.
    data = floats[:2] if node.op_type in ("Conv", "ConvTranspose", "Gemm") else floats
    if all(name in producers and producers[name].op_type == "DequantizeLinear" for name in data):
        return "int8"
    return NAMES[types[floats[0]]]
