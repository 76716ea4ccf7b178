"""YOLO's label files: where they are looked for, what a line may say, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgeyolo.tools.labels import find_labels, read_labels, read_names

from edgeyolo.errors import ManifestError

NAMES = {0: "cat", 1: "dog"}


def test_label_files_are_found_as_yolo_lays_them_out(tmp_path: Path) -> None:
    for name in ("images/val/a.jpg", "images/val/b.jpg", "labels/val/a.txt", "flat/c.jpg", "flat/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    a, b, c = (tmp_path / name for name in ("images/val/a.jpg", "images/val/b.jpg", "flat/c.jpg"))
    assert find_labels([a, b, c]) == [tmp_path / "labels/val/a.txt", None, tmp_path / "flat/c.txt"]
    assert find_labels([b]) is None


def test_label_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("0 0.5 0.5 0.2 0.4\n\n1 0.1 0.1 0.3 0.2 0.2 0.5\n")
    labels = read_labels(file, (100, 200), NAMES)
    np.testing.assert_allclose(labels.boxes, [[40, 60, 60, 140], [10, 20, 30, 100]])
    assert labels.class_ids.tolist() == [0, 1]
    assert len(read_labels(None, (100, 200), NAMES).boxes) == 0
    for text, message in (
        ("0 0.5 0.5 0.2", "expected 'class cx cy w h'"),
        ("0 0.5 0.5 nan 0.2", "expected 'class cx cy w h'"),
        ("0 50 50 20 20", "coordinates from 0 to 1"),
        ("cat 0.5 0.5 0.2 0.2", "expected numbers"),
        ("0.5 0.5 0.5 0.2 0.2", "class 0.5"),
    ):
        file.write_text(text)
        with pytest.raises(ManifestError, match=message):
            read_labels(file, (100, 200), NAMES)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ManifestError, match="cannot be read as a label file"):
        read_labels(file, (100, 200), NAMES)


def test_names_of_a_data_yaml(tmp_path: Path) -> None:
    data = tmp_path / "data.yaml"
    for text in ("names: [cat, dog]", "names:\n  0: cat\n  1: dog\n"):
        data.write_text(text)
        assert read_names(data) == NAMES
    for text in ("nc: 2", "names: 3", "names: [", "names:\n  a: b\n"):
        data.write_text(text)
        with pytest.raises(ManifestError, match=r"data\.yaml"):
            read_names(data)
