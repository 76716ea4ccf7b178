"""What fine-tuning makes of the shipped weights: against Ultralytics' trainer, and with a class that is new.

    python benchmarks/finetune_quality.py                        on an H200, about nine minutes
    EDGEYOLO_DATA=data.yaml python benchmarks/finetune_quality.py --only parity
    python benchmarks/finetune_quality.py --tiny                 the same code on a CPU, at sizes that mean nothing

parity: 12 epochs at batch 64 from signs.pt, three seeds each, in turns; COCO's mAP50-95 of either side's best.pt,
measured by the same code. No mirroring: a mirrored sign is another one. new_class: 200 pictures with a ninth sign, from
the .pt to a published model in one command; the backbone is frozen and pictures are nearly whole, so that the old signs
stay.
"""

# ruff: noqa: I001 (train_common makes edgeyolo.tools importable from a checkout, so it comes first)

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train_common import Rows, main

from finetune_common import SIGNS, Ours, Theirs, signs_data

import edgeyolo
from edgeyolo.cli import main as command
from edgeyolo.pictures import read_picture
from edgeyolo.tools.dataset import check_labels, read_data
from edgeyolo.tools.metrics import Metrics, pairwise_iou
from edgeyolo.tools.train.checkpoint import load_for_training
from edgeyolo.tools.train.evaluate import evaluate

NEW = "beacon"
NOISE = 0.01  # above this standard deviation nothing can be said about a difference of it


def measured(checkpoint: Path, data: Path, imgsz: int, device: torch.device, *, only: int | None = None) -> Metrics:
    """only: the first classes alone, of the labels too: for a checkpoint that knows no others."""
    given = read_data(data)
    report = check_labels(given.val, given.names)
    names = {key: name for key, name in given.names.items() if only is None or key < only}
    labels = [rows[rows[:, 0] < len(names)] for rows in report.labels]
    model = load_for_training(checkpoint).model.to(device)
    return evaluate(model, report.pictures, labels, names, imgsz=imgsz)


def parity(rows: Rows, device: torch.device, tiny: bool) -> None:
    count, val, imgsz, batch, epochs, seeds = (8, 4, 64, 4, 1, 2) if tiny else (2048, 400, 640, 64, 12, 3)
    with tempfile.TemporaryDirectory(prefix="finetune_quality_") as name:
        folder = Path(name)
        data = signs_data(folder, count, val, imgsz)
        rows.put(what="start", map50_95=round(measured(SIGNS, data, imgsz, device).map50_95, 4))
        common: dict[str, Any] = {"epochs": epochs, "imgsz": imgsz, "batch": batch}
        found: dict[str, list[float]] = {"ultralytics": [], "edgeyolo": []}
        for seed in range(seeds):
            for side in found:
                with rows.attempt(side=side, seed=seed):
                    out = folder / f"{side}-{seed}"
                    run: Ours | Theirs
                    if side == "edgeyolo":
                        run = Ours(SIGNS, data, out, seed=seed, augment={"fliplr": 0}, device=str(device), **common)
                        best = run.result.best
                    else:
                        place = 0 if device.type == "cuda" else "cpu"
                        run = Theirs(
                            SIGNS, data, out, workers=0 if tiny else 8, seed=seed, fliplr=0.0, device=place, **common
                        )
                        best = run.best
                    metrics = measured(best, data, imgsz, device)
                    found[side].append(metrics.map50_95)
                    rows.put(
                        side=side, seed=seed, map50_95=round(metrics.map50_95, 4), map50=round(metrics.map50, 4),
                        whole_s=round(run.seconds["whole"], 1), epochs=[round(value, 4) for value in run.maps],
                    )  # fmt: skip
        if all(len(values) == seeds for values in found.values()):
            means = {side: statistics.mean(values) for side, values in found.items()}
            spread = {side: statistics.stdev(values) for side, values in found.items()}
            difference = means["edgeyolo"] - means["ultralytics"]
            verdict = "within 0.01" if abs(difference) <= NOISE else "apart by more than 0.01"
            rows.put(
                what="parity", means={side: round(value, 4) for side, value in means.items()},
                deviations={side: round(value, 4) for side, value in spread.items()}, difference=round(difference, 4),
                verdict="inconclusive: the seeds differ by more" if max(spread.values()) > NOISE else verdict,
            )  # fmt: skip


