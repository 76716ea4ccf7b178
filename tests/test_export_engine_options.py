"""What an engine is built for: options, profiles, header, memory, and a machine without a GPU."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from edgeyolo.tools.model import engine, engine_memory
from edgeyolo.tools.model.engine import EngineOptions, Profile, gpu_facts, runnable, update_engine
from edgeyolo.tools.model.engine_options import compute_capability

from edgeyolo import _core
from edgeyolo.errors import DeviceError, EngineError, InvalidInput, ManifestError
from edgeyolo.manifest import facts_from_header
from engine_graphs import NAMES, RTX, built, read_as_ultralytics_does, square
from gpu_fixtures import Gpu

GPU = {"name": "GPU", "compute_capability": "8.9", "integrated": False, "memory": 8 << 30, "free": 4 << 30, "cuda": "1"}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a machine with a GPU."""
    monkeypatch.setattr(engine, "gpu_facts", lambda: None)


class TestProfiles:
    @pytest.mark.parametrize("values", [(2, 1, 4), (1, 8, 4), (0, 1, 2), (1, 2), (1, 1.5, 2), (True, 1, 2), (-1, 1, 1)])
    def test_min_opt_max(self, values: Any) -> None:
        with pytest.raises(InvalidInput, match=r"a profile's batch must be three whole numbers \(min, opt, max\)"):
            replace(RTX, profiles=(square(values, (64, 64, 64)),))

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ((), r"has the free dimensions \(\?, 3, \?, 64\): give a profile"),
            (
                (Profile((1, 1, 1), (64, 64, 64), (32, 64, 64)),),
                r"the width of graph.onnx is fixed to 64, .*\(32, 64, 64\)",
            ),
            ((Profile((1, 1, 1), (48, 64, 64), (64, 64, 64)),), r"height must be multiples of the stride 32, found"),
        ],
    )
    def test_against_the_graph(self, tmp_path: Path, given: tuple[Profile, ...], expected: str) -> None:
        with pytest.raises(InvalidInput, match=expected):
            built(tmp_path, replace(RTX, profiles=given), batch="batch", size=("height", 64))

    def test_a_static_graph_takes_its_own_shape_only(self, tmp_path: Path) -> None:
        built(tmp_path, replace(RTX, profiles=(square((1, 1, 1), (64, 64, 64)),)))
        with pytest.raises(InvalidInput, match=r"the batch of graph\.onnx is fixed to 1"):
            built(tmp_path, replace(RTX, profiles=(square((1, 4, 8), (64, 64, 64)),)))


class TestOptions:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"target": "tensorflow"}, "target must be one of tensorrt, tensorrt-rtx"),
            ({"workspace": 0}, "workspace must be GiB above 0"),
            ({"workspace": float("nan")}, "workspace must be GiB above 0"),
            ({"target": "tensorrt"}, "TensorRT builds for the GPU that it finds; leave sm out"),
            ({"sm": ("ampere",)}, "expected a compute capability such as 8.9 or sm_89, found 'ampere'"),
            ({"hardware_compatible": True}, "TensorRT-RTX has no such engines; name the compute capabilities"),
            ({"version_compatible": True}, "TensorRT-RTX has no such engines"),
            ({"dla": 0}, "TensorRT-RTX has no DLA"),
            ({"target": "tensorrt", "sm": (), "dla": -1}, "dla must be the number of a DLA core"),
            (
                {"target": "tensorrt", "sm": (), "dla": 0, "dla_precision": "fp32"},
                "dla_precision must be one of fp16, int8",
            ),
            ({"target": "tensorrt", "sm": (), "dla": 0, "dla_precision": "int8"}, "needs dla_ranges"),
            ({"target": "tensorrt", "sm": (), "dla_ranges": {"x": (0, 1)}}, "dla_ranges are for DLA"),
            ({"target": "tensorrt", "sm": (), "dla": 0, "hardware_compatible": True}, "neither hardware nor version"),
        ],
    )
    def test_refused(self, changes: dict[str, Any], expected: str) -> None:
        with pytest.raises(InvalidInput, match=expected):
            replace(RTX, **changes)

    @pytest.mark.parametrize(("text", "number"), [("8.9", "89"), ("sm_120", "120"), ("SM75", "75"), ("12.1", "121")])
    def test_compute_capability(self, text: str, number: str) -> None:
        assert compute_capability(text) == number

    def test_a_compute_capability_that_the_library_lacks(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInput, match=r"builds nothing for sm_90; it knows sm_75, sm_80, .*sm_120"):
            built(tmp_path, replace(RTX, sm=("9.0",)))

    def test_without_a_compute_capability_the_gpu_decides(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InvalidInput, match="name them with sm"):
            built(tmp_path, replace(RTX, sm=()))
        monkeypatch.setattr(engine, "gpu_facts", lambda: GPU)
        facts = built(tmp_path, replace(RTX, sm=()))
        assert facts.sm == ("89",)
        assert facts.gpu is not None
        assert "free" not in facts.gpu

    def test_a_package_that_is_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(engine.MODULES, "tensorrt-rtx", "edgeyolo_no_such_module")
        with pytest.raises(EngineError, match=r"needs its Python package: .* pip install tensorrt_rtx_cu13"):
            built(tmp_path)


