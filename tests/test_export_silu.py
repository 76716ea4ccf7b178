"""The tanh form of SiLU: which ones stay, by the network's own layers; what it computes, on photographs.

Residuals are counted here from the torch modules and in plan_silu() from the graph: the two share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import ultralytics
from edgeyolo.tools.model.graph import inspect_onnx
from edgeyolo.tools.model.onnx import GraphOptions, export_onnx
from edgeyolo.tools.model.silu import SiluPlan, fuse_silu, plan_silu
from edgeyolo.tools.model.weights import open_weights
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgeyolo import _core
from edgeyolo.errors import EngineError
from export_checkpoints import ASSETS, enliven, network, save

PHOTOS = [Path(ultralytics.__file__).parent / "assets" / name for name in ("bus.jpg", "zidane.jpg")]
BOX_BOUND = 2e-4  # pixels
SCORE_BOUND = 1e-5

# Network: SiLUs of one exported head, kept by the rule, kept by the naive rule "feeds any Add".
COUNTS = {
    "yolo26n": (87, 14, 20),
    "yolo26s": (87, 14, 20),
    "yolo26m": (97, 16, 24),
    "yolo11n": (77, 11, 14),
    "yolov8n": (57, 6, 6),
    "yolov10n": (69, 7, 7),
}
# Residuals that are no Bottleneck: the shortcut around SPPF, the block of YOLOv10's last stage.
OTHER_RESIDUALS = {
    "yolo26n": {"model.9.cv2"},
    "yolo26s": {"model.9.cv2"},
    "yolo26m": {"model.9.cv2"},
    "yolov10n": {"model.22.m.0.cv1.4"},
}
Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """An untrained network of its real width at 640 x 640 as ONNX, once for each head."""
    made: dict[tuple[str, str], Path] = {}

    def export(name: str, head: str = "raw") -> Path:
        if (name, head) not in made:
            folder = tmp_path_factory.mktemp(name)
            model = enliven(network(f"{name}.yaml", tiny=False), torch.from_numpy(np.concatenate(photos(640))))
            weights = open_weights(save(folder / "a.pt", model=model))
            options = GraphOptions((640, 640), head=head)  # type: ignore[arg-type]
            export_onnx(weights, folder / "graph.onnx", options)
            made[name, head] = folder / "graph.onnx"
        return made[name, head]

    return export


def run(path: Path, images: NDArray[np.float32]) -> NDArray[np.float32]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: images})
    return np.asarray(output)


def photos(side: int) -> list[NDArray[np.float32]]:
    made = []
    for path in PHOTOS:
        made.append(np.zeros((1, 3, side, side), np.float32))
        _core.LetterboxPool().run(cv2.imread(str(path)), made[-1][0], "bgr")
    return made


def naive(model: onnx.ModelProto) -> set[str]:
    """What a simpler rule keeps: every SiLU that feeds an Add."""
    added = {tensor for node in model.graph.node if node.op_type == "Add" for tensor in node.input}
    plan = plan_silu(model)
    names = {*plan.fused, *(name for name, _ in plan.kept)}
    return {node.name for node in model.graph.node if node.name in names and node.output[0] in added}


def residuals(name: str) -> set[str]:
    """Mul nodes of the SiLUs that end a residual branch, from the torch modules."""
    from ultralytics.nn.modules import Bottleneck

    model = network(f"{name}.yaml", tiny=False)
    found = {f"{path}.cv2" for path, layer in model.named_modules() if isinstance(layer, Bottleneck) and layer.add}
    return found | OTHER_RESIDUALS.get(name, set())


def module_path(node: str) -> str:
    """model.2.m.0.cv2 for /model.2/m/m.0/cv2/act/Mul: the name of a Sequential is repeated in those of its layers."""
    path: list[str] = []
    for part in node.removeprefix("/").removesuffix("/act/Mul").split("/"):
        if path and part.startswith(f"{path[-1]}."):
            path.pop()
        path.append(part)
    return ".".join(path)


class TestNetworks:
    @pytest.mark.parametrize("name", COUNTS)
    def test_counts(self, exported: Exported, name: str) -> None:
        silus, kept, _ = COUNTS[name]
        plan = plan_silu(onnx.load(exported(name)))
        assert (len(plan.fused) + len(plan.kept), len(plan.kept)) == (silus, kept)
        assert all(reason.startswith("residual: ") for _, reason in plan.kept)

    @pytest.mark.parametrize("name", COUNTS)
    def test_kept_are_the_ends_of_residual_branches(self, exported: Exported, name: str) -> None:
        kept = [node for node, _ in plan_silu(onnx.load(exported(name))).kept]
        assert {module_path(node) for node in kept} == residuals(name)

    @pytest.mark.parametrize("name", COUNTS)
    def test_the_naive_rule_keeps_others(self, exported: Exported, name: str) -> None:
        """It keeps the producers of shortcuts too, so a rule that has become naive is seen."""
        model = onnx.load(exported(name))
        kept = {node for node, _ in plan_silu(model).kept}
        assert len(naive(model)) == COUNTS[name][2]
        assert naive(model) >= kept
        assert (naive(model) == kept) == (name in ("yolov8n", "yolov10n"))

    @pytest.mark.parametrize("name", COUNTS)
    def test_numerics(self, exported: Exported, name: str, tmp_path: Path) -> None:
        path = exported(name)
        plan = fuse_silu(path, tmp_path / "tanh.onnx")
        assert plan == plan_silu(onnx.load(path))
        for images in photos(640):
            expected = run(path, images)[0]
            difference = np.abs(expected - run(tmp_path / "tanh.onnx", images)[0])
            fine = expected[:, :6400]  # of the finest level
            assert fine[2].std() > 0.04 and fine[4:].max(axis=0).std() > 0.003  # else nothing is compared
            assert 0 < difference[:4].max() <= BOX_BOUND
            assert 0 < difference[4:].max() <= SCORE_BOUND

    def test_a_wrong_factor_is_seen(self, exported: Exported, tmp_path: Path) -> None:
        fuse_silu(exported("yolo11n"), tmp_path / "tanh.onnx")
        model = onnx.load(tmp_path / "tanh.onnx")
        half = next(tensor for tensor in model.graph.initializer if tensor.name == "silu_half")
        half.CopyFrom(numpy_helper.from_array(np.array(0.5005, np.float32), half.name))
        onnx.save(model, tmp_path / "wrong.onnx")
        images = photos(640)[1]
        difference = np.abs(run(exported("yolo11n"), images) - run(tmp_path / "wrong.onnx", images))[0]
        assert difference[:4].max() > BOX_BOUND and difference[4:].max() > SCORE_BOUND

    @pytest.mark.parametrize("name", ["yolo26n", "yolov10n"])
    def test_end2end(self, exported: Exported, name: str, tmp_path: Path) -> None:
        path = exported(name, "end2end")
        plan = fuse_silu(path, tmp_path / "tanh.onnx")
        assert (len(plan.fused) + len(plan.kept), len(plan.kept)) == COUNTS[name][:2]
        for images in photos(640):
            assert same_rows(run(path, images)[0], run(tmp_path / "tanh.onnx", images)[0])

    def test_a_dynamic_graph(self, tmp_path: Path) -> None:
        weights = open_weights(ASSETS / "signs.pt")
        graph = export_onnx(weights, tmp_path / "a.onnx", GraphOptions((64, 64), (1, 2), dynamic=True))
        plan = fuse_silu(tmp_path / "a.onnx", tmp_path / "tanh.onnx")
        assert (len(plan.fused), len(plan.kept)) == (60, 11)
        assert inspect_onnx(tmp_path / "tanh.onnx") == graph
        images = np.random.default_rng(0).random((2, 3, 96, 160), np.float32)
        np.testing.assert_allclose(
            run(tmp_path / "tanh.onnx", images), run(tmp_path / "a.onnx", images), rtol=0, atol=BOX_BOUND
        )


def same_rows(expected: NDArray[np.float32], found: NDArray[np.float32]) -> bool:
    """Whether two end2end outputs hold the same rows. Rows of equal score come in any order; the last may be others."""
    if np.abs(np.sort(expected[:, 4]) - np.sort(found[:, 4])).max() > SCORE_BOUND:
        return False
    certain = expected[expected[:, 4] > expected[:, 4].min() + 2 * SCORE_BOUND]
    free = np.ones(len(found), bool)
    for row in certain:
        fits = free & (found[:, 5] == row[5]) & (np.abs(found[:, 4] - row[4]) <= SCORE_BOUND)
        fits &= np.abs(found[:, :4] - row[:4]).max(axis=1) <= BOX_BOUND
        if not fits.any():
            return False
        free[np.flatnonzero(fits)[0]] = False
    return len(certain) > 0


def test_same_rows_sees_what_it_should() -> None:
    rows = np.zeros((4, 6), np.float32)
    rows[:, 4] = [0.9, 0.5, 0.5, 0.1]
    rows[:, 0] = [1, 2, 3, 4]
    assert same_rows(rows, rows[[0, 2, 1, 3]])
    for row, column, change in ((1, 0, 0.01), (1, 4, 0.01), (0, 5, 1)):
        other = rows.copy()
        other[row, column] += change
        assert not same_rows(rows, other)


def graph_of(
    nodes: list[onnx.NodeProto], outputs: list[str], path: Path | None = None, element: int = TensorProto.FLOAT
) -> onnx.ModelProto:
    """A graph with the input x (1, 64) and outputs of the same shape."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", element, [1, 64])],
        [helper.make_tensor_value_info(name, element, [1, 64]) for name in outputs],
        [numpy_helper.from_array(np.array(3, helper.tensor_dtype_to_np_dtype(element)), "three")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    model.metadata_props.add(key="names", value="{0: 'a'}")
    onnx.checker.check_model(model)
    if path is not None:
        onnx.save(model, path)
    return model


def silu(x: str, y: str, name: str | None = None, *, swapped: bool = False) -> list[onnx.NodeProto]:
    inputs = [f"{y}_gate", x] if swapped else [x, f"{y}_gate"]
    return [
        helper.make_node("Sigmoid", [x], [f"{y}_gate"], f"{y}_sigmoid"),
        helper.make_node("Mul", inputs, [y], y.upper() if name is None else name),
    ]


def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], f"{kind}_{output}", **attributes)


