"""A 720p frame to boxes through ONNX Runtime's CUDA provider: edgeyolo against Ultralytics, on the same ONNX file.

    python benchmarks/onnx_cuda.py [--json benchmarks/results/onnx_cuda.json] [--rounds 300] [--conv-search HEURISTIC]

Needs an NVIDIA GPU, onnxruntime-gpu, torch with CUDA and Ultralytics. Random weights from YAML, class scores spread as
a trained model's (tests/test_ultralytics.py). Batch 1, TF32 as ONNX Runtime has it by default on both sides; then the
same graphs in FP16 with float32 input and output. Boxes are compared before anything is timed. The calls are
interleaved (A B C D A B C D ...) over 16 rotating frames. Ratios hold for the medians; absolute times for that GPU.
--device cpu tries the script without a GPU; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

import edgeyolo
from edgeyolo.onnx_network import OnnxNetwork

BOX_BOUND, SCORE_BOUND = 0.05, 1e-4
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


def frames(count: int) -> list[NDArray[np.uint8]]:
    from test_ultralytics import PHOTOS

    photos = [cv2.resize(cv2.imread(str(PHOTOS / name)), (1280, 720)) for name in ("bus.jpg", "zidane.jpg")]
    return [np.ascontiguousarray(np.roll(photos[i % 2], 40 * (i // 2), axis=1)) for i in range(count)]


class Difference:
    """How far two lists of boxes are apart, over many images. Boxes within 1e-3 of the threshold may lack a partner."""

    def __init__(self) -> None:
        self.boxes, self.pixels, self.score, self.unmatched = 0, 0.0, 0.0, 0

    def add(self, ours: NDArray[Any], theirs: NDArray[Any], score_window: float) -> None:
        """Rows of x1, y1, x2, y2, score, class. A partner has the same class and a score within the window."""
        unused = set(range(len(theirs)))
        for row in ours:
            near = [i for i in unused if theirs[i, 5] == row[5] and abs(theirs[i, 4] - row[4]) <= score_window]
            apart = {i: float(np.abs(theirs[i, :4] - row[:4]).max()) for i in near}
            best = min(apart, key=lambda i: apart[i], default=None)
            if best is None or apart[best] > 5:
                self.unmatched += bool(row[4] > CONF + 1e-3)
                continue
            unused.discard(best)
            self.boxes += 1
            self.pixels = max(self.pixels, apart[best])
            self.score = max(self.score, float(abs(theirs[best, 4] - row[4])))
        self.unmatched += sum(bool(theirs[i, 4] > CONF + 1e-3) for i in unused)

    def good(self) -> bool:
        return self.boxes > 0 and self.pixels <= BOX_BOUND and self.score <= SCORE_BOUND and not self.unmatched

    def __str__(self) -> str:
        return (
            f"{self.boxes} boxes, largest difference {self.pixels:.4f} px and {self.score:.2e} in score, "
            f"{self.unmatched} without a partner"
        )


def rows_of(result: edgeyolo.Detections) -> NDArray[Any]:
    return np.column_stack([result.boxes, result.scores, result.class_ids])


def compare(a: Callable[[Any], NDArray[Any]], b: Callable[[Any], NDArray[Any]], images: Sequence[Any]) -> Difference:
    difference = Difference()
    for image in images:
        difference.add(a(image), b(image), 0.05)
    return difference


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


def measure(label: str, path: Path, device: Any, rounds: int) -> dict[str, Any]:
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

    difference = compare(lambda image: rows_of(model(image)), theirs, images[:8])
    report["to Ultralytics"] = vars(difference) | {"good": difference.good()}
    print(f"  against Ultralytics: {difference} {'' if difference.good() else '  OUT OF BOUNDS'}")
    same = [model(image).to_json() == eager(image).to_json() for image in images[:8]]
    report["graph equals eager"] = all(same)
    handles = [model.submit(images[0]) for _ in range(8)]
    report["slots agree"] = len({handle.result().to_json() for handle in handles}) == 1
    print(f"  graph equals eager bit for bit: {all(same)}; slots agree bit for bit: {report['slots agree']}")
    if on_gpu and "FP16" not in label:
        with (
            edgeyolo.load(path, device=device, conf=CONF, iou=IOU, tf32=False) as exact,
            edgeyolo.load(path, device="cpu", conf=CONF, iou=IOU) as cpu,
        ):
            difference = compare(lambda image: rows_of(exact(image)), lambda image: rows_of(cpu(image)), images[:4])
        report["to our CPU, TF32 off"] = vars(difference) | {"good": difference.good()}
        print(f"  without TF32 against our CPU: {difference} {'' if difference.good() else '  OUT OF BOUNDS'}")

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
                    table = measure(label + precision, path, args.device, args.rounds)
                except Exception as error:
                    table = {"failed": f"{type(error).__name__}: {error}"}
                    print(f"\n{label + precision} FAILED: {table['failed']}", file=sys.stderr, flush=True)
                failed |= "failed" in table or not (precision or table["to Ultralytics"]["good"])
                failed |= any(one["ratio"] < (one["wanted"] or 0) for one in table.get("rows", {}).values())
                report["tables"][label + precision] = table
                write(args.json, report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