class TestHeader:
    def test_names_longer_in_bytes_than_in_letters(self, tmp_path: Path) -> None:
        built(tmp_path)
        data = (tmp_path / "out.engine").read_bytes()
        text = _core.EngineFile(tmp_path / "out.engine").header
        assert len(text.encode()) > len(text)
        assert struct.unpack_from("<i", data)[0] == len(text.encode())
        assert data[4 : 4 + len(text.encode())] == text.encode()
        facts = facts_from_header(json.loads(text))
        assert facts.names == {0: "café", 1: "停止", 2: "sign"}
        assert (facts.imgsz, facts.stride, facts.end2end) == ((64, 64), 32, None)

    def test_the_graph_says_what_the_caller_does_not(self, tmp_path: Path) -> None:
        metadata = {
            "names": "{0: 'a', 1: 'b', 2: 'c'}", "stride": "16", "task": "detect", "imgsz": "[64, 64]",
            "end2end": "False", "description": "12", "args": "{'dynamic': False}", "author": "someone",
            "edgeyolo": "{}",
        }  # fmt: skip
        built(
            tmp_path, header={"stride": 32, "edgeyolo": {"calibration": "abc", "plan_sha256": "lie"}}, metadata=metadata
        )
        header, plan = read_as_ultralytics_does(tmp_path / "out.engine")
        expected = {
            "names": {"0": "a", "1": "b", "2": "c"}, "stride": 32, "task": "detect", "imgsz": [64, 64],
            "end2end": False, "description": "12", "args": {"dynamic": False}, "author": "someone",
            "channels": 3, "batch": 1,
        }  # fmt: skip
        assert {key: header[key] for key in expected} == expected
        assert set(header) == {*expected, "edgeyolo"}
        assert header["edgeyolo"]["calibration"] == "abc"
        assert header["edgeyolo"]["plan_sha256"] == hashlib.sha256(plan).hexdigest()

    @pytest.mark.parametrize(
        ("header", "error", "expected"),
        [
            ({}, ManifestError, "graph.onnx names no classes"),
            ({"names": ["a", "b"]}, ManifestError, r"names 2 classes, so a raw head has 6 rows; .* has 7"),
            (
                {"names": NAMES, "imgsz": [96, 96]},
                ManifestError,
                r"imgsz \(96, 96\), the input of graph.onnx is \(64, 64\)",
            ),
            ({"names": NAMES, "task": "segment"}, ManifestError, "expected a detection model"),
            ({"names": NAMES, "date": Path("x")}, InvalidInput, "must hold JSON values only"),
            ({"names": NAMES, "score": float("nan")}, InvalidInput, "must hold JSON values only"),
            ({"names": NAMES, "edgeyolo": "text"}, InvalidInput, "'edgeyolo' must be a mapping, found str"),
        ],
    )
    def test_refused(self, tmp_path: Path, header: dict[str, Any], error: type[Exception], expected: str) -> None:
        with pytest.raises(error, match=expected):
            built(tmp_path, header=header)
        assert not (tmp_path / "out.engine").exists()

    def test_the_verification_record_comes_later(self, tmp_path: Path) -> None:
        facts = built(tmp_path)
        path = tmp_path / "out.engine"
        before, plan = read_as_ultralytics_does(path)
        update_engine(path, {"verified": {"passed": True}})
        after, same = read_as_ultralytics_does(path)
        assert same == plan
        assert after["edgeyolo"] == {**before["edgeyolo"], "verified": {"passed": True}}
        assert {k: v for k, v in after.items() if k != "edgeyolo"} == {
            k: v for k, v in before.items() if k != "edgeyolo"
        }
        assert after["edgeyolo"]["plan_sha256"] == facts.plan_sha256

    def test_a_bare_plan_takes_no_record(self, tmp_path: Path) -> None:
        built(tmp_path)
        bare = tmp_path / "bare.engine"
        bare.write_bytes(read_as_ultralytics_does(tmp_path / "out.engine")[1])
        with pytest.raises(ManifestError, match="found a bare plan"):
            update_engine(bare, {"verified": {}})

    def test_a_failed_write_leaves_the_old_engine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out.engine").write_bytes(b"old")
        monkeypatch.setattr(_core, "EngineFile", lambda path: SimpleNamespace(header="other", plan_size=1))
        with pytest.raises(ManifestError, match="cannot be read back"):
            built(tmp_path)
        assert (tmp_path / "out.engine").read_bytes() == b"old"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.onnx", "out.engine"]


