"""The GPU under test: a real one with its driver, or the simulated driver. TensorRT is the test library on both.

A test that asks for `gpu` runs on either. One that asks for `simulated` needs what only the simulated driver has: a
second device, faults, and its eye for wrong calls; it is skipped on a real GPU.
EDGEYOLO_REQUIRE_GPU=1: a missing GPU is a failure. EDGEYOLO_REQUIRE_SIMULATION=1: missing test libraries are one (CI).
EDGEYOLO_TEST_LIBRARIES names the folder where they were built, build/cpp by default.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgeyolo import _core
from edgeyolo.engine import adapter_folder

ROOT = Path(__file__).resolve().parents[1]
ONCE, ALWAYS, LOST = 0, 1, 2


@functools.cache
def real_gpu() -> bool:
    """Whether this machine has a GPU that its driver can use."""
    if os.environ.get("EDGEYOLO_REQUIRE_GPU") == "1":
        return True
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


@functools.cache
def built(name: str) -> Path | None:
    """A library of the tests, by its name."""
    folder = Path(os.environ.get("EDGEYOLO_TEST_LIBRARIES") or ROOT / "build" / "cpp")
    found = sorted(folder.rglob(f"*{name}.so")) if folder.is_dir() else []
    return found[0].resolve() if found else None


class Simulation:
    """The control functions of the simulated driver (tests/fakes/driver.hpp)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, f"edgeyolo_fake_{name}")
        function.restype = ctypes.c_long
        return function

    def fault(self, call: str, code: int, *, nth: int = 1, mode: int = ONCE) -> None:
        self._library.edgeyolo_fake_fault(call.encode(), ctypes.c_long(nth), code, mode)

    def calls_of(self, call: str) -> int:
        return int(self.calls(call.encode()))

    def set_devices(self, count: int, *, integrated: bool = False, megabytes: int = 1024) -> None:
        self._library.edgeyolo_fake_set_devices(count, int(integrated), ctypes.c_ulonglong(megabytes << 20))

    def used(self, ordinal: int, *, peak: bool = False) -> int:
        function = self._library.edgeyolo_fake_peak_memory if peak else self._library.edgeyolo_fake_memory
        function.restype = ctypes.c_ulonglong
        return int(function(ordinal))

    def violation_lines(self) -> list[str]:
        length = self.violation_text(None, ctypes.c_long(0))
        text = ctypes.create_string_buffer(length + 1)
        self.violation_text(text, ctypes.c_long(length + 1))
        return text.value.decode().splitlines()


@dataclass(frozen=True)
class Gpu:
    """simulation: None on a real GPU. driver, tensorrt: the libraries' paths; driver is empty for the system's own."""

    simulation: Simulation | None
    driver: str
    tensorrt: str

    @property
    def environment(self) -> dict[str, str]:
        """For a process of its own."""
        variables = {"EDGEYOLO_TENSORRT_LIBRARY": self.tensorrt}
        return (
            variables | {"EDGEYOLO_CUDA_DRIVER": self.driver, "EDGEYOLO_FAKE_DEVICES": "2"}
            if self.driver
            else variables
        )


def run_python(code: str, environment: dict[str, str] | None = None) -> str:
    """What the code prints, in a process of its own; nothing of EDGEYOLO_* but `environment` comes from here."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("EDGEYOLO_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables | (environment or {}), timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def missing(what: str) -> None:
    if os.environ.get("EDGEYOLO_REQUIRE_SIMULATION") == "1" or os.environ.get("EDGEYOLO_REQUIRE_GPU") == "1":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    tensorrt = built("edgeyolo_test_tensorrt10")
    if tensorrt is None:
        missing("the test libraries are not built: make test-cpp, or name their folder with EDGEYOLO_TEST_LIBRARIES")
    if not (Path(adapter_folder()) / "_trt10.so").exists():
        missing("the adapter of TensorRT 10 is not built: install with CMAKE_ARGS=-DEDGEYOLO_TENSORRT_HEADERS=pypi")
    monkeypatch.setenv("EDGEYOLO_TENSORRT_LIBRARY", str(tensorrt))
    if real_gpu():
        monkeypatch.delenv("EDGEYOLO_CUDA_DRIVER", raising=False)
        yield Gpu(None, "", str(tensorrt))
        return
    driver = built("edgeyolo_fake_cuda")
    assert driver is not None, "the test TensorRT is built and the simulated driver is not"
    monkeypatch.setenv("EDGEYOLO_CUDA_DRIVER", str(driver))
    simulation = Simulation(driver)
    simulation.reset()
    simulation.set_devices(2)
    yield Gpu(simulation, str(driver), str(tensorrt))
    end = time.monotonic() + 10  # a closed detector's worker thread ends in its own time
    gc.collect()
    while simulation.live(None) and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert simulation.violation_lines() == []
    assert simulation.reset() == 0, "handles of the driver were leaked"


@pytest.fixture
def simulated(gpu: Gpu) -> Simulation:
    if gpu.simulation is None:
        pytest.skip("on the simulated driver only")
    return gpu.simulation


@pytest.fixture
def context_kept(gpu: Gpu) -> Iterator[None]:
    """The test leaves the current CUDA context of this thread as it was."""
    before = _core.current_context()
    yield
    assert _core.current_context() == before