def with_new_sign(image: np.ndarray[Any, Any], taken: np.ndarray[Any, Any], rng: np.random.Generator) -> Any:
    """Draws a violet hexagon with a white bar where no other sign is; (image, its box as cx, cy, w, h) or None."""
    import cv2

    height, width = image.shape[:2]
    for _ in range(30):
        radius = rng.uniform(0.05, 0.16) * min(height, width)
        centre = rng.uniform(radius, [width - radius, height - radius])
        turn = rng.uniform(-0.2, 0.2)
        angles = turn + np.arange(6) * np.pi / 3
        corners = centre + radius * np.column_stack((np.cos(angles), np.sin(angles)))
        box = np.concatenate((corners.min(0), corners.max(0)))
        if len(taken) and pairwise_iou(box[None], taken).max() > 0:
            continue
        colour = np.array([190, 40, 150]) * rng.uniform(0.6, 1.2) + rng.uniform(-20, 20, 3)
        cv2.fillPoly(image, [np.rint(corners * 16).astype(np.int32)], colour.clip(0, 255).tolist(), cv2.LINE_AA, 4)
        along = radius * 0.55 * np.array([np.cos(turn), np.sin(turn)])
        ends = [tuple(np.rint(centre + sign * along).astype(int).tolist()) for sign in (-1, 1)]
        cv2.line(image, ends[0], ends[1], (235, 235, 235), max(1, round(radius / 4)), cv2.LINE_AA)
        size = box[2:] - box[:2]
        return image, ((box[:2] + size / 2) / (width, height)).tolist() + (size / (width, height)).tolist()
    return None


def nine_classes(folder: Path, train: int, val: int, imgsz: int) -> Path:
    """Drawn signs, old and new in one picture; pictures without room for the new one are passed over."""
    import cv2
    from edgeyolo.examples.signs import CLASSES
    from edgeyolo.examples.signs.dataset import picture

    for split, wanted in (("train", train), ("val", val)):
        images, labels = folder / "images" / split, folder / "labels" / split
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        index = made = 0
        while made < wanted:
            _, jpeg, text = picture("train" if split == "train" else "val", index, imgsz, seed=9)
            index += 1
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
            height, width = image.shape[:2]
            rows = np.array([line.split() for line in text.splitlines()], np.float64).reshape(-1, 5)
            middle, side = rows[:, 1:3] * (width, height), rows[:, 3:5] * (width, height)
            drawn = with_new_sign(
                image,
                np.hstack((middle - side / 2, middle + side / 2)),
                np.random.default_rng([9, split == "val", index]),
            )
            if drawn is None:
                continue
            cv2.imwrite(str(images / f"{made:04}.jpg"), drawn[0], [cv2.IMWRITE_JPEG_QUALITY, 90])
            own = " ".join(f"{value:.6f}" for value in drawn[1])
            (labels / f"{made:04}.txt").write_text(f"{text}{len(CLASSES)} {own}\n")
            made += 1
    names = "".join(f"  {key}: {name}\n" for key, name in enumerate((*CLASSES, NEW)))
    (folder / "data.yaml").write_text(f"train: images/train\nval: images/val\nnames:\n{names}")
    return folder / "data.yaml"


def new_class(rows: Rows, device: torch.device, tiny: bool) -> None:
    count, val, imgsz, epochs = (16, 16, 128, 1) if tiny else (200, 200, 640, 100)
    with tempfile.TemporaryDirectory(prefix="finetune_new_") as name:
        folder = Path(name)
        data, run, to = nine_classes(folder / "data", count, val, imgsz), folder / "run", folder / "door"
        old = len(read_data(data).names) - 1
        before = measured(SIGNS, data, imgsz, device, only=old)
        words = ["finetune", str(SIGNS), "--data", str(data), "--epochs", str(epochs), "--imgsz", str(imgsz)]
        words += ["--batch", "16", "--freeze", "11", "--augment", "fliplr=0", "mosaic=0", "scale=0.25"]
        words += ["--device", str(device), "--out", str(run)]
        begun = time.perf_counter()
        code = command([*words, "--then", "export,publish", "--to", str(to)])
        seconds = time.perf_counter() - begun
        after = measured(run / "best.pt", data, imgsz, device)
        old_after = float(np.mean([after.classes[key].ap50_95 for key in range(old)]))
        published = {}
        if (to / "current").exists():
            with edgeyolo.load(to) as detector:
                shown = [detector(read_picture(path)) for path in read_data(data).val]
                found = sum(bool((each.class_ids == old).any()) for each in shown)
                published = {"pictures": len(shown), "with the new sign found": found}
        rows.put(
            what="new class", exit_code=code, seconds=round(seconds, 1), pictures=count, epochs=epochs,
            new_ap50=round(after.classes[old].ap50, 4), new_ap50_95=round(after.classes[old].ap50_95, 4),
            old_before=round(before.map50_95, 4), old_after=round(old_after, 4),
            old_lost=round(before.map50_95 - old_after, 4), wanted="at most 0.02", published=published,
        )  # fmt: skip


if __name__ == "__main__":
    sections = {"parity": (400, parity), "new_class": (170, new_class)}
    main(__file__, sections, default=["new_class", "parity"], budget=570)