class TestMemory:
    def test_of_the_machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_memory, "host_available", lambda: 300 << 20)
        with pytest.raises(DeviceError, match="takes about 512 MiB of memory, 300 MiB are available"):
            built(tmp_path)

    def test_meminfo(self, tmp_path: Path) -> None:
        (tmp_path / "meminfo").write_text("MemTotal:       16000 kB\nMemAvailable:    9000 kB\n")
        assert engine_memory.host_available(tmp_path / "meminfo") == 9000 * 1024
        assert engine_memory.host_available(tmp_path / "none") is None
        assert (engine_memory.host_available() or 0) > 1 << 20

    @pytest.mark.parametrize(
        ("free", "asked", "integrated", "given"),
        [
            (1 << 30, None, False, (1 << 30) - (256 << 20) - 200),
            (1 << 30, 64 << 20, False, 64 << 20),
            (1 << 30, None, True, (1 << 30) - (768 << 20) - 600),
        ],
    )
    def test_workspace(self, free: int, asked: int | None, integrated: bool, given: int) -> None:
        assert engine_memory.device_workspace(100, asked, {"free": free, "integrated": integrated}) == given

    @pytest.mark.parametrize(
        ("free", "asked", "expected"),
        [
            (1 << 30, 1 << 30, "takes about 1280 MiB of GPU memory, 1024 MiB are free; take a smaller workspace"),
            (200 << 20, None, "takes about 320 MiB of GPU memory, 200 MiB are free; free memory"),
            (200 << 20, 1 << 30, "takes about 1280 MiB of GPU memory, 200 MiB are free; free memory"),
        ],
    )
    def test_too_little(self, free: int, asked: int | None, expected: str) -> None:
        with pytest.raises(DeviceError, match=expected):
            engine_memory.device_workspace(100, asked, {"free": free, "integrated": False})


class TestWithoutGpu:
    def test_tensorrt_is_not_even_imported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def driver() -> dict[str, Any]:
            raise DeviceError("no CUDA driver")

        monkeypatch.setattr(_core, "driver", driver)
        monkeypatch.setattr(engine, "gpu_facts", gpu_facts)
        monkeypatch.setattr(engine, "load_library", lambda target: pytest.fail("imported"))
        with pytest.raises(DeviceError, match=r"TensorRT builds on the GPU that the engine is for, .*: no CUDA driver"):
            built(tmp_path, EngineOptions())
        assert runnable("tensorrt") == (False, "no CUDA driver")

    def test_runnable_needs_a_device_and_a_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(folders: list[str], adapters: str) -> str:
            raise EngineError("no TensorRT library found")

        monkeypatch.setattr(_core, "driver", lambda: {"devices": 0, "cuda": "13.0"})
        assert runnable("tensorrt") == (False, "the driver finds no GPU")
        monkeypatch.setattr(_core, "driver", lambda: {"devices": 1, "cuda": "13.0"})
        monkeypatch.setattr(_core, "find_tensorrt", missing)
        assert runnable("tensorrt") == (False, "no TensorRT library found")
        monkeypatch.setattr(_core, "find_tensorrt", lambda folders, adapters: "TensorRT 10.14 (x)")
        assert runnable("tensorrt") == (True, "TensorRT 10.14 (x)")

    def test_rtx_engines_do_not_run(self) -> None:
        assert runnable("tensorrt-rtx") == (False, "edgeyolo's runtime has no adapter for TensorRT-RTX")


def test_the_gpu_is_asked_through_the_driver(gpu: Gpu) -> None:
    facts = gpu_facts()
    assert facts is not None
    assert facts["name"] == _core.device(0)["name"]
    assert 0 < facts["free"] <= facts["memory"]
    assert compute_capability(facts["compute_capability"]).isdigit()
    ready, why = runnable("tensorrt")
    assert ready, why
