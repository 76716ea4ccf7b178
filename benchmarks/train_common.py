"""What the training benchmarks share: sections with time limits, JSON rows, interleaved timing, both sides' steps.

Runs from a checkout too, without the package being built: then only `edgeyolo.errors` of the runtime is loaded.
"""

from __future__ import annotations

# ruff: noqa: I001

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_OFFLINE", "1")
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def from_checkout() -> None:
    """Makes edgeyolo.tools importable where the package is not installed."""
    try:
        import edgeyolo
    except ImportError:
        edgeyolo = types.ModuleType("edgeyolo")
        edgeyolo.__path__ = [str(ROOT / "python" / "edgeyolo")]
        sys.modules["edgeyolo"] = edgeyolo
    try:
        import edgeyolo.tools
    except ImportError:
        tools = types.ModuleType("edgeyolo.tools")
        tools.__path__ = [str(ROOT / "tools")]
        sys.modules["edgeyolo.tools"] = tools


from_checkout()

import torch
from edgeyolo.tools.train.graph import CudaRecorder
from edgeyolo.tools.train.loss import pack_targets
from edgeyolo.tools.train.step import detection_step

from train_reference import Batch, Reference, random_batch, yolo

NC = 80
GIB = 2**30
Call = Callable[[], Any]


class Rows:
    """Writes each result as a line of JSON when it is known."""

    def __init__(self, path: Path) -> None:
        self.path, self.section, self.begun = path, "", time.monotonic()

    def put(self, **values: Any) -> None:
        row = {"section": self.section, **values, "at": round(time.monotonic() - self.begun, 1)}
        line = json.dumps(row, default=str)
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    @contextmanager
    def attempt(self, **labels: Any) -> Iterator[None]:
        """A failure becomes a row; the next configuration still runs. A time limit ends the section."""
        try:
            yield
        except TimeoutError:
            raise
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.put(
                **labels, error=f"{type(error).__name__}: {str(error)[:300]}", where=f"{place.name}:{place.lineno}"
            )
            if context_lost(error):
                raise  # the driver starts a new process for the remaining sections
        finally:
            release()


def context_lost(error: Exception) -> bool:
    """Whether every later CUDA call of this process would fail too."""
    return "illegal" in str(error) or ("CUDA error" in str(error) and "capture" not in str(error))


Section = tuple[float, Callable[[Rows, torch.device, bool], None]]  # seconds at most; (rows, device, tiny)


def main(script: str, sections: dict[str, Section], *, default: list[str], budget: float) -> None:
    """Runs the sections in a child process, in a new one where a section took the process down."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", help=f"comma-separated, of: {' '.join(sections)}")
    parser.add_argument("--budget", type=float, default=budget, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of the script itself; runs on a CPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else default
    unknown = [name for name in wanted if name not in sections]
    if unknown:
        parser.error(f"no section {unknown[0]!r}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{Path(script).stem}.jsonl"
    if args.child:
        child(Rows(path), sections, wanted, args.budget, args.tiny)
        return
    path.write_text("")
    begun = time.monotonic()
    while wanted:
        left = args.budget - (time.monotonic() - begun)
        if left < 10:
            print(f"no time left for {', '.join(wanted)}")
            break
        command = [sys.executable, script, "--child", "--only", ",".join(wanted), "--budget", str(left)]
        command += ["--out", str(args.out)] + (["--tiny"] if args.tiny else [])
        process = subprocess.Popen(command)
        try:
            process.wait(left + 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        done = {row["section"] for row in rows if row.get("event") == "begin"}
        if not done & set(wanted):
            print(f"the process ended with {process.returncode} before any section began")
            break
        wanted = [name for name in wanted if name not in done]
    print(f"{time.monotonic() - begun:.0f} s, rows in {path}")


def installed(package: str) -> str:
    try:
        return version_of(package)
    except PackageNotFoundError:  # unpacked beside the script
        return str(getattr(sys.modules.get(package), "__version__", "unknown"))


def processor() -> str:
    """The CPU's name, as Linux has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def child(rows: Rows, sections: dict[str, Section], wanted: list[str], budget: float, tiny: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        sys.exit("no CUDA device; --tiny runs this script at small sizes on a CPU")

    def stop(*_: Any) -> None:
        raise TimeoutError

    can_alarm = hasattr(signal, "SIGALRM")
    if can_alarm:
        signal.signal(signal.SIGALRM, stop)
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        rows.put(
            event="machine", gpu=name, sm=capability, cpu=processor(), cores=os.cpu_count(), torch=torch.__version__,
            cudnn=torch.backends.cudnn.version(), triton=installed("triton"), ultralytics=installed("ultralytics"),
        )  # fmt: skip
    for name in wanted:
        limit, run = sections[name]
        left = budget - (time.monotonic() - rows.begun)
        rows.section = name
        if left < 8:
            rows.put(error=f"not run: {left:.0f} s left")
            continue
        rows.put(event="begin")
        begun = time.monotonic()
        if can_alarm:
            signal.alarm(max(1, int(min(limit, left))))
        try:
            run(rows, device, tiny)
        except TimeoutError:
            rows.put(error=f"stopped after {time.monotonic() - begun:.0f} s, its limit")
        except Exception as error:
            rows.put(error=f"{type(error).__name__}: {str(error)[:300]}")
            if context_lost(error):
                os._exit(1)  # an ordinary exit would free CUDA memory, which fails or hangs by now
        finally:
            if can_alarm:
                signal.alarm(0)
        release()
        rows.put(event="end", seconds=round(time.monotonic() - begun, 1))


