"""From an FP32 graph to FP16 or INT8, calibrated on real pictures, with a plan of what stays wider and why.

    plan = to_fp16(Path("graph.onnx"), Path("fp16.onnx"), calibration_array(images, (640, 640)))
    print(plan.table())

The decode of the head stays in FP32: it computes with pixels, and 11 bits of mantissa leave steps of half a pixel
beyond 512. Anything whose values leave the safe range of FP16 stays in FP32 as well. Never quantised are the decode,
the last convolutions, and the products of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edgeyolo.errors import InvalidInput

from ..files import replaced
from .precision_graph import (
    Ranges,
    checked_images,
    find_attention,
    find_decode,
    load_fp32,
    measure_ranges,
    tensor_types,
)
from .precision_modelopt import Method, autocast, quantise
from .precision_plan import PrecisionPlan, read_plan

__all__ = ["FP16_LIMIT", "PrecisionPlan", "to_fp16", "to_int8", "wide_nodes"]

FP16_LIMIT = 512.0  # magnitude of an activation: FP16 counts in steps of 0.5 from here on; it ends at 65504
FP16_MAX = float(np.finfo(np.float16).max)
DECODE = "box decode and scores, behind the last convolutions"
ATTENTION = "product of two activations, in attention"
LAST = "last convolutions before the decode"
ASKED = "asked for"

Rest = Literal["fp16", "fp32"]


def to_fp16(source: Path, out: Path, images: NDArray[np.float32], *, keep_fp32: Sequence[str] = ()) -> PrecisionPlan:
    """Writes `source` in FP16 to `out`; inputs and outputs stay FP32, metadata is kept.

    images: what calibration_array() made; 16 are enough for FP16. keep_fp32: names of nodes that stay in FP32, or
    patterns like "/model.10/*". Raises InvalidInput for images or names that do not fit, EngineError where the graph
    cannot be converted.
    """
    model = load_fp32(source)
    images = checked_images(model, images)
    asked = dict.fromkeys(_matching(model, keep_fp32), ASKED)
    ranges = measure_ranges(model, images)
    wide = wide_nodes(model, ranges) | dict.fromkeys(find_decode(model).nodes, DECODE) | asked
    converted = autocast(model, wide)
    plan = read_plan("fp16", model, converted, ranges, wide, {"pictures": len(images), "limit": FP16_LIMIT})
    _write(converted, out)
    return plan


def to_int8(
    source: Path,
    out: Path,
    images: NDArray[np.float32],
    *,
    rest: Rest = "fp16",
    keep: Sequence[str] = (),
    method: Method = "max",
) -> PrecisionPlan:
    """Writes `source` with INT8 Q/DQ pairs to `out`; what is not quantised is `rest`. Metadata is kept.

    images: what calibration_array() made; 64 to 512. rest: "fp16" for TensorRT; "fp32" for runtimes without FP16, such
    as ONNX Runtime on a CPU. keep: names or patterns of nodes that are not quantised. method: where an activation is
    cut off: at its "max", or where the loss of "entropy" is least (four times slower, no better on the signs).
    Raises as to_fp16() does.
    """
    if rest not in ("fp16", "fp32") or method not in ("max", "entropy"):
        raise InvalidInput(f"expected rest 'fp16' or 'fp32' and method 'max' or 'entropy', found {rest!r}, {method!r}")
    model = load_fp32(source)
    images = checked_images(model, images)
    decode = find_decode(model)
    asked = dict.fromkeys(_matching(model, keep), ASKED)
    ranges = measure_ranges(model, images)
    reasons = dict.fromkeys(find_attention(model), ATTENTION) | dict.fromkeys(decode.last, LAST)
    reasons |= dict.fromkeys(decode.nodes, DECODE) | asked
    converted = quantise(model, images, reasons, method=method)
    if rest == "fp16":
        wide = wide_nodes(converted, ranges) | dict.fromkeys(decode.nodes, DECODE)
        converted = autocast(converted, wide)
        reasons = reasons | {name: reason for name, reason in wide.items() if name not in asked}
    options = {"pictures": len(images), "rest": rest, "method": method, "limit": FP16_LIMIT}
    plan = read_plan(f"int8+{rest}", model, converted, ranges, reasons, options)
    _write(converted, out)
    return plan


def wide_nodes(model: onnx.ModelProto, ranges: Ranges, limit: float = FP16_LIMIT) -> dict[str, str]:
    """Nodes that FP16 has no room for, with the reason: a float input or output beyond `limit` on the calibration
    pictures, or a weight beyond what FP16 can hold. In a quantised graph a tensor behind Q/DQ counts as itself."""
    types = tensor_types(model)
    origin: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            origin[node.output[0]] = origin.get(node.input[0], node.input[0])
    # A weight holds its own range; constants that are nodes were measured like every other tensor.
    held: dict[str, float] = {}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name not in ranges:
            held[tensor.name] = float(np.abs(numpy_helper.to_array(tensor)).max(initial=0.0))
    wide: dict[str, str] = {}
    for node in model.graph.node:
        for name in (*node.input, *node.output):
            tensor_name = origin.get(name, name)
            low, high = ranges.get(tensor_name, (0.0, 0.0))
            reach = max(-low, high)
            if types.get(name) == TensorProto.FLOAT and reach > limit:
                wide[node.name] = f"activations reach {reach:.4g}, the limit is {limit:g}"
            elif held.get(tensor_name, 0.0) > FP16_MAX:
                wide[node.name] = f"a weight reaches {held[tensor_name]:.4g}, FP16 ends at {FP16_MAX:g}"
    return wide


def _matching(model: onnx.ModelProto, wanted: Sequence[str]) -> list[str]:
    names = [node.name for node in model.graph.node]
    found: list[str] = []
    for pattern in wanted:
        matches = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matches:
            raise InvalidInput(f"no node of the graph is called {pattern!r}; they are called {names[0]!r} and the like")
        found += matches
    return found


def _write(model: onnx.ModelProto, out: Path) -> None:
    with replaced(out) as partial:
        onnx.save(model, str(partial))
