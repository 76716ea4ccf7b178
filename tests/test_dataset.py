"""The data set: where its pictures are, what is wrong with its labels, what was done about it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edgeyolo.tools.dataset import DataSet, LabelReport, check_labels, read_data

from edgeyolo.errors import EdgeYoloError, InvalidInput

cv2 = pytest.importorskip("cv2")

NAMES = {0: "car", 1: "van"}


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((12, 16, 3), 90, np.uint8))
    return path


def data_yaml(folder: Path, text: str) -> Path:
    file = folder / "data.yaml"
    file.write_text(text)
    return file


# ------------------------------------------------------------------------------------------------ data.yaml
def test_splits_are_folders_lists_and_several(tmp_path: Path) -> None:
    for name in ("img10.png", "img2.png", "deep/img1.jpg"):
        picture(tmp_path / "set" / "images" / "a" / name)
    picture(tmp_path / "set" / "images" / "b" / "x.png")
    (tmp_path / "set" / "images" / "a" / "notes.md").write_text("no picture")
    (tmp_path / "set" / "val.txt").write_text("# a comment\nimages/b/x.png\n\nimages/b/missing.png\n")
    file = data_yaml(tmp_path, "path: set\ntrain: [images/a, images/b]\nval: val.txt\nnc: 2\nnames: [car, van]\n")
    images = tmp_path / "set" / "images"
    shared = "1 of 2 pictures of val are in train too: the measured mAP will be too high"
    assert read_data(file) == DataSet(
        file,
        NAMES,
        (images / "a/deep/img1.jpg", images / "a/img2.png", images / "a/img10.png", images / "b/x.png"),
        (images / "b/x.png", images / "b/missing.png"),
        (shared,),
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train: images\nnames: [car]\n", "expected `val:`"),
        ("train: images\nval: nowhere\nnames: [car]\n", r"`val: nowhere`: there is no \S+/nowhere\. Name a folder"),
        ("train: images\nval: ../nowhere\nnames: [car]\n", r"there is no \S+/\.\./nowhere\. Name a folder"),
        ("train: images\nval: data.yaml\nnames: [car]\n", r"`val: data\.yaml`: expected a folder, a list file"),
        ("train: images\nval: images\nnames: [car, van, car]\n", "names has 'car' more than once"),
        ("train: images\nval: empty\nnames: [car]\n", "`val:` has no pictures in"),
        ("train: images\nval: images\nnc: 3\nnames: [car]\n", "nc says 3 classes, names has 1"),
        ("train: images\nval: images\nnames: {1: car, 2: van}\n", "from 0 to 1, found \\[1, 2\\]"),
        ("train: images\nval: images\n", r"expected names.*`names: \[car, van\]`"),
        ("- images\n", "expected `train:`, `val:` and `names:`, found \\['images'\\]"),
        ("train: 5\nval: images\nnames: [car]\n", "expected `train:`"),
        ("{", "cannot be read as YAML"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, text: str, says: str) -> None:
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EdgeYoloError, match=says):
        read_data(data_yaml(tmp_path, text))


# ------------------------------------------------------------------------------------------------ labels
def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EdgeYoloError, match=r"nope\.yaml: cannot be read: No such file or directory"):
        read_data(tmp_path / "nope.yaml")


def test_folders_as_roboflow_writes_them(tmp_path: Path) -> None:
    one, two = picture(tmp_path / "train" / "images" / "a.png"), picture(tmp_path / "valid" / "images" / "b.png")
    file = data_yaml(tmp_path, "train: ../train/images\nval: ../valid/images\nnames: [car]\n")
    data = read_data(file)
    assert (data.train, data.val) == ((one,), (two,))
    assert data.notes == (
        "`train: ../train/images` is not there: train/images is taken",
        "`val: ../valid/images` is not there: valid/images is taken",
    )
    inner = data_yaml(tmp_path / "train", "train: ../train/images\nval: ../valid/images\nnames: [car]\n")
    assert read_data(inner).notes == (), "a folder above that is there is meant"


def test_a_path_from_where_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture(tmp_path / "sets" / "signs" / "images" / "a.png")
    (tmp_path / "config").mkdir()
    text = "path: sets/signs\ntrain: images\nval: images\nnames: [car]\n"
    file = data_yaml(tmp_path / "config", text)
    with pytest.raises(EdgeYoloError, match=r"there is no \S+/config/sets/signs/images"):
        read_data(file)
    monkeypatch.chdir(tmp_path)
    data = read_data(file)
    assert data.train == (Path("sets/signs/images/a.png"),)
    assert data.notes[0] == f"`path: sets/signs` is not beside data.yaml: taken from the current folder, {tmp_path}"


def checked(tmp_path: Path, **files: str | None) -> LabelReport:
    """A report on one picture for each name; None: without a label file. Beside them a good one."""
    pictures = []
    for name, text in {**files, "good": "0 0.5 0.5 0.2 0.2\n"}.items():
        pictures.append(picture(tmp_path / "images" / f"{name}.png"))
        if text is not None:
            (tmp_path / "labels").mkdir(exist_ok=True)
            (tmp_path / "labels" / f"{name}.txt").write_text(text, encoding="utf-8")
    return check_labels(pictures, NAMES)


@pytest.mark.parametrize(
    ("text", "rows", "problems"),
    [
        ("1 0.5 0.25 0.125 0.0625\n", [[1, 0.5, 0.25, 0.125, 0.0625]], []),
        ("\ufeff0 0.5 0.5 0.1 0.1\n\n", [[0, 0.5, 0.5, 0.1, 0.1]], []),
        ("", [], [(None, "the file is empty", "background")]),
        (" \n\n", [], [(None, "the file is empty", "background")]),
        ("0 0.5 0.5 0.1 0.1\n1 0.2 0.2 0.1 0.1\n0 0.5 0.5 0.1 0.1\n",
         [[0, 0.5, 0.5, 0.1, 0.1], [1, 0.2, 0.2, 0.1, 0.1]], [(3, "the same as line 1", "one kept")]),
        ("0 0.9 0.5 0.25 0.5\n", [[0, 0.8875, 0.5, 0.225, 0.5]],
         [(1, "0.025 of the picture's side beyond its border", "clipped")]),
        ("0 1.005 0.5 0.11 0.5\n", [[0, 0.975, 0.5, 0.05, 0.5]],
         [(1, "0.06 of the picture's side beyond its border", "clipped")]),
        ("0 0.95 0.5 0.10001 0.5\n", [[0, 0.9499975, 0.5, 0.100005, 0.5]], []),  # rounded decimals
        ("0 0.5 0.5 0 0.1\n1 0.5 0.5 0.1 0.1\n", [[1, 0.5, 0.5, 0.1, 0.1]],
         [(1, "a box 0 wide and 0.1 high", "line left out")]),
        ("0 0.1 0.2 0.5 0.2 0.3 0.8\n", [[0, 0.3, 0.5, 0.4, 0.6]], [(None, "1 polygons", "hull taken")]),
        ("0 0.1 0.2 0.5 0.2 0.3 0.2\n", [], [(1, "a polygon without area", "line left out")]),
        ("0 1.008 0.5 0.01 0.1\n", [],
         [(1, "0.013 of the picture's side beyond its border", "clipped"),
          (1, "nothing of the box is in the picture", "line left out")]),
    ],
)  # fmt: skip
def test_faults_with_one_reading_are_repaired_and_told(
    tmp_path: Path, text: str, rows: list[list[float]], problems: list[tuple[int | None, str, str]]
) -> None:
    report = checked(tmp_path, a=text)
    assert [path.name for path in report.pictures] == ["a.png", "good.png"]
    np.testing.assert_allclose(report.labels[0], np.array(rows).reshape(-1, 5), rtol=0, atol=1e-12)
    assert [(p.line, p.what, p.done) for p in report.problems] == problems
    assert {p.file for p in report.problems} <= {tmp_path / "labels" / "a.txt"}
    assert report.background == (not rows)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("0 0.5 0.5 0.1 0.1\n2 0.5 0.5 0.1 0.1\n", 2, "class 2 is none of the 2 classes, 0 to 1"),
        ("0.5 0.5 0.5 0.1 0.1\n", 1, "class 0.5 is none of the 2 classes, 0 to 1"),
        ("-1 0.5 0.5 0.1 0.1\n", 1, "class -1 is none of the 2 classes, 0 to 1"),
        ("0 320 240 50 50\n", 1, "expected coordinates from 0 to 1, found '0 320 240 50 50': in pixels?"),
        ("0 0.5 -0.2 0.1 0.1\n", 1, "expected coordinates from 0 to 1, found '0 0.5 -0.2 0.1 0.1': in pixels?"),
        ("0 0.5 0.5 0.1\n", 1, "expected 'class cx cy w h' or a polygon, found '0 0.5 0.5 0.1'"),
        ("0 0.5 0.5 nan 0.1\n", 1, "expected 'class cx cy w h' or a polygon, found '0 0.5 0.5 nan 0.1'"),
        ("car 0.5 0.5 0.1 0.1\n", 1, "expected numbers, found 'car 0.5 0.5 0.1 0.1'"),
    ],
)
def test_faults_without_a_reading_leave_out_the_picture(tmp_path: Path, text: str, line: int, says: str) -> None:
    report = checked(tmp_path, a=text)
    assert [path.name for path in report.pictures] == ["good.png"]
    assert [(p.line, p.what, p.done) for p in report.problems] == [(line, says, "picture left out")]
    assert (report.found, report.left_out, report.boxes) == (2, 1, {0: 1, 1: 0})


def test_every_fault_of_a_file_is_told(tmp_path: Path) -> None:
    report = checked(tmp_path, a="7 0.5 0.5 0.1 0.1\nx\n0 9 9 9 9\n")
    assert [p.line for p in report.problems] == [1, 2, 3]


def test_pictures_without_labels_and_pictures_that_are_none(tmp_path: Path) -> None:
    good = picture(tmp_path / "a" / "good.png")
    good.with_suffix(".txt").write_text("1 0.5 0.5 0.5 0.5\n")
    bare = picture(tmp_path / "a" / "bare.png")
    text = tmp_path / "a" / "text.png"
    text.write_text("this is no picture")
    empty = tmp_path / "a" / "empty.jpg"
    empty.write_bytes(b"")
    missing = tmp_path / "a" / "missing.jpg"
    cut = tmp_path / "a" / "cut.png"
    cut.write_bytes(good.read_bytes()[:60])
    everything = [good, bare, text, empty, missing, cut]
    report = check_labels(everything, NAMES)
    assert report.pictures == (good, bare, cut)  # the cut one is found by decoding
    assert [str(p) for p in report.problems] == [
        f"{bare}: no label file: background",
        f"{text}: not a picture: picture left out",
        f"{empty}: the file is empty (0 bytes): copy or record it again: picture left out",
        f"{missing}: cannot be read: No such file or directory: picture left out",
        f"{cut}: no label file: background",
    ]
    decoded = check_labels(everything, NAMES, decode=True)
    assert decoded.pictures == (good, bare)
    assert decoded.problems[-1].file == cut
    assert decoded.problems[-1].done == "picture left out"
    later = report.without([(cut, "the file ends too early")])
    assert later.pictures == (good, bare)
    assert len(later.labels) == 2
    assert str(later.problems[-1]) == f"{cut}: the file ends too early: picture left out"
    assert (later.left_out, later.background, later.boxes) == (4, 1, {0: 0, 1: 1})


def test_the_table_counts_and_shows_the_first_of_each_kind(tmp_path: Path) -> None:
    faulty = {f"bad{i}": "5 0.5 0.5 0.1 0.1\n" for i in range(5)}
    report = checked(tmp_path, **faulty, none="")
    assert report.table(most=4).splitlines() == [
        "2 of 7 pictures, 1 boxes, 1 pictures without any",
        "         1  car",
        "         0  van",
        "picture left out: 5",
        *(
            f"  {tmp_path}/labels/bad{i}.txt, line 1: class 5 is none of the 2 classes, 0 to 1: picture left out"
            for i in range(2)
        ),
        "  ... and 3 more",
        "background: 1",
        f"  {tmp_path / 'labels' / 'none.txt'}: the file is empty: background",
    ]


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    bare = picture(tmp_path / "images" / "bare.png")
    with pytest.raises(InvalidInput, match=r"none of the 1 pictures has a box; the labels of .*bare\.png would be in"):
        check_labels([bare], NAMES)
    bare.with_suffix(".txt").write_text("9 0.5 0.5 0.1 0.1\n")
    with pytest.raises(InvalidInput, match=r"(?s)none of the 1 pictures can be used:.*line 1: class 9"):
        check_labels([bare], NAMES)


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    split, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    picture(split / "a.png")
    picture(elsewhere / "b.png")
    (split / "linked").symlink_to(elsewhere)
    (split / "other").symlink_to(elsewhere)  # the same pictures again
    (elsewhere / "back").symlink_to(split)  # a circle
    file = data_yaml(tmp_path, "train: images\nval: images/a.png\nnames: [car, van]\n")
    assert read_data(file).train == (split / "a.png", split / "linked" / "b.png")
