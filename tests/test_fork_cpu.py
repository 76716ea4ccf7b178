"""A detector on the CPU in a forked process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from models import mean_colour

FORK = """
import os, signal, sys, threading
import numpy as np
import edgeyolo
from edgeyolo import EngineError, session

image = np.full((64, 64, 3), (0, 0, 255), np.uint8)
model = edgeyolo.load({path!r}, conf=0.1)
wanted = model(image).to_dict()

class Held:
    # A session that another thread is inside of: whoever comes waits for it.
    lock = threading.Lock()
    def __init__(self, real): self.real = real
    def __getattr__(self, name): return getattr(self.real, name)
    def run(self, *args):
        with self.lock:
            return self.real.run(*args)

network = model._running.backend._parts.network
network._session = Held(network._session)
with Held.lock:
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a child that waits for ever
        {change}
        try:
            assert model(image).to_dict() == wanted
            assert model.submit(image).result().to_dict() == wanted and model([image])[0].to_dict() == wanted
            assert model.info()["device"] == "cpu"
            model.close()
            os._exit(0)
        except EngineError as error:
            print(error, flush=True)
            os._exit(7)
_, status = os.waitpid(child, 0)
assert model(image).to_dict() == wanted, "the parent goes on"
sys.exit(os.waitstatus_to_exitcode(status) % 256)
"""


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [("pass", 0, ""), ("os.utime({path!r}, ns=(1, 1))", 7, "has changed since it was loaded")],
)
def test_a_child_loads_the_model_anew(change: str, code: int, told: str, tmp_path: Path) -> None:
    path = str(mean_colour(tmp_path / "m.onnx"))
    program = FORK.format(path=path, change=change.format(path=path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, told in done.stdout) == (code, True), done.stderr