class TestRule:
    def test_either_order_of_the_product_and_nodes_without_names(self) -> None:
        model = graph_of([*silu("x", "a"), *silu("a", "b", swapped=True), *silu("b", "c", name="")], ["c"])
        assert plan_silu(model) == SiluPlan(("A", "B", "c"), ())

    def test_a_gate_of_another_tensor_is_no_silu(self) -> None:
        nodes = [node("Sigmoid", ["x"], "gate"), node("Neg", ["x"], "minus"), node("Mul", ["minus", "gate"], "y")]
        assert plan_silu(graph_of(nodes, ["y"])) == SiluPlan((), ())

    @pytest.mark.parametrize("order", [["c", "a"], ["a", "c"]])
    def test_the_end_of_a_residual_branch_stays_its_beginning_does_not(self, order: list[str]) -> None:
        nodes = [*silu("x", "a"), node("Mul", ["a", "three"], "b"), *silu("b", "c"), node("Add", order, "y")]
        plan = plan_silu(graph_of(nodes, ["y"]))
        assert plan.fused == ("A",)
        assert plan.kept == (("C", "residual: Add_y adds a, which it was computed from"),)

    def test_a_shortcut_that_is_a_view(self) -> None:
        """The case of the miscompile: the shortcut is one part of a Split, which is concatenated later."""
        nodes = [
            *silu("x", "a"),
            helper.make_node("Split", ["a"], ["left", "right"], "split", axis=1, num_outputs=2),
            *silu("right", "b"),
            *silu("b", "c"),
            node("Add", ["right", "c"], "sum"),
            node("Concat", ["left", "sum"], "y", axis=1),
        ]
        assert plan_silu(graph_of(nodes, ["y"])).kept == (
            ("C", "residual: Add_sum adds right, which it was computed from"),
        )

    def test_sums_that_are_no_residual(self) -> None:
        """Two branches of one tensor, a constant, and a tensor added to itself."""
        nodes = [
            *silu("x", "a"),
            *silu("x", "b"),
            node("Add", ["a", "b"], "two"),
            *silu("two", "c"),
            node("Add", ["c", "three"], "shifted"),
            *silu("shifted", "d"),
            node("Add", ["d", "d"], "y"),
        ]
        assert plan_silu(graph_of(nodes, ["y"])) == SiluPlan(("A", "B", "C", "D"), ())

    def test_a_sigmoid_that_is_used_elsewhere(self, tmp_path: Path) -> None:
        reason = "its sigmoid is used elsewhere"
        nodes = [*silu("x", "a"), node("Neg", ["a_gate"], "y"), *silu("a", "b"), *silu("b", "c")]
        model = graph_of(nodes, ["y", "b_gate", "c"], tmp_path / "a.onnx")
        plan = fuse_silu(tmp_path / "a.onnx", tmp_path / "b.onnx")
        assert plan == plan_silu(model) == SiluPlan(("C",), (("A", reason), ("B", reason)))

    def test_a_sigmoid_that_a_branch_reads(self) -> None:
        def branch(kind: str) -> onnx.GraphProto:
            made = [helper.make_node(kind, ["a_gate"], [f"{kind}_out"])]
            return helper.make_graph(made, kind, [], [helper.make_tensor_value_info(f"{kind}_out", 1, [1, 64])])

        nodes = [
            *silu("x", "a"),
            node("ReduceMax", ["a"], "most", keepdims=0),
            node("Greater", ["most", "three"], "large"),
            helper.make_node("If", ["large"], ["y"], then_branch=branch("Neg"), else_branch=branch("Abs")),
        ]
        assert plan_silu(graph_of(nodes, ["y"])).kept == (("A", "its sigmoid is used elsewhere"),)


