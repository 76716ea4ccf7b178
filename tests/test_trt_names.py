"""What tools/model/engine*.py asks of TensorRT 10 and 11, checked against names and signatures of NVIDIA's own Python
bindings. See trt_bindings.py: TensorRT's builder itself needs a GPU and does not run here."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from edgeyolo.tools.model import engine
from edgeyolo.tools.model.engine import EngineOptions, Profile, build_engine

from edgeyolo.errors import DeviceError, EngineError, InvalidInput
from engine_graphs import NAMES, residual_network
from trt_bindings import ROOT, VERSIONS, FakeTensorrt, fault, names_used, surface

SOURCES = sorted((ROOT / "tools" / "model").glob("engine*.py"))

# Functions that only some of the libraries reach; every other function's names must be in all of them.
REACHED_BY = {
    "set_dla": {v for v in VERSIONS if v.startswith("10.")},
    "set_compatibility": set(VERSIONS),
    "set_compute_capabilities": {"rtx"},
}
GPU = {
    "name": "GPU",
    "compute_capability": "8.7",
    "integrated": False,
    "memory": 8 << 30,
    "free": 4 << 30,
    "cuda": "12",
}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this process found before: a driver is looked for once."""
    monkeypatch.setattr(engine, "no_gpu", lambda: "")


def problems(source: str, versions: tuple[str, ...]) -> list[str]:
    found = []
    for function, name in names_used(source):
        for version in versions:
            wrong = fault(surface(version), name)
            if wrong and version in REACHED_BY.get(function, {version}):
                found.append(f"{function} uses {name}, TensorRT {version}: {wrong}")
    return found


@pytest.mark.parametrize("version", [*VERSIONS, "rtx"])
def test_every_name_is_in_the_bindings(version: str) -> None:
    for path in SOURCES:
        assert problems(path.read_text(encoding="utf-8"), (version,)) == []


def test_the_check_sees_the_names() -> None:
    used = {name for path in SOURCES for _, name in names_used(path.read_text(encoding="utf-8"))}
    assert {"trt.Builder", "trt.BuilderFlag.VERSION_COMPATIBLE", "trt.ComputeCapability.__members__"} <= used


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("def f(trt): trt.BuilderFlag.FASTER", "BuilderFlag has no FASTER"),
        ("def f(trt): trt.Bilder()", "no Bilder"),
        ("def f(trt): trt.OnnxParser.parse_file", "OnnxParser has no parse_file"),
        ("def f(trt): trt.BuilderFlag.FP16", "BuilderFlag has no FP16"),  # TensorRT 10 has it
        ("def f(trt): trt.IInt8Calibrator", "no IInt8Calibrator"),
    ],
)
def test_an_invented_or_removed_name_is_found(source: str, wrong: str) -> None:
    assert wrong in problems(source, (VERSIONS[-1],))[0]


class TestStrictBuilder:
    """The stand-in that the builds below run with."""

    def test_refuses_names_that_the_class_lacks(self) -> None:
        config = FakeTensorrt(VERSIONS[-1]).Builder("logger").create_builder_config()
        with pytest.raises(AttributeError, match=r"IBuilderConfig of TensorRT 1.* has no set_precision"):
            config.set_precision("fp16")
        with pytest.raises(AttributeError, match="has no int8_calibrator"):
            config.int8_calibrator = None  # TensorRT 10 has it

    def test_refuses_calls_that_the_signature_lacks(self) -> None:
        builder = FakeTensorrt(VERSIONS[-1]).Builder("logger")
        profile = builder.create_optimization_profile()
        profile.set_shape("images", min=(1,), opt=(1,), max=(1,))
        with pytest.raises(TypeError, match="set_shape"):
            profile.set_shape("images", smallest=(1,), opt=(1,), max=(1,))
        with pytest.raises(TypeError, match="set_shape"):
            profile.set_shape("images", (1,), (1,))
        with pytest.raises(TypeError, match="create_network"):
            builder.create_network(1, 2)


def build(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    version: str,
    options: EngineOptions,
    *,
    answers: dict[str, Any] | None = None,
    warnings: tuple[str, ...] = (),
    gpu: dict[str, Any] = GPU,
    **graph: Any,
) -> tuple[engine.EngineFacts, FakeTensorrt]:
    trt = FakeTensorrt(version)
    trt.answers |= answers or {}
    trt.warnings += warnings
    monkeypatch.setattr(engine, "gpu_facts", lambda: gpu)
    monkeypatch.setattr(engine, "import_module", lambda name: trt)
    source = residual_network(tmp_path / "graph.onnx", **graph)
    return build_engine(source, tmp_path / "out.engine", options, {"names": NAMES}), trt


