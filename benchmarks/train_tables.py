"""Turns the rows of the training benchmarks into the tables of docs/training-step.md, in place.

    python benchmarks/train_tables.py            rewrites the tables
    python benchmarks/train_tables.py --check    only says whether they are those of the results (exit status)

Reads benchmarks/results/train_{step,seeds,start}.jsonl, train_profile.json and train_profile_plain.json. Runs may be
appended to the .jsonl files: of each section the last run counts. A table lies between the comments
`<!-- table NAME -->` and `<!-- end -->`; a section that was never run has an empty one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]

# What others published for the same ideas: pull requests of Ultralytics, whole steps unless they say otherwise.
B200 = "yolo26x, B200 (#26180)"
PUBLISHED = {
    "deterministic mode: no fill of new tensors": f"step 206.2 to 181.2 ms, {B200}",
    "AdamW: fused": f"step 217.2 to 214.0 ms, {B200}",
    "EMA: cached pairs": f"step 214.0 to 208.8 ms, {B200}",
    "loss, forward + backward: dense assignment, no host reads": f"step 208.8 to 207.5 ms, four reads of many, {B200}",
    "SiLU out of place, our eager step": f"step 228.3 to 217.2 ms, {B200}",
    "MuSGD: batched Newton-Schulz": "optimizer 62.2 to 7.7 ms, training 1.33x, yolo26n, RTX PRO 6000 (#25288)",
    "the whole step as one graph": f"all of the above without a graph: step 228.9 to 183.5 ms, {B200}",
}


def latest(lines: Iterable[str]) -> dict[str, list[Row]]:
    """Rows of each section's last run. The machine's rows come under ""."""
    sections: dict[str, list[Row]] = {}
    for line in lines:
        row = json.loads(line)
        if row.get("event") == "begin":
            sections[row["section"]] = []
        elif row.get("event") != "end":
            sections.setdefault(row["section"], []).append(row)
    return sections


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def digits(value: float) -> str:
    """Three or four significant digits, in plain notation."""
    return f"{value:.{3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0}f}"


def span(row: Row) -> str:
    """Median of milliseconds, with lowest and highest where they differ."""
    median, low, high = (digits(row[key]) for key in ("ms", "low", "high"))
    return median if low == high else f"{median} ({low} to {high})"


def ratio(row: Row) -> str:
    """How many times faster than the first of its contest, with the spread over rounds."""
    if row["ratio_low"] == row["ratio_high"] == 1:
        return "1"
    low, high = digits(row["ratio_low"]), digits(row["ratio_high"])
    return f"{digits(row['ratio'])} ({low} to {high})"


def steps(rows: list[Row], label: str) -> str:
    """Whole steps of several contenders; `label` is the column that tells contests apart."""
    shown = [
        [str(r[label]), r["what"], span(r), ratio(r), f"{r['peak_gib']:.2f}", f"{r['start_s']:.1f}",
         str(r["host_syncs"])]
        for r in sorted(rows, key=lambda r: r.get(label, 0) if label == "batch" else 0) if "ms" in r
    ]  # fmt: skip
    head = [label, "step", "ms (lowest to highest)", "times as fast", "peak GiB", "first step, s", "host reads"]
    return table(head, shown) if shown else ""


def timed(rows: list[Row], *labels: str, reads: bool = False) -> str:
    shown = [
        [*(str(r[k]) for k in labels), span(r), ratio(r), *([str(r["host_syncs"])] if reads else [])]
        for r in sorted(rows, key=lambda r: r.get("batch", 0)) if "ms" in r
    ]  # fmt: skip
    return table([*labels, "ms", "times as fast", *(["host reads"] if reads else [])], shown) if shown else ""


def seeds(sections: dict[str, list[Row]]) -> str:
    rows, previous = [], ""
    for row in (r for name, part in sections.items() if name for r in part if "ms" in r):
        first = row["seed"] != previous
        previous = row["seed"]
        published = PUBLISHED.get(previous, "") if first else ""
        rows.append([previous if first else "", row["what"], span(row), ratio(row), published])
    return table(["idea", "what ran", "ms", "times as fast", "published for it"], rows) if rows else ""


def profile(fused: Row, plain: Row) -> str:
    names = list(fused["groups"]) + [g for g in plain["groups"] if g not in fused["groups"]]

    def cells(result: Row, name: str) -> list[str]:
        time, count = result["groups"].get(name, (0.0, 0))
        return [f"{time / 1e3:.2f}", str(count)]

    rows = [[name, *cells(plain, name), *cells(fused, name)] for name in names]
    total = [[f"**{key}**", str(plain[at]), "", str(fused[at]), ""]
             for key, at in (("device busy, ms", "busy_ms"), ("step, ms", "ms"), ("graph nodes", "nodes"),
                             ("peak GiB", "peak_gib"))]  # fmt: skip
    return table(["kernels", "BatchNorm, SiLU: ms", "launches", "fused: ms", "launches"], rows + total)


def losses(rows: list[Row]) -> str:
    row = next((r for r in rows if r.get("what") == "loss of 4 steps on one batch"), None)
    if row is None:
        return ""
    curves = [(k, v) for k, v in row.items() if isinstance(v, list)]
    return table(["", *(f"loss {i + 1}" for i in range(4))], [[k, *(f"{x:.4f}" for x in v)] for k, v in curves])


def norms(rows: list[Row]) -> str:
    shown = [
        [" x ".join(map(str, r["shape"])), f"{r['torch_ms']:.3f}", f"{r['fused_ms']:.3f}", f"{r['fused_ratio']:.2f}"]
        for r in rows if str(r.get("what", "")).startswith("norm time") and "fused_ms" in r
    ]  # fmt: skip
    head = ["feature map (N x C x H x W)", "BatchNorm, SiLU: ms", "fused: ms", "times as fast"]
    return table(head, shown) if shown else ""


def layers(rows: list[Row]) -> str:
    shown = [
        [r.get("layer", "pictures"), " x ".join(map(str, r["shape"])), f"{r['torch_ms']:.3f}", f"{r['ours_ms']:.3f}",
         f"{r['torch_ms'] / r['ours_ms']:.2f}"]
        for r in rows if r.get("what") in ("layer", "pictures") and "ours_ms" in r
    ]  # fmt: skip
    head = ["layer", "input (N x C x H x W)", "torch: ms", "ours: ms", "times as fast"]
    return table(head, shown) if shown else ""


def long_run(rows: list[Row]) -> str:
    row = next((r for r in rows if "reserved_gib" in r), None)
    if row is None:
        return ""
    memory = row["reserved_gib"]
    return (
        f"{row['what']}: {row['captures']} captures in {row['capture_seconds']:.1f} s, {row['replays']} replays, "
        f"{row['eager']} eager steps,\n{row['skipped']} skipped while the loss scale settled; reserved memory "
        f"{memory[0]} GiB after the last capture, {memory[-1]} GiB at the end."
    )


def starts(rows: list[Row]) -> str:
    shown = [[r["compiled"], r["cache"], f"{r['first_step_s']:.1f}"] for r in rows if "first_step_s" in r]
    return table(["kernels compiled", "Triton's cache", "first step, s"], shown) if shown else ""


def machine(rows: list[Row]) -> str:
    row = [r for r in rows if r.get("event") == "machine"][-1]
    parts = [row["gpu"], f"torch {row['torch']}", f"cuDNN {row['cudnn']}"]
    parts += [f"Triton {row['triton']}"] if "triton" in row else []
    parts += [f"{row['cpu']} ({row['cores']} cores)"] if "cpu" in row else []
    return ", ".join(parts) + "; Ultralytics 8.4.190."


def render(results: Path) -> dict[str, str]:
    """Name of a table to its Markdown."""
    step = latest((results / "train_step.jsonl").read_text(encoding="utf-8").splitlines())
    seed = latest((results / "train_seeds.jsonl").read_text(encoding="utf-8").splitlines())
    start = latest((results / "train_start.jsonl").read_text(encoding="utf-8").splitlines())
    profiles = [json.loads((results / f"train_profile{x}.json").read_text(encoding="utf-8")) for x in ("", "_plain")]

    def section(name: str, make: Callable[[list[Row]], str]) -> str:
        return make(step.get(name, []))

    return {
        "machine": section("", machine),
        "step": section("step", lambda rows: steps(rows, "batch")),
        "models": section("models", lambda rows: steps(rows, "model")),
        "adamw": section("adamw", lambda rows: steps(rows, "batch")),
        "compiled": steps([r for k in ("loss_compiled", "all_compiled") for r in step.get(k, [])], "batch"),
        "bare": section("bare", lambda rows: timed(rows, "batch", "what")),
        "optimizer": section("optimizer", lambda rows: timed(rows, "what", reads=True)),
        "losses": section("check", losses),
        "norms": section("check", norms),
        "layers": section("check", layers),
        "start": starts(start.get("", [])),
        "long": section("long", long_run),
        "seeds": seeds(seed),
        "profile": profile(*profiles),
    }


def replaced(text: str, tables: dict[str, str]) -> str:
    """`text` with every marked table renewed."""

    def renew(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in tables:
            raise SystemExit(f"unknown table {name!r}; known: {', '.join(tables)}")
        body = tables[name]
        return f"<!-- table {name} -->\n" + (f"\n{body}\n\n" if body else "") + "<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->\n.*?<!-- end -->", renew, text, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the tables are not current")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "training-step.md")
    args = parser.parse_args()
    before = args.page.read_text(encoding="utf-8")
    after = replaced(before, render(args.results))
    if args.check:
        sys.exit(0 if before == after else f"{args.page.name} differs from the results: run benchmarks/train_tables.py")
    partial = args.page.with_suffix(".partial")
    partial.write_text(after, encoding="utf-8")
    partial.replace(args.page)


if __name__ == "__main__":
    main()
