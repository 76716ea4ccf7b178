"""Runs the warp's kernel in Triton's interpreter; prints as JSON how far its pixels are from the torch code's.

A process of its own: the interpreter must be on before Triton is imported.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
from edgeyolo.tools.train.warp import Columns, warp
from edgeyolo.tools.train.warp_triton import warp_fused

SIZE, PICTURES, BATCH = 40, 5, 4  # 1600 pixels: the last program has some that are not there


def table_of(rng: np.random.Generator, mixed: bool, perspective: bool, mosaic: bool) -> tuple[torch.Tensor, np.ndarray]:
    views = BATCH + (2 if mixed else 0)
    table = np.zeros((views, Columns.COUNT), np.float32)
    angle = rng.uniform(-0.5, 0.5, views)
    shift = rng.uniform(-9, 9, (2, views))
    table[:, Columns.INVERSE] = np.column_stack(
        (np.cos(angle), np.sin(angle), shift[0], -np.sin(angle), np.cos(angle), shift[1],
         *(rng.uniform(-0.001, 0.001, (2, views)) * perspective), np.ones(views))
    )  # fmt: skip
    table[:, Columns.CENTRE] = rng.integers(SIZE // 2, 3 * SIZE // 2, (views, 2)) if mosaic else 0
    table[:, Columns.CANVAS] = 2 * SIZE if mosaic else (33, SIZE)
    table[:, Columns.SLOTS] = rng.integers(0, PICTURES, (views, 4))
    table[:, Columns.SIDES] = rng.integers(SIZE // 2, SIZE + 1, (views, 8))
    table[:, Columns.HSV] = rng.uniform((-0.5, 0, 0), (0.5, 1.7, 1.4), (views, 3))
    partner = np.full(BATCH, -1)
    if mixed:
        partner[[1, 3]] = BATCH, BATCH + 1
    table[:, Columns.PARTNER], table[:BATCH, Columns.PARTNER] = -1, partner
    table[:, Columns.RATIO] = rng.uniform(0.3, 0.7, views)
    return torch.from_numpy(table), partner


def main() -> None:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (PICTURES, SIZE, SIZE, 3), dtype=np.uint8))
    pixels[0, :, :, 1:] = pixels[0, :, :, :1]  # grey: no hue
    rows = []
    for mixed in (False, True):
        for perspective in (False, True):
            for mosaic in (False, True):
                table, partner = table_of(rng, mixed, perspective, mosaic)
                wanted = warp(pixels, table, partner, perspective=perspective).permute(0, 2, 3, 1).int()
                found = warp_fused(pixels, table, BATCH, perspective).int()
                off = (found - wanted).abs()
                rows.append({"worst": int(off.max()), "share": float((off > 0).float().mean()),
                             "spread": float(wanted.float().std())})  # fmt: skip
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
