"""The tables of docs/training-step.md and docs/finetune.md are those of the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT, RESULTS, PAGE = ROOT / "benchmarks/train_tables.py", ROOT / "benchmarks/results", ROOT / "docs/training-step.md"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="a source distribution has no results")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60)


def test_page_shows_the_results() -> None:
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_the_page_of_fine_tuning_shows_the_results(tmp_path: Path) -> None:
    script = SCRIPT.with_name("finetune_tables.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    page, rows = tmp_path / "page.md", tmp_path / "finetune_speed.jsonl"
    page.write_text("<!-- table speed -->\n<!-- end -->\n", encoding="utf-8")
    both = {"batch": 16, "round": 0, "data_s": 0.04, "rest of the epochs_s": 1.84, "whole_s": 11.44}
    lines = [
        {"section": "batch16", "event": "begin"},
        {"section": "batch16", "side": "ultralytics", "images_per_s": 145.4, "epochs_s": [15.0, 13.1], **both},
        {
            "section": "batch16",
            "side": "edgeyolo",
            "images_per_s": 1000.6,
            "epochs_s": [2, 1],
            "decoding_s": 1.5,
            **both,
        },
        {"section": "batch16", "what": "times as fast", "ratio": 6.881, "lowest": 6.5, "highest": 7.0},
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    subprocess.run([sys.executable, script, "--results", tmp_path, "--page", page], check=True, timeout=60)
    text = page.read_text(encoding="utf-8")
    assert "| 16 | Ultralytics | 0 | 145 | 15.00, 13.10 | in the start | 0.04 | 1.8 | 11.4 |  |" in text
    assert "| 16 | edgeyolo | 0 | 1001 | 2.00, 1.00 | 1.50 | 0.04 | 1.8 | 11.4 | **6.88x** (6.50 to 7.00) |" in text


def test_a_later_run_of_a_section_replaces_its_table_alone(tmp_path: Path) -> None:
    for name in ("step.jsonl", "seeds.jsonl", "start.jsonl", "profile.json", "profile_plain.json"):
        name = f"train_{name}"
        (tmp_path / name).write_bytes((RESULTS / name).read_bytes())
    page = tmp_path / "page.md"
    page.write_bytes(PAGE.read_bytes())
    spread = {"low": 2.0, "high": 3.0, "ratio": 41.237, "ratio_low": 40.0, "ratio_high": 42.0, "host_syncs": 0}
    rows = [
        {"section": "optimizer", "event": "begin"},
        {"section": "optimizer", "what": "flat MuSGD, graph, 4 streams", "ms": 2.5, **spread},
        {"section": "optimizer", "event": "end"},
        {"section": "bare", "event": "begin"},
        {"section": "bare", "batch": 16, "what": "new row", "ms": 12.34, **spread},
    ]
    with (tmp_path / "train_step.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert run("--results", tmp_path, "--page", page, "--check").returncode == 1
    assert run("--results", tmp_path, "--page", page).returncode == 0
    new, old = page.read_text(encoding="utf-8"), PAGE.read_text(encoding="utf-8")
    assert "| flat MuSGD, graph, 4 streams | 2.50 (2.00 to 3.00) | 41.2 (40.0 to 42.0) | 0 |" in new
    assert "| 16 | new row | 12.3 (2.00 to 3.00) | 41.2 (40.0 to 42.0) |" in new
    part = new.split("<!-- table optimizer -->")[1].split("<!-- end -->")[0]
    assert part.count("\n|") == 3  # the head, its line and one row: nothing of the former run
    for name in ("step", "seeds", "profile", "models"):
        assert new.split(f"<!-- table {name} -->")[1].split("<!-- end -->")[0] in old
    assert run("--results", tmp_path, "--page", page, "--check").returncode == 0


def test_unknown_tables_are_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table stepp -->\n<!-- end -->\n", encoding="utf-8")
    done = run("--page", page)
    assert done.returncode != 0
    assert "unknown table 'stepp'" in done.stderr
