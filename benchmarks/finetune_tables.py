"""Turns the rows of the fine-tuning benchmarks into the tables of docs/finetune.md, in place.

    python benchmarks/finetune_tables.py            rewrites the tables
    python benchmarks/finetune_tables.py --check    only says whether they are those of the results (exit status)

Reads benchmarks/results/finetune_speed.jsonl and finetune_quality.jsonl. Runs may be appended: of each section the last
one counts. See train_tables.py for the comments between which a table lies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from train_tables import ROOT, Row, latest, machine, replaced, table

SIDES = {"ultralytics": "Ultralytics", "edgeyolo": "edgeyolo"}


def speed(sections: dict[str, list[Row]]) -> str:
    """A line for each run; the ratio stands with ours."""
    lines = []
    for name in ("batch16", "batch64"):
        rows = sections.get(name, [])
        ratio = next((r for r in rows if r.get("what") == "times as fast"), None)
        for row in rows:
            if "images_per_s" not in row:
                continue
            first, second = row["epochs_s"]
            last = row is [r for r in rows if "images_per_s" in r][-1]
            times = f"**{ratio['ratio']:.2f}x** ({ratio['lowest']:.2f} to {ratio['highest']:.2f})" if ratio else ""
            lines.append([
                str(row["batch"]), SIDES[row["side"]], str(row["round"]), f"{row['images_per_s']:.0f}",
                f"{first:.2f}, {second:.2f}", f"{row['decoding_s']:.2f}" if "decoding_s" in row else "in the start",
                f"{row['data_s']:.2f}", f"{row['rest of the epochs_s']:.1f}", f"{row['whole_s']:.1f}",
                times if last else "",
            ])  # fmt: skip
    head = ["batch", "side", "round", "images/s", "epochs, s", "decoding, s", "data, s", "measuring, s", "whole run, s",
            "times as fast"]  # fmt: skip
    return table(head, lines) if lines else ""


def parity(sections: dict[str, list[Row]]) -> str:
    rows = sections.get("parity", [])
    runs = [r for r in rows if "seed" in r and "map50_95" in r]
    total = next((r for r in rows if r.get("what") == "parity"), None)
    if total is None:
        return ""
    start = next(r["map50_95"] for r in rows if r.get("what") == "start")
    seeds = sorted({r["seed"] for r in runs})
    lines = []
    for side, label in SIDES.items():
        own = {r["seed"]: r for r in runs if r["side"] == side}
        seconds = sorted(r["whole_s"] for r in own.values())
        lines.append([
            label, *(f"{own[s]['map50_95']:.4f}" for s in seeds), f"{total['means'][side]:.4f}",
            f"{total['deviations'][side]:.4f}", f"{seconds[0]:.0f} to {seconds[-1]:.0f}",
        ])  # fmt: skip
    head = ["side", *(f"seed {s}" for s in seeds), "mean", "standard deviation", "whole run, s"]
    told = f"Difference of the means {total['difference']:+.4f}: {total['verdict']}."
    return f"{table(head, lines)}\n\n{told} The weights at the start: {start:.4f}."


def new_class(sections: dict[str, list[Row]]) -> str:
    row = next((r for r in sections.get("new_class", []) if r.get("what") == "new class"), None)
    if row is None:
        return ""
    published = row["published"]
    found, of = published["with the new sign found"], published["pictures"]
    return "\n".join((
        f"{row['seconds']:.0f} s from .pt to published model: {row['pictures']} pictures, {row['epochs']} epochs.",
        f"The new sign: AP50 {row['new_ap50']:.4f}, AP50-95 {row['new_ap50_95']:.4f}; the published model finds it in",
        f"{found} of {of} held-out pictures. The eight old signs: mAP50-95 {row['old_before']:.4f} before,",
        f"{row['old_after']:.4f} after: {row['old_lost']:.4f} lost ({row['wanted']} was wanted).",
    ))  # fmt: skip


def render(results: Path) -> dict[str, str]:
    """Name of a table to its Markdown."""
    sections: dict[str, list[Row]] = {}
    for name in ("finetune_speed.jsonl", "finetune_quality.jsonl"):
        path = results / name
        sections |= latest(path.read_text(encoding="utf-8").splitlines()) if path.exists() else {}
    return {
        "machine": machine(sections[""]) if "" in sections else "",
        "speed": speed(sections),
        "parity": parity(sections),
        "new_class": new_class(sections),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where the tables are not current")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "finetune.md")
    args = parser.parse_args()
    before = args.page.read_text(encoding="utf-8")
    after = replaced(before, render(args.results))
    if args.check:
        same = before == after
        sys.exit(0 if same else f"{args.page.name} differs from the results: run benchmarks/finetune_tables.py")
    partial = args.page.with_suffix(".partial")
    partial.write_text(after, encoding="utf-8")
    partial.replace(args.page)


if __name__ == "__main__":
    main()
