"""Engines built by NVIDIA's own TensorRT-RTX builder, which needs no GPU, and what is refused before it is asked."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from edgeyolo.tools.model import engine, engine_graph
from edgeyolo.tools.model.engine import EngineFacts, Profile, build_engine
from onnx import TensorProto, helper

from edgeyolo.errors import EngineError, InvalidInput
from edgeyolo.manifest import facts_from_header
from engine_graphs import HEADER, ROWS, RTX, built, read_as_ultralytics_does, residual_network, square


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a machine with a GPU."""
    monkeypatch.setattr(engine, "gpu_facts", lambda: None)


class TestBuilds:
    def test_static(self, tmp_path: Path) -> None:
        facts = built(tmp_path)
        header, plan = read_as_ultralytics_does(tmp_path / "out.engine")
        assert plan[:4] == b"vtrt"
        assert (facts.plan_bytes, facts.plan_sha256) == (len(plan), hashlib.sha256(plan).hexdigest())
        assert [(t.name, t.shape, t.dtype) for t in facts.inputs] == [("images", (1, 3, 64, 64), "float32")]
        assert [(t.name, t.shape, t.dtype) for t in facts.outputs] == [("output0", (1, ROWS, 1024), "float32")]
        assert facts.layers["convolution"] == {"float32": 3}
        assert facts.precisions["float32"] == sum(counts.get("float32", 0) for counts in facts.layers.values())
        assert (facts.gpu, facts.sm, facts.warnings, facts.timing_cache) == (None, ("89",), (), False)
        ours = header["edgeyolo"]
        assert ours["plan_sha256"] == facts.plan_sha256
        assert ours["onnx_sha256"] == hashlib.sha256((tmp_path / "graph.onnx").read_bytes()).hexdigest()
        assert (ours["target"], ours["tensorrt"], ours["sm"]) == ("tensorrt-rtx", facts.version, ["89"])

    def test_batch_and_size_are_free(self, tmp_path: Path) -> None:
        profiles = (square((1, 2, 4), (32, 64, 128)), square((8, 8, 16), (64, 64, 64)))
        options = replace(RTX, profiles=profiles)
        facts = built(tmp_path, options, batch="batch", size=("height", "width"))
        assert facts.inputs[0].shape == (-1, 3, -1, -1)
        assert facts.outputs[0].shape == (-1, ROWS, -1)
        header, _ = read_as_ultralytics_does(tmp_path / "out.engine")
        assert (header["imgsz"], header["batch"]) == ([64, 64], 16)
        assert header["edgeyolo"]["profiles"][0] == {
            "batch": [1, 2, 4],
            "height": [32, 64, 128],
            "width": [32, 64, 128],
        }

    def test_tanh_form(self, tmp_path: Path) -> None:
        layers = built(tmp_path, tanh=True).layers
        assert layers["activation"] == {"float32": 2}
        assert layers["elementwise"] == {"float32": 2 * 4 + 1}  # four of each SiLU, and the residual
        assert built(tmp_path).layers["elementwise"] == {"float32": 2 * 1 + 1}

    def test_half_precision_is_what_the_graph_says(self, tmp_path: Path) -> None:
        facts = built(tmp_path, half=True)
        assert facts.layers["convolution"] == {"float16": 3}
        assert facts.layers["activation"] == {"float16": 2}
        assert facts.outputs[0].dtype == facts.inputs[0].dtype == "float32"

    @pytest.mark.parametrize("tanh", [False, True])
    def test_quantized(self, tmp_path: Path, tanh: bool) -> None:
        facts = built(tmp_path, quantized=True, tanh=tanh)
        assert facts.layers["quantize"] == {"int8": 2}
        assert facts.layers["dequantize"] == {"float32": 2}
        assert facts.precisions["int8"] == 2

    def test_several_compute_capabilities(self, tmp_path: Path) -> None:
        one = built(tmp_path)
        two = built(tmp_path, replace(RTX, sm=("sm_89", "12.0", "8.9")))
        assert two.sm == ("89", "120")
        assert two.plan_bytes > one.plan_bytes

    def test_workspace(self, tmp_path: Path) -> None:
        assert built(tmp_path, replace(RTX, workspace=0.5)).plan_bytes > 0
        header, _ = read_as_ultralytics_does(tmp_path / "out.engine")
        assert header["edgeyolo"]["workspace"] == 512 << 20

    def test_two_threads_build_at_once(self, tmp_path: Path) -> None:
        done: list[Any] = []

        def work(folder: Path, broken: bool) -> None:
            folder.mkdir()
            try:
                if broken:
                    done.append(build_engine(unknown_operators(folder / "g.onnx"), folder / "o.engine", RTX, HEADER))
                else:
                    done.append(built(folder))
            except EngineError as error:
                done.append(error)

        threads = [threading.Thread(target=work, args=(tmp_path / str(i), i % 2 == 1)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [str(value) for value in done if isinstance(value, EngineError)]
        assert len(errors) == 3
        assert all("'first' (Det)" in text for text in errors)
        assert [value.warnings for value in done if isinstance(value, EngineFacts)] == [(), (), ()]


# What the shared exporter makes of each family: yaml, its heads.
FAMILIES = [
    ("yolo26n", ("raw", "end2end")),
    ("yolo26s", ("raw",)),
    ("yolo26m", ("raw",)),
    ("yolo11n", ("raw",)),
    ("yolov8n", ("raw",)),
    ("yolov10n", ("end2end",)),
]


def weights_of(name: str) -> Any:
    tasks = pytest.importorskip("ultralytics.nn.tasks")
    model = tasks.DetectionModel(f"{name}.yaml", verbose=False).eval()
    names = {index: f"class {index}" for index in range(80)}
    heads = ("raw", "end2end") if hasattr(model.model[-1], "one2one_cv2") else ("raw",)
    return SimpleNamespace(
        path=Path(f"{name}.pt"), sha256="0" * 64, kind="pt", names=names, stride=32, heads=heads,
        description=name, model=model,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), FAMILIES)
def test_every_family_builds(tmp_path: Path, name: str, heads: tuple[str, ...]) -> None:
    from edgeyolo.tools.model.onnx import GraphOptions, export_onnx
    from edgeyolo.tools.model.silu import fuse_silu

    weights = weights_of(name)
    for head in heads:
        source, fused = tmp_path / f"{head}.onnx", tmp_path / f"{head}-tanh.onnx"
        export_onnx(weights, source, GraphOptions((96, 64), head=head))
        plan = fuse_silu(source, fused)
        anchors = 96 * 64 // 64 + 96 * 64 // 256 + 96 * 64 // 1024
        for graph in (source, fused):
            facts = build_engine(graph, tmp_path / "out.engine", RTX, {})
            assert facts.outputs[0].shape == ((1, 84, anchors) if head == "raw" else (1, anchors, 6))
            header, _ = read_as_ultralytics_does(tmp_path / "out.engine")
            assert facts_from_header(header).end2end is (head == "end2end")
            assert header["names"]["79"] == "class 79"
            operators = [node.op_type for node in onnx.load(graph).graph.node]
            assert operators.count("Tanh") == (0 if graph == source else len(plan.fused))
            assert facts.layers["convolution"] == {"float32": operators.count("Conv")}
            # Each Sigmoid and Tanh is one layer, and nothing else is.
            assert facts.layers["activation"] == {"float32": operators.count("Sigmoid") + operators.count("Tanh")}


@pytest.mark.slow
def test_a_real_end_to_end_head_with_free_sizes(tmp_path: Path) -> None:
    from edgeyolo.tools.model.onnx import GraphOptions, export_onnx

    weights = weights_of("yolo26n")
    source = tmp_path / "dynamic.onnx"
    for head in ("raw", "end2end"):
        export_onnx(weights, source, GraphOptions((96, 64), batch=(1, 2), dynamic=True, head=head))
        shapes = Profile((1, 1, 2), (96, 96, 128), (64, 64, 128))
        facts = build_engine(source, tmp_path / "out.engine", replace(RTX, profiles=(shapes,)), {})
        assert facts.inputs[0].shape == (-1, 3, -1, -1)
    small = Profile((1, 1, 2), (32, 96, 128), (64, 64, 128))  # 32 + 8 + 2 anchors, 126 are selected
    wrong = r"min of the profile, 32 x 64 pixels: node '.*TopK' \(TopK\) selects 126 of the network's 42 anchors"
    with pytest.raises(InvalidInput, match=wrong):
        build_engine(source, tmp_path / "out.engine", replace(RTX, profiles=(small,)), {})


def unknown_operators(path: Path) -> Path:
    """Det, which ONNX has and TensorRT lacks, twice."""
    nodes = [
        helper.make_node("Det", ["images"], ["a"], name="first"),
        helper.make_node("Identity", ["images"], ["same"], name="fine"),
        helper.make_node("Det", ["same"], ["b"], name="second"),
        helper.make_node("Add", ["a", "b"], ["output0"], name="sum"),
    ]
    return save(path, nodes, [1, 3, 64, 64], [1, 3])


def save(path: Path, nodes: list[Any], input_dims: list[Any], output_dims: list[Any], **names: Any) -> Path:
    graph = helper.make_graph(
        nodes,
        "test",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, input_dims)
            for name in names.get("inputs", ["images"])
        ],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, output_dims)],
        names.get("initializers", []),
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


