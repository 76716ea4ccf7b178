"""A 720p frame to boxes through ONNX Runtime's CUDA provider: edgeyolo against Ultralytics, on the same ONNX file.

    python benchmarks/onnx_cuda.py [--json benchmarks/results/onnx_cuda.json] [--rounds 300] [--conv-search HEURISTIC]

Needs an NVIDIA GPU, onnxruntime-gpu, torch with CUDA and Ultralytics. Random weights from YAML, class scores spread as
a trained model's (tests/test_ultralytics.py). Batch 1, TF32 as ONNX Runtime has it by default on both sides; then the
same graphs in FP16 with float32 input and output. Before anything is timed boxes are compared: one to one, in FP32 on
both sides, in a process of its own (onnx_cuda_boxes.py); what TF32 and FP16 make of them is printed for information.
The calls are interleaved (A B C D A B C D ...) over 16 rotating frames. Ratios hold for the medians; absolute times for
that GPU.
--device cpu tries the script without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from onnx_cuda_boxes import frames, rows_of

import edgeyolo
from box_difference import BoxDifference
from edgeyolo.onnx_network import OnnxNetwork

CONF, IOU = 0.25, 0.7
# label, YAML, whether the end-to-end head is exported
MODELS = [
    ("yolo26n", "yolo26n.yaml", False),
    ("yolo26n end2end", "yolo26n.yaml", True),
    ("yolov8n", "yolov8n.yaml", False),
]
WANTED = {
    "yolo26n": {"numpy": 2.3, "pinned buffer": 2.5},
    "yolo26n end2end": {"numpy": 2.3, "pinned buffer": 2.5},
    "yolov8n": {"numpy": 2.0, "pinned buffer": 2.2},
}


def export(yaml: str, end2end: bool, folder: Path) -> Path:
    import torch
    import ultralytics

    from test_ultralytics import PHOTOS, spread_scores

    torch.manual_seed(0)
    model = ultralytics.YOLO(yaml)
    model.model.eval()
    blob = np.empty((2, 3, 640, 640), np.float32)
    for planes, name in zip(blob, ("bus.jpg", "zidane.jpg"), strict=True):
        edgeyolo._core.LetterboxPool().run(cv2.imread(str(PHOTOS / name)), planes)
    settle_activations(model.model, torch.from_numpy(blob))
    spread_scores(model.model, blob)
    path = folder / f"{Path(yaml).stem}{'-end2end' if end2end else ''}.pt"
    model.ckpt_path = model.model.pt_path = str(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own, about tracing
        return Path(model.export(format="onnx", imgsz=640, nms=False if end2end else None, verbose=False))


def settle_activations(model: Any, images: Any) -> None:
    """Normalisation layers take the statistics of these images, as training would leave them: without that the
    activations of random weights shrink from layer to layer, to nothing in FP16."""
    import torch

    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    for layer in layers:
        layer.momentum = 1.0
    model.train()
    with torch.no_grad():
        model(images)
    model.eval()


def half(path: Path) -> Path:
    """The same graph in FP16; input, output and metadata stay."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    result = path.with_name(f"{path.stem}-fp16.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that become 0
        onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), result)
    return result


def boxes(path: Path, end2end: bool, device: Any) -> dict[str, Any]:
    """What onnx_cuda_boxes.py finds, in a process of its own: CUDA's libraries settle their arithmetic only once."""
    command = [sys.executable, str(Path(__file__).with_name("onnx_cuda_boxes.py")), str(path), "--device", str(device)]
    command += ["--end2end"] * end2end
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = done.stdout.strip().splitlines()
    if done.returncode not in (0, 1) or not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(lines[-1])
    return report


