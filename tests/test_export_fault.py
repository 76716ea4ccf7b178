"""A graph broken on purpose, as a compiler once broke it: scores keep every bit, boxes move. What the gate is for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from edgeyolo.tools.labels import find_labels
from edgeyolo.tools.model.verify import LOW_CONF, verify
from numpy.typing import NDArray

import edgeyolo
from edgeyolo import Detections

cv2 = pytest.importorskip("cv2")
SIGNS = Path(__file__).resolve().parents[1] / "assets" / "signs.onnx"


def break_residual_add(model: onnx.ModelProto, strides: tuple[int, ...] = (0, 1, 2)) -> onnx.ModelProto:
    """The fault of a miscompiled residual add, in front of the box branch of each stride.

    The box branch gets its own copy of what lies between the last residual Add of the neck and its first convolution;
    in the copy, Add(shortcut, y) reads y twice. The class branch reads the original, so its scores keep every bit.
    """
    model = copy.deepcopy(model)
    producers = {name: node for node in model.graph.node for name in node.output}

    def behind_add(name: str) -> list[onnx.NodeProto]:
        """Nodes from the nearest residual Add up to this tensor, in order; nothing where no Add lies behind it."""
        node = producers.get(name)
        if node is None or node.op_type == "Split":
            return []
        if node.op_type == "Add":
            return [node]
        nodes = [n for source in node.input for n in behind_add(source)]
        unique = [n for k, n in enumerate(nodes) if all(n is not m for m in nodes[:k])]
        return [*unique, node] if unique else []

    nodes = list(model.graph.node)
    for stride in strides:
        first = next(node for node in nodes if node.name == f"/model.23/cv2.{stride}/cv2.{stride}.0/conv/Conv")
        copies, renamed = [], {}
        for node in behind_add(first.input[0]):
            twin = copy.deepcopy(node)
            twin.name += f"/box{stride}"
            inputs = [renamed.get(name, name) for name in node.input]
            if node.op_type == "Add":
                inputs[0] = inputs[1]
            for name in node.output:
                renamed[name] = f"{name}/box{stride}"
            twin.input[:] = inputs
            twin.output[:] = [renamed[name] for name in node.output]
            copies.append(twin)
        assert sum(node.op_type == "Add" for node in copies) == 1
        first.input[0] = renamed[first.input[0]]
        at = nodes.index(first)
        nodes[at:at] = copies
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    return model


@pytest.fixture(scope="module")
def sign_pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Held-out photographs with signs, and their labels."""
    from edgeyolo.examples.signs import dataset

    data = dataset.write(tmp_path_factory.mktemp("signs") / "data", train=1, val=16, seed=5).parent
    return sorted((data / "images" / "val").iterdir())


def raw_output(model: Path, image: NDArray[np.uint8]) -> NDArray[np.float32]:
    import onnxruntime

    from edgeyolo import _core

    planes = np.empty((1, 3, 640, 640), np.float32)
    _core.LetterboxPool().run(image, planes[0])
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"images": planes})[0][0])


def remembering(detector: edgeyolo.Detector) -> Callable[[NDArray[np.uint8]], Detections]:
    """The same answers, computed once."""
    known: dict[bytes, Detections] = {}

    def detect(image: NDArray[np.uint8]) -> Detections:
        key = image.tobytes()
        if key not in known:
            known[key] = detector(image)
        return known[key]

    return detect


@pytest.mark.slow
@pytest.mark.parametrize("strides", [(0, 1, 2), (1,)], ids=["all strides", "stride 16"])
def test_a_graph_with_a_broken_residual_add_is_caught_where_scores_see_nothing(
    sign_pictures: list[Path], tmp_path: Path, strides: tuple[int, ...]
) -> None:
    broken = tmp_path / "broken.onnx"
    onnx.save(break_residual_add(onnx.load(SIGNS), strides), broken)

    # A comparison of scores, as parity tests make it, passes: every score of every anchor keeps all its bits.
    largest = 0.0
    for path in sign_pictures[:5]:
        image = cv2.imread(str(path))
        good, bad = raw_output(SIGNS, image), raw_output(broken, image)
        np.testing.assert_array_equal(good[4:], bad[4:])
        seen = good[4:].max(axis=0) > 0.25
        largest = max(largest, float(np.abs(good[:4] - bad[:4])[:, seen].max(initial=0)))
    assert largest > 1  # pixels

    labels = find_labels(sign_pictures)
    with edgeyolo.load(SIGNS, conf=LOW_CONF) as first, edgeyolo.load(broken, conf=LOW_CONF) as second:
        reference, candidate = remembering(first), remembering(second)
        for precision in ("fp32", "fp16", "int8"):
            done = verify(
                reference, candidate, sign_pictures, precision=precision, statement="engine verified", labels=labels
            )
            assert not done.passed, precision
            assert "the scores agree while the boxes do not" in done.failures[0]
            assert any(text.startswith("boxes, ") for text in done.failures)
            assert done.metrics["scores"]["p95"] < 1e-4
        again = verify(reference, reference, sign_pictures, precision="fp32", statement="engine verified")
        assert again.passed and again.metrics["boxes"]["all"]["max_px"] == 0