class TestGraphsThatAreRefused:
    def refused(self, source: Path) -> str:
        out = source.with_name("out.engine")
        with pytest.raises(EngineError) as caught:
            build_engine(source, out, RTX, HEADER)
        assert sorted(source.parent.iterdir()) == [source]
        return str(caught.value)

    def test_every_unknown_operator_is_named(self, tmp_path: Path) -> None:
        text = self.refused(unknown_operators(tmp_path / "graph.onnx"))
        assert "TensorRT-RTX 1." in text
        assert "node 'first' (Det)" in text
        assert "node 'second' (Det)" in text
        assert "fine" not in text

    def test_a_missing_plugin_is_named(self, tmp_path: Path) -> None:
        nodes = [helper.make_node("Mystery", ["images"], ["output0"], name="custom", domain="nowhere")]
        assert "node 'custom' (Mystery)" in self.refused(save(tmp_path / "graph.onnx", nodes, [1, 3, 8, 8], [1, 3]))

    @pytest.mark.parametrize("operator", ["NonZero", "NonMaxSuppression"])
    def test_embedded_nms(self, tmp_path: Path, operator: str) -> None:
        nodes = [helper.make_node(operator, ["images"], ["output0"], name="/nms/step")]
        text = self.refused(save(tmp_path / "graph.onnx", nodes, [1, 3, 8, 8], [1, 3]))
        assert f"node '/nms/step' ({operator}) belongs to an NMS step" in text

    def test_nms_inside_a_branch(self, tmp_path: Path) -> None:
        nothing = helper.make_tensor_value_info("picked", TensorProto.INT64, [4, "n"])
        branch = helper.make_graph(
            [helper.make_node("NonZero", ["images"], ["picked"], name="deep")], "b", [], [nothing]
        )
        node = helper.make_node("If", ["images"], ["output0"], name="if", then_branch=branch, else_branch=branch)
        assert "node 'deep' (NonZero)" in self.refused(save(tmp_path / "graph.onnx", [node], [1, 3, 8, 8], [1, 3]))

    def test_what_the_builder_logs_is_the_reason(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A graph that parses and cannot be built: the reason is in the log alone."""
        monkeypatch.setattr(engine_graph, "DATA_DEPENDENT", ())
        nodes = [
            helper.make_node("Reshape", ["images", "rows"], ["boxes"], name="boxes"),
            helper.make_node("Reshape", ["images", "columns"], ["scores"], name="scores"),
            helper.make_node("NonMaxSuppression", ["boxes", "scores", "count"], ["picked"], name="nms"),
            helper.make_node("Cast", ["picked"], ["output0"], name="cast", to=TensorProto.FLOAT),
        ]
        constants = [
            helper.make_tensor("rows", TensorProto.INT64, [3], [1, -1, 4]),
            helper.make_tensor("columns", TensorProto.INT64, [3], [1, 4, -1]),
            helper.make_tensor("count", TensorProto.INT64, [1], [5]),
        ]
        source = save(tmp_path / "graph.onnx", nodes, [1, 3, 8, 8], ["n", 3], initializers=constants)
        text = self.refused(source)
        assert "built no engine of graph.onnx" in text
        assert "nms" in text
        assert "cudaError 35" not in text

    @pytest.mark.parametrize("data", [b"", b"no protobuf at all", None])
    def test_no_network(self, tmp_path: Path, data: bytes | None) -> None:
        source = residual_network(tmp_path / "graph.onnx")
        source.write_bytes(source.read_bytes()[:700] if data is None else data)
        assert "graph.onnx" in self.refused(source)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError, match=r"cannot read .*nowhere\.onnx: No such file"):
            build_engine(tmp_path / "nowhere.onnx", tmp_path / "out.engine", RTX, HEADER)

    @pytest.mark.parametrize(
        ("dims", "inputs", "expected"),
        [
            ([1, 1, 8, 8], ["images"], "expected an input of the shape (batch, 3, height, width), found (1, 1, 8, 8)"),
            ([1, 3, "n"], ["images"], "found (1, 3, ?)"),
            ([1, 3, 8, 8], ["images", "more"], "the inputs ['images', 'more']"),
        ],
    )
    def test_not_a_detector(self, tmp_path: Path, dims: list[Any], inputs: list[str], expected: str) -> None:
        nodes = [helper.make_node("Relu", ["images"], ["output0"], name="relu")]
        assert expected in self.refused(save(tmp_path / "graph.onnx", nodes, dims, dims, inputs=inputs))