def flags(trt: FakeTensorrt) -> list[str]:
    return [call[1].name for call in trt.calls if call[0] == "IBuilderConfig.set_flag"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_static_build_is_strongly_typed_and_sets_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    facts, trt = build(monkeypatch, tmp_path, version, EngineOptions(workspace=1.5))
    number = surface(version)["enums"]["NetworkDefinitionCreationFlag"]["STRONGLY_TYPED"]
    source = tmp_path / "graph.onnx"
    asked = [call for call in trt.calls if ".get_" not in call[0]]
    assert [call[0] for call in asked] == [
        "Builder",
        "Builder.create_network",
        "OnnxParser",
        "OnnxParser.parse_from_file",
        "Builder.create_builder_config",
        "IBuilderConfig.set_memory_pool_limit",
        "Builder.build_serialized_network",
    ]
    assert asked[1][1:] == (1 << number,)
    assert asked[3][1:] == (str(source),)
    assert asked[5][1:] == (trt.MemoryPoolType.WORKSPACE, int(1.5 * 2**30))
    assert (facts.version, facts.precisions, facts.layer_count) == (version, {"float16": 2}, 2)
    assert facts.gpu == {key: value for key, value in GPU.items() if key != "free"}


@pytest.mark.parametrize("version", VERSIONS)
def test_profiles_compatibility_and_timing_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    cache = tmp_path / "timing.cache"
    options = EngineOptions(
        profiles=(Profile((1, 2, 4), (32, 64, 96), (64, 64, 64)), Profile((8, 8, 8), (64, 64, 64), (64, 64, 64))),
        hardware_compatible=True,
        version_compatible=True,
        timing_cache=cache,
    )
    warnings = ("slow tactic", "slow tactic", "other")
    facts, trt = build(
        monkeypatch, tmp_path, version, options, warnings=warnings, batch="batch", size=("height", "width")
    )
    shapes = [call[1:] for call in trt.calls if call[0] == "IOptimizationProfile.set_shape"]
    assert shapes == [
        ("images", (1, 3, 32, 64), (2, 3, 64, 64), (4, 3, 96, 64)),
        ("images", (8, 3, 64, 64), (8, 3, 64, 64), (8, 3, 64, 64)),
    ]
    assert sum(call[0] == "IBuilderConfig.add_optimization_profile" for call in trt.calls) == 2
    level = surface(version)["enums"]["HardwareCompatibilityLevel"]["AMPERE_PLUS"]
    assert ("IBuilderConfig.hardware_compatibility_level =", level) in trt.calls
    assert flags(trt) == ["VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"]
    assert ("IBuilderConfig.create_timing_cache", b"") in trt.calls
    assert cache.read_bytes() == b"the plan"  # what the stand-in serializes
    assert facts.warnings == ("slow tactic (2 times)", "other")
    assert facts.timing_cache


def test_a_timing_cache_of_another_gpu_is_told_and_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    cache.write_bytes(b"old")
    answers = {"IBuilderConfig.set_timing_cache": lambda *_: False}
    facts, trt = build(monkeypatch, tmp_path, VERSIONS[-1], EngineOptions(timing_cache=cache), answers=answers)
    created = [call[1] for call in trt.calls if call[0] == "IBuilderConfig.create_timing_cache"]
    assert created == [b"old", b""]
    assert "timing.cache is of another GPU or version" in facts.warnings[0]


def test_the_workspace_is_what_the_free_memory_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, trt = build(monkeypatch, tmp_path, VERSIONS[-1], EngineOptions())
    size = (tmp_path / "graph.onnx").stat().st_size
    limit = next(call[2] for call in trt.calls if call[0] == "IBuilderConfig.set_memory_pool_limit")
    assert limit == (4 << 30) - (256 << 20) - 2 * size
    with pytest.raises(DeviceError, match=r"takes about 4352 MiB of GPU memory, 4096 MiB are free; take a smaller"):
        build(monkeypatch, tmp_path, VERSIONS[-1], EngineOptions(workspace=4.0))


TENS = [version for version in VERSIONS if version.startswith("10.")]
ELEVENS = [version for version in VERSIONS if version.startswith("11.")]


@pytest.mark.parametrize("version", TENS)
class TestDla:
    def test_fp16(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
        facts, trt = build(monkeypatch, tmp_path, version, EngineOptions(dla=1))
        assert ("Builder.create_network", 0) in trt.calls  # weakly typed
        assert flags(trt) == ["GPU_FALLBACK", "FP16"]
        assert ("IBuilderConfig.default_device_type =", trt.DeviceType.DLA) in trt.calls
        assert ("IBuilderConfig.DLA_core =", 1) in trt.calls
        assert facts.precisions == {}

    def test_int8_takes_the_calibrated_ranges(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
    ) -> None:
        ranges = {"images": (0.0, 1.0), "output0": (-3.0, 2.0), "elsewhere": (0.0, 9.0)}
        options = EngineOptions(dla=0, dla_precision="int8", dla_ranges=ranges)
        facts, trt = build(monkeypatch, tmp_path, version, options)
        assert flags(trt) == ["GPU_FALLBACK", "FP16", "INT8"]
        set_ranges = [call[1:] for call in trt.calls if call[0] == "ITensor.set_dynamic_range"]
        assert set_ranges == [(-1.0, 1.0), (-3.0, 3.0)]
        assert facts.warnings == ("1 of 3 tensors have no range and stay in FP16",)

    def test_refusals(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
        with pytest.raises(DeviceError, match="dla=2: this device has 2 DLA cores"):
            build(monkeypatch, tmp_path, version, EngineOptions(dla=2))
        with pytest.raises(InvalidInput, match="none of the 1 dla_ranges names a tensor"):
            options = EngineOptions(dla=0, dla_precision="int8", dla_ranges={"elsewhere": (0.0, 9.0)})
            build(monkeypatch, tmp_path, version, options)
        with pytest.raises(InvalidInput, match="DLA runs one shape only"):
            options = EngineOptions(dla=0, profiles=(Profile((1, 1, 2), (64, 64, 64), (64, 64, 64)),))
            build(monkeypatch, tmp_path, version, options, batch="batch")
        with pytest.raises(InvalidInput, match="QuantizeLinear nodes, which do not run on DLA"):
            build(monkeypatch, tmp_path, version, EngineOptions(dla=0), quantized=True)
        assert not (tmp_path / "out.engine").exists()


@pytest.mark.parametrize("version", ELEVENS)
def test_no_dla_on_tensorrt_11(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    with pytest.raises(InvalidInput, match=f"TensorRT {version} has strongly typed networks only"):
        build(monkeypatch, tmp_path, version, EngineOptions(dla=0))


def test_a_builder_without_an_engine_gives_its_logged_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trt = FakeTensorrt(VERSIONS[-1])

    def fail(builder: Any, network: Any, config: Any) -> None:
        trt.logger.log(trt.ILogger.Severity.ERROR, "no tactic\n  for node_7")
        trt.logger.log(trt.ILogger.Severity.WARNING, "not this")

    trt.answers["Builder.build_serialized_network"] = fail
    monkeypatch.setattr(engine, "gpu_facts", lambda: GPU)
    monkeypatch.setattr(engine, "import_module", lambda name: trt)
    source = residual_network(tmp_path / "graph.onnx")
    with pytest.raises(EngineError, match=r"built no engine of graph.onnx: no tactic for node_7$"):
        build_engine(source, tmp_path / "out.engine", EngineOptions(), {"names": NAMES})


def test_builds_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library has one logger: a message tells of a build only while no other runs."""
    trt = FakeTensorrt(VERSIONS[-1])
    running: list[int] = []
    together: list[int] = []

    def slow(builder: Any, network: Any, config: Any) -> Any:
        running.append(1)
        together.append(len(running))
        time.sleep(0.05)
        running.pop()
        return trt.build(builder, network, config)

    trt.answers["Builder.build_serialized_network"] = slow
    monkeypatch.setattr(engine, "gpu_facts", lambda: GPU)
    monkeypatch.setattr(engine, "import_module", lambda name: trt)
    source = residual_network(tmp_path / "graph.onnx")

    def work(index: int) -> None:
        build_engine(source, tmp_path / f"{index}.engine", EngineOptions(), {"names": NAMES})

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [1, 1, 1, 1]


def test_another_major_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trt = FakeTensorrt(VERSIONS[-1])
    trt.__version__ = "12.0.1"
    monkeypatch.setattr(engine, "gpu_facts", lambda: GPU)
    monkeypatch.setattr(engine, "import_module", lambda name: trt)
    with pytest.raises(EngineError, match=r"expected TensorRT 10 or 11, found 12\.0\.1"):
        build_engine(residual_network(tmp_path / "g.onnx"), tmp_path / "o.engine", EngineOptions(), {"names": NAMES})
