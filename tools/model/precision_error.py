"""Where the error of a quantised graph arises: the layers to keep wider when its boxes are not good enough."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeyolo.errors import EngineError

from .precision_graph import WEIGHTED, batches, checked_images, input_shape, load_graph

__all__ = ["worst_nodes"]

TINY = 1e-12


def worst_nodes(reference: Path, quantised: Path, images: NDArray[np.float32], *, share: float = 0.15) -> list[str]:
    """Names of the convolutions and matrix products that add most error, worst first.

    Both graphs run on `images`, (N, 3, H, W) as calibration_array() makes them; a few are enough. A layer's error is
    ||quantised - reference|| / ||reference|| of its output; what it adds is that less the largest error among the
    layers it reads from, since error is passed on. share: of all such layers, at least one.
    Raises EngineError when the graphs have no such layer in common or do not run.
    """
    fp32, narrow = load_graph(reference), load_graph(quantised)
    images = checked_images(fp32, images)
    outputs = {node.name: node.output[0] for node in fp32.graph.node if node.op_type in WEIGHTED}
    there = {node.name: node.output[0] for node in narrow.graph.node if node.op_type in WEIGHTED}
    common = [name for name in outputs if name in there]
    if not common:
        raise EngineError(f"{quantised.name} and {reference.name} have no layer in common: they are not the same model")
    squared_error = dict.fromkeys(common, 0.0)
    squared_norm = dict.fromkeys(common, 0.0)
    size = input_shape(fp32)[1][0] or 1
    for batch in np.split(filled := batches(fp32, images), len(filled) // size):
        wanted = _run(fp32, {name: outputs[name] for name in common}, batch)
        found = _run(narrow, {name: there[name] for name in common}, batch)
        for name in common:
            difference = found[name].astype(np.float64) - wanted[name]
            squared_error[name] += float(np.vdot(difference, difference))
            squared_norm[name] += float(np.vdot(wanted[name].astype(np.float64), wanted[name]))
    error = {name: (squared_error[name] / max(squared_norm[name], TINY)) ** 0.5 for name in common}
    before = _layers_before(fp32, set(common))
    added = {name: error[name] - max((error[other] for other in before[name]), default=0.0) for name in common}
    ranked = sorted(common, key=lambda name: -added[name])
    return ranked[: max(1, round(share * len(common)))]


def _run(model: onnx.ModelProto, wanted: dict[str, str], batch: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    import onnxruntime

    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    known = {value.name for value in probed.graph.output}
    probed.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted.values() if name not in known)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Fused layers would have no output of their own to look at.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = onnxruntime.InferenceSession(probed.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = session.run(list(wanted.values()), {session.get_inputs()[0].name: batch})
    except Exception as error:
        raise EngineError(f"the layers cannot be compared in ONNX Runtime: {error}") from error
    return dict(zip(wanted, values, strict=True))


def _layers_before(model: onnx.ModelProto, layers: set[str]) -> dict[str, set[str]]:
    """For each layer the nearest layers that its input comes from."""
    nearest: dict[str, set[str]] = {}  # tensor -> layers
    before: dict[str, set[str]] = {}
    for node in model.graph.node:  # ONNX: in the order of execution
        reached = set().union(*(nearest.get(name, set()) for name in node.input))
        if node.name in layers:
            before[node.name] = reached
            reached = {node.name}
        for name in node.output:
            nearest[name] = reached
    return before