def timed(rounds: int, calls: dict[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 30):
        for name, call in calls.items():
            begun = time.perf_counter()
            call(index)
            spent = (time.perf_counter() - begun) * 1e3
            if index >= 30:
                samples[name].append(spent)
    return samples


def row(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": statistics.median(values), "p10": cuts[9], "p90": cuts[89], "p99": cuts[98]}


def measure(label: str, path: Path, end2end: bool, device: Any, rounds: int) -> dict[str, Any]:
    """One table: the comparison, then the times."""
    import ultralytics

    images = frames(16)
    peer = ultralytics.YOLO(str(path), task="detect")
    options = {"imgsz": 640, "conf": CONF, "iou": IOU, "max_det": 300, "device": device, "verbose": False}

    def theirs(image: Any) -> NDArray[Any]:
        result: NDArray[Any] = peer.predict(image, **options)[0].boxes.data.cpu().numpy()
        return result

    on_gpu = device != "cpu"
    model = edgeyolo.load(path, device=device, conf=CONF, iou=IOU)
    eager = edgeyolo.load(path, device=device, conf=CONF, iou=IOU, graph="off")
    pinned = [model.frame_buffer(720, 1280) for _ in images]
    for buffer, image in zip(pinned, images, strict=True):
        buffer[:] = image
    report: dict[str, Any] = {"graph": model.info().get("graph"), "providers": model.info()["providers"]}
    print(f"\n{label}: {report['graph'] and (report['graph']['path'], report['graph']['reason'])}")
    report["boxes"] = boxes(path, end2end, device)
    for other in ("to Ultralytics", "to our CPU"):
        found = report["boxes"][other]
        # In FP16 every choice of a kernel rounds otherwise, and a random network multiplies that: nothing to judge.
        judged = "for information" if "FP16" in label else "in bounds" if found["good"] else "OUT OF BOUNDS"
        print(f"  boxes {other}: {found['text']}   {judged}", flush=True)
    as_timed = BoxDifference(CONF)
    for image in images[:8]:
        as_timed.add(rows_of(model)(image), theirs(image))
    report["as timed, to Ultralytics"] = vars(as_timed)
    print(f"  boxes as timed, with TF32 and NMS, for information: {as_timed}")
    same = [model(image).to_json() == eager(image).to_json() for image in images[:8]]
    report["graph equals eager"] = all(same)
    handles = [model.submit(images[0]) for _ in range(8)]
    report["slots agree"] = len({handle.result().to_json() for handle in handles}) == 1
    print(f"  graph equals eager bit for bit: {all(same)}; slots agree bit for bit: {report['slots agree']}")
    calls: dict[str, Callable[[int], Any]] = {
        "Ultralytics, numpy": lambda i: peer.predict(images[i % 16], **options),
        "numpy": lambda i: model(images[i % 16]),
        "pinned buffer": lambda i: model(pinned[i % 16]),
        "numpy, without graph": lambda i: eager(images[i % 16]),
    }
    if on_gpu:
        import torch

        tensors = [torch.from_numpy(image).cuda() for image in images]
        torch.cuda.synchronize()
        calls["GPU frame"] = lambda i: model(tensors[i % 16])
    samples = timed(rounds, calls)
    base = statistics.median(samples["Ultralytics, numpy"])
    report["rows"] = {}
    for name, values in samples.items():
        numbers = row(values)
        ratio = base / numbers["p50"]
        wanted = WANTED.get(label, {}).get(name)
        note = "" if wanted is None else f"wanted {wanted}: {'yes' if ratio >= wanted else 'NO'}"
        report["rows"][name] = numbers | {"ratio": ratio, "wanted": wanted}
        print(
            f"  {name:22} p50 {numbers['p50']:7.3f} ms   p10-p90 {numbers['p10']:.3f}-{numbers['p90']:.3f}   "
            f"p99 {numbers['p99']:7.3f}   {ratio:5.2f}x  {note}",
            flush=True,
        )
    stages = [model(images[i % 16], timings=True).timings or {} for i in range(50)]
    report["stages"] = {key: statistics.median(stage[key] for stage in stages) for key in stages[0]}
    print(f"  stages, each waited for: { {key: round(value, 3) for key, value in report['stages'].items()} }")
    model.close()
    eager.close()
    return report


def write(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=2, default=str) + "\n", encoding="utf-8")
        partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--device", default=0, type=lambda text: int(text) if text.isdigit() else text)
    parser.add_argument("--models", nargs="*", choices=[label for label, _, _ in MODELS])
    parser.add_argument(
        "--conv-search", choices=["EXHAUSTIVE", "HEURISTIC", "DEFAULT"], help="of ours; see ONNX Runtime"
    )
    args = parser.parse_args()
    if args.conv_search:
        plain = OnnxNetwork.options
        OnnxNetwork.options = lambda self, graph, tf32: {  # type: ignore[method-assign]
            **plain(self, graph, tf32),
            "cudnn_conv_algo_search": args.conv_search,
        }
    import onnxruntime
    import torch
    import ultralytics

    report: dict[str, Any] = {
        "command": "python benchmarks/onnx_cuda.py",
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "versions": {
            "edgeyolo": edgeyolo.__version__,
            "onnxruntime": onnxruntime.__version__,
            "torch": torch.__version__,
            "ultralytics": ultralytics.__version__,
            "python": platform.python_version(),
        },
        "conv_search": args.conv_search or "ONNX Runtime's default",
        "rounds": args.rounds,
        "tables": {},
    }
    print(report["gpu"], report["versions"])
    failed = False
    with tempfile.TemporaryDirectory() as name:
        exported: dict[str, Path] = {}
        for precision in ("", " FP16"):
            for label, yaml, end2end in MODELS:
                if args.models and label not in args.models:
                    continue
                try:
                    if label not in exported:
                        exported[label] = export(yaml, end2end, Path(name))
                    path = half(exported[label]) if precision else exported[label]
                    table = measure(label + precision, path, end2end, args.device, args.rounds)
                except Exception as error:
                    table = {"failed": f"{type(error).__name__}: {error}"}
                    print(f"\n{label + precision} FAILED: {table['failed']}", file=sys.stderr, flush=True)
                # In FP16 another choice of kernels rounds otherwise.
                failed |= "failed" in table or not (precision or table["boxes"]["good"])
                failed |= any(one["ratio"] < (one["wanted"] or 0) for one in table.get("rows", {}).values())
                report["tables"][label + precision] = table
                write(args.json, report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