# ------------------------------------------------------------------------------------------------ measuring
def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):  # after a fault, which has its row already
            torch.cuda.empty_cache()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def turn(call: Call, count: int) -> float:
    """Milliseconds of one call, over `count` calls."""
    wait()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return (time.perf_counter() - begun) * 1e3 / count


def interleaved(calls: dict[str, Call], *, rounds: int = 7, turn_ms: float = 250.0) -> dict[str, dict[str, Any]]:
    """All calls in turn, `rounds` times: median, lowest and highest milliseconds of each, and the first one's time over
    each one's, as a median and spread over rounds. A turn repeats its call for about `turn_ms`."""
    counts = {}
    for name, call in calls.items():
        once = min(turn(call, 1), turn(call, 1))
        counts[name] = max(1, min(40, round(turn_ms / max(once, 1e-3))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(turn(call, counts[name]))
    first = next(iter(calls))
    result = {}
    for name, times in samples.items():
        ratios = sorted(a / b for a, b in zip(samples[first], times, strict=True))
        result[name] = {
            "ms": round(statistics.median(times), 3), "low": round(min(times), 3), "high": round(max(times), 3),
            "ratio": round(statistics.median(ratios), 2), "ratio_low": round(ratios[0], 2),
            "ratio_high": round(ratios[-1], 2),
        }  # fmt: skip
    return result


def host_syncs(call: Call) -> int:
    """Calls in which the host waits for the device, as torch reports them; -1 without CUDA."""
    if not torch.cuda.is_available():
        return -1
    wait()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(w.message) for w in caught)


class Built:
    """Makes a contender, runs its first steps, and notes what that took: seconds and peak memory of its own; of ours
    also the first loss, which all forms of the step share."""

    def __init__(self, make: Callable[[], Call], warm: int = 3) -> None:
        release()
        cuda = torch.cuda.is_available()
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        self.call = make()
        self.call()
        wait()
        self.start_s = round(time.perf_counter() - begun, 2)
        step = getattr(self.call, "step", None)
        self.first_loss = None if step is None else round(step.total.item(), 4)
        for _ in range(warm - 1):
            self.call()
        wait()
        self.peak_gib = round((torch.cuda.max_memory_allocated() - before) / GIB, 3) if cuda else 0.0
        self.syncs = host_syncs(self.call)

    def facts(self) -> dict[str, Any]:
        facts = {"start_s": self.start_s, "peak_gib": self.peak_gib, "host_syncs": self.syncs}
        return facts if self.first_loss is None else {**facts, "first_loss": self.first_loss}


def recorded(run: Call, device: torch.device, changes: Sequence[torch.Tensor] = ()) -> Call:
    """A plain function as a CUDA graph, warmed up without a trace in `changes`; as it is on a CPU."""
    if device.type != "cuda":
        return run
    recorder = CudaRecorder(device)
    recorder.warm_up(run, changes)
    return recorder.record(run)


# ------------------------------------------------------------------------------------------------ both sides
def sample(batch: int, imgsz: int, device: torch.device, seed: int = 0, most: int = 24) -> Batch:
    return {k: v.to(device) for k, v in random_batch(seed, batch, imgsz, NC, most).items()}


def padded(data: Batch, device: torch.device, boxes: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    labels = [data[k].cpu() for k in ("batch_idx", "cls", "bboxes")]
    targets, mask = pack_targets(*labels, batch=len(data["img"]), nc=NC, size=boxes)
    return data["img"], targets.to(device), mask.to(device)


def theirs(name: str, data: Batch, device: torch.device, optimizer: str = "MuSGD") -> Call:
    """Ultralytics' eager step: fp16 autocast, channels_last, clipping, EMA."""
    model = yolo(name, NC).to(device).to(memory_format=torch.channels_last)
    reference = Reference(model, optimizer=optimizer, lr=1e-4, weight_decay=5e-4, amp=device.type == "cuda")

    def step() -> None:
        reference.step(data, read=False)

    return step


def ours(name: str, data: Batch, device: torch.device, *, boxes: int = 64, **options: Any) -> Call:
    settings: dict[str, Any] = {"amp": "fp16" if device.type == "cuda" else "off", "lr": 1e-4} | options
    step = detection_step(yolo(name, NC).to(device), **settings)
    batch = padded(data, device, boxes)

    def call() -> None:
        step(*batch)

    call.step = step  # type: ignore[attr-defined]
    return call