class TestGraph:
    def test_it_is_silu_everywhere(self, tmp_path: Path) -> None:
        graph_of(silu("x", "y"), ["y"], tmp_path / "a.onnx")
        fuse_silu(tmp_path / "a.onnx", tmp_path / "b.onnx")
        for scale in (1e-6, 1.0, 10.0, 100.0, 3e4):
            x = (np.linspace(-1, 1, 64)[None] * scale).astype(np.float32)
            exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64).clip(-700)))
            # The gate is 0.5 * tanh + 0.5: exact to a unit of 1, not of itself: far below 0 the error grows with x.
            np.testing.assert_allclose(run(tmp_path / "b.onnx", x), exact, rtol=2e-7, atol=1.2e-7 * scale)
        for value, expected in ((np.inf, np.inf), (np.nan, np.nan)):
            assert np.array_equal(run(tmp_path / "b.onnx", np.full((1, 64), value, np.float32))[0, 0], expected, True)

    def test_what_is_written(self, tmp_path: Path) -> None:
        nodes = [*silu("x", "a"), node("Mul", ["a", "three"], "b"), *silu("b", "c"), node("Add", ["a", "c"], "y")]
        before = graph_of(nodes, ["y"], tmp_path / "a.onnx")
        digest = (tmp_path / "a.onnx").read_bytes()
        fuse_silu(tmp_path / "a.onnx", tmp_path / "b.onnx")
        after = onnx.load(tmp_path / "b.onnx")
        assert [(n.name, n.op_type) for n in after.graph.node] == [
            ("A/scaled", "Mul"),
            ("A/tanh", "Tanh"),
            ("A/halved", "Mul"),
            ("A/gate", "Add"),
            ("A", "Mul"),
            ("Mul_b", "Mul"),
            ("c_sigmoid", "Sigmoid"),
            ("C", "Mul"),
            ("Add_y", "Add"),
        ]
        assert after.metadata_props == before.metadata_props
        assert (after.graph.input, after.graph.output) == (before.graph.input, before.graph.output)
        assert (tmp_path / "a.onnx").read_bytes() == digest
        # A second time there is nothing to do, and in place is fine.
        assert fuse_silu(tmp_path / "b.onnx", tmp_path / "b.onnx").fused == ()
        assert onnx.load(tmp_path / "b.onnx") == after
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.onnx", "b.onnx"]

    def test_only_before_the_precision_is_lowered(self, tmp_path: Path) -> None:
        graph_of(silu("x", "y"), ["y"], tmp_path / "h.onnx", TensorProto.FLOAT16)
        with pytest.raises(EngineError, match=r"the graph is FP16 \(three\): SiLUs are rewritten in the FP32 graph"):
            fuse_silu(tmp_path / "h.onnx", tmp_path / "b.onnx")
        assert not (tmp_path / "b.onnx").exists()
