"""Publishing a run: what becomes current, what is kept, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.publish import publish, rollback, write_keys

import edgeyolo
from edgeyolo.cli import main
from edgeyolo.published import read_current
from export_run import ENGINE, FAILED, NAMES, entry, onnx_model, onnx_run, write_record
from toy_model import toy_engine

RED = np.full((64, 64, 3), (0, 0, 255), np.uint8)  # BGR


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_run_becomes_current(tmp_path: Path) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "models" / "door"
    done = publish(run, to)
    assert (done.changed, done.previous) == (True, ())
    assert read_current(to) == (done.version,)
    version = f"versions/{done.version}"
    assert listing(to) == [".publish-lock", "current", f"{version}/manifest.json", f"{version}/model.onnx"]
    assert (to / version / "model.onnx").read_bytes() == (run / "model.onnx").read_bytes()
    written, asked = (json.loads(path.read_text()) for path in (to / version / "manifest.json", run / "export.json"))
    (model,) = written.pop("models")
    (wanted,) = asked.pop("models")
    assert written == asked  # weights, calibration, versions, GPU and all else
    assert model == {**wanted, "bytes": (run / "model.onnx").stat().st_size}
    with edgeyolo.load(to) as detector:
        assert [(d.name, round(d.score, 3)) for d in detector(RED)][:2] == [("red", 1.0), ("red", 0.75)]


def test_the_same_run_again_changes_nothing(tmp_path: Path) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    first = publish(run, to)
    before = {path: path.stat().st_mtime_ns for path in to.rglob("*") if path.is_file()}
    second = publish(run, to)
    assert (second.version, second.changed) == (first.version, False)
    assert {path: path.stat().st_mtime_ns for path in to.rglob("*") if path.is_file()} == before


def test_versions_are_kept_and_pruned_in_the_order_of_their_use(tmp_path: Path) -> None:
    to = tmp_path / "to"
    versions = [publish(onnx_run(tmp_path / str(i), notes=[str(i)]), to).version for i in range(5)]
    assert len(set(versions)) == 5
    assert read_current(to) == tuple(versions[:1:-1])  # 4, 3, 2
    assert {path.name for path in (to / "versions").iterdir()} == set(versions[2:])
    assert publish(tmp_path / "3", to).previous == (versions[4], versions[2])
    assert publish(tmp_path / "0", to, keep=2).previous == (versions[3],)
    assert {path.name for path in (to / "versions").iterdir()} == {versions[0], versions[3]}


def test_rollback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    to = tmp_path / "to"
    a, b, c = (publish(onnx_run(tmp_path / str(i), notes=[str(i)]), to).version for i in range(3))
    assert rollback(to).version == b
    assert read_current(to) == (b, a)
    with edgeyolo.load(to) as detector:
        assert detector.info()["published"]["version"] == b
    # What was rolled back is no version to go back to from the next one.
    d = publish(onnx_run(tmp_path / "3", notes=["3"]), to).version
    assert read_current(to) == (d, b, a)
    assert not (to / "versions" / c).exists()
    (to / "versions" / b / "model.onnx").write_bytes(b"damaged")
    with caplog.at_level("WARNING", "edgeyolo"):
        assert rollback(to).version == a
    assert f"version {b} is damaged" in caplog.text
    with pytest.raises(edgeyolo.ManifestError, match="no whole version before"):
        rollback(to)
    assert read_current(to) == (a,)


def test_a_rollback_needs_a_published_folder(tmp_path: Path) -> None:
    with pytest.raises(edgeyolo.ManifestError, match="current: expected a file"):
        rollback(tmp_path / "nothing")
    assert listing(tmp_path) == []


def test_engines_are_published_without_a_gpu(tmp_path: Path) -> None:
    run = tmp_path / "run"
    engine = toy_engine(tmp_path / "run.engine", extra={"names": dict(enumerate(NAMES))})
    run.mkdir()
    engine = engine.rename(run / "model.engine")
    onnx = onnx_model(run / "model.onnx")
    models = [entry(engine, ENGINE, precision="fp16"), entry(onnx)]
    done = publish(write_record(run, models), tmp_path / "to")
    assert (tmp_path / "to/versions" / done.version / "model.engine").read_bytes() == engine.read_bytes()
    with pytest.raises(edgeyolo.ManifestError, match=r"model\.engine: the manifest states names .*cat"):
        publish(write_record(run, models[:1], names={"0": "cat", "1": "dog", "2": "cow"}), tmp_path / "to")
    assert read_current(tmp_path / "to") == (done.version,)


@pytest.mark.parametrize(
    ("verification", "message"),
    [(None, "there is no record of a verification"), (FAILED, "its verification failed: 2 boxes are missing")],
)
def test_unverified_models_are_refused(tmp_path: Path, verification: Any, message: str) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    write_record(run, [entry(onnx_model(run / "model.onnx"), verification)])
    with pytest.raises(edgeyolo.ManifestError, match=f"not published: model.onnx: {message}"):
        publish(run, to)
    assert not to.exists()
    publish(run, to, require="intact")
    with pytest.raises(edgeyolo.EngineError, match=message):
        edgeyolo.load(to)
    with edgeyolo.load(to, require="intact") as detector:
        assert len(detector(RED)) == 3


def test_an_engine_that_was_not_run_can_be_refused(tmp_path: Path) -> None:
    run, engine = tmp_path / "run", toy_engine(tmp_path / "e.engine", extra={"names": dict(enumerate(NAMES))})
    run.mkdir()
    models = [entry(engine.rename(run / "model.engine"), {**ENGINE, "statement": "graph verified, engine not run"})]
    write_record(run, models)
    with pytest.raises(edgeyolo.ManifestError, match="was not run when it was made: 'graph verified, engine not run'"):
        publish(run, tmp_path / "to", require="executed")
    publish(run, tmp_path / "to")


def test_a_run_that_does_not_hold_together(tmp_path: Path) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    publish(run, to)
    before = listing(to)
    good = json.loads((run / "export.json").read_text())

    def refused(message: str, **changed: Any) -> None:
        (run / "export.json").write_text(json.dumps({**good, **changed}))
        with pytest.raises(edgeyolo.ManifestError, match=message):
            publish(run, to)
        assert listing(to) == before

    model = good["models"][0]
    refused("not the file that was exported", models=[{**model, "sha256": "2" * 64}])
    refused("in the folder of the run", models=[{**model, "file": "other.onnx"}])
    refused("in the folder of the run", models=[{**model, "file": "../run/model.onnx"}])
    refused("in the folder of the run", models=[{**model, "file": str(run / "../run/model.onnx")}])
    refused("models with their 'file'", models=[{}])
    refused("'models'", models=None)
    refused("expected format 1, found 2", format=2)
    refused("states imgsz \\(32, 32\\), the file \\(64, 64\\)", imgsz=[32, 32])
    refused("states names .*'amber'", names={"0": "red", "1": "amber", "2": "blue"})
    refused("states stride 16, the file 32", stride=16)
    refused("states no 'names'", names=None)
    refused("expected at most 1048576 bytes", notes=["x" * (1 << 20)])
    (run / "model.onnx").rename(run / "real")
    (run / "model.onnx").symlink_to(run / "real")
    refused("in the folder of the run")
    refused(r"export\.json: expected a JSON file: NaN is no JSON", notes=[float("nan")])
    (run / "export.json").write_text("{")
    with pytest.raises(edgeyolo.ManifestError, match=r"export\.json: expected a JSON file"):
        publish(run, to)


def test_a_file_that_is_no_model_is_refused_before_it_is_current(tmp_path: Path) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    done = publish(run, to)
    (run / "model.onnx").write_bytes(b"no graph")
    write_record(run, [entry(run / "model.onnx")])
    with pytest.raises(edgeyolo.EngineError, match="no model that ONNX Runtime"):
        publish(run, to)
    assert read_current(to) == (done.version,)
    assert [path.name for path in (to / "versions").iterdir()] == [done.version]


def test_a_damaged_version_is_published_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    done = publish(run, to)
    (to / "versions" / done.version / "model.onnx").write_bytes(b"damaged")
    with caplog.at_level("WARNING", "edgeyolo"):
        assert publish(run, to).version == done.version
    assert "is damaged" in caplog.text
    edgeyolo.load(to).close()


def test_a_damaged_current_is_written_anew_and_nothing_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    to = tmp_path / "to"
    first = publish(onnx_run(tmp_path / "a"), to).version
    (to / "current").write_text("")
    with caplog.at_level("WARNING", "edgeyolo"):
        second = publish(onnx_run(tmp_path / "b", notes=["b"]), to).version
    assert "it is written anew" in caplog.text
    assert read_current(to) == (second,)
    assert {path.name for path in (to / "versions").iterdir()} == {first, second}


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    publish(run, to)
    before = listing(to)
    (to / "versions/.partial-abc/deep").mkdir(parents=True)
    (to / "versions/.partial-abc/deep/model.onnx").write_bytes(b"half")
    (to / ".partial-def").write_bytes(b"half")
    publish(run, to)
    assert listing(to) == before
    assert not list(to.rglob(".partial-*"))


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with pytest.raises(edgeyolo.InvalidInput, match="no published folder"):
        publish(onnx_run(tmp_path / "run"), tmp_path / "home")
    assert listing(tmp_path / "home") == ["thesis.txt"]


def test_a_folder_named_versions_of_another_project_is_left_alone(tmp_path: Path) -> None:
    theirs, run = tmp_path / "migrations", onnx_run(tmp_path / "run")
    (theirs / "versions").mkdir(parents=True)
    (theirs / "versions" / "001_users.py").write_text("mine")
    for also in ("env.py", "current"):
        (theirs / also).write_text("mine too")
        with pytest.raises(edgeyolo.InvalidInput, match=r"versions/001_users\.py, and is no published folder"):
            publish(run, theirs)
    assert listing(theirs) == ["current", "env.py", "versions/001_users.py"]


def test_what_lies_beside_the_versions_is_not_removed_with_them(tmp_path: Path) -> None:
    to = tmp_path / "to"
    publish(onnx_run(tmp_path / "run"), to)
    (to / "versions" / "lost+found").mkdir()
    for count in "012":
        publish(onnx_run(tmp_path / f"run{count}", notes=[count]), to, keep=2)
    assert len(list((to / "versions").iterdir())) == 3 and (to / "versions" / "lost+found").is_dir()


@pytest.mark.parametrize("keep", [0, 1, -1, True, 2.0])
def test_keep(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(edgeyolo.InvalidInput, match="keep must be at least 2"):
        publish(tmp_path, tmp_path, keep=keep)


def test_one_writer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    inside, go = threading.Event(), threading.Event()
    module = sys.modules["edgeyolo.tools.publish"]  # edgeyolo.tools.publish is the function
    real = module.copy_checked

    def slow(*arguments: Any) -> None:
        inside.set()
        assert go.wait(10)
        real(*arguments)

    monkeypatch.setattr(module, "copy_checked", slow)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(publish(run, to)))
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(edgeyolo.EdgeYoloError, match="somebody else is publishing"):
            publish(run, to)
    finally:
        go.set()
        thread.join()
    assert results[0].changed
    assert not publish(run, to).changed  # the lock was given back


def test_files_have_the_modes_that_other_users_need(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        done = publish(onnx_run(tmp_path / "run"), tmp_path / "to")
    finally:
        os.umask(mask)
    version = tmp_path / "to/versions" / done.version
    assert version.stat().st_mode & 0o777 == 0o755
    for path in (version / "manifest.json", version / "model.onnx", tmp_path / "to/current"):
        assert path.stat().st_mode & 0o777 == 0o644, path


def test_signing(tmp_path: Path) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "to"
    public = write_keys(tmp_path / "door.key")
    assert public == tmp_path / "door.key.pub"
    assert (tmp_path / "door.key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(edgeyolo.InvalidInput, match="is there already"):
        write_keys(tmp_path / "door.key")
    unsigned = publish(run, to)
    signed = publish(run, to, sign_key=tmp_path / "door.key")
    assert signed.version != unsigned.version
    assert not publish(run, to, sign_key=tmp_path / "door.key").changed  # Ed25519 signs the same way each time
    version = to / "versions" / signed.version
    assert (version / "manifest.sig").stat().st_size == 64
    # Another program's word for it.
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    command += ["-in", str(version / "manifest.json"), "-sigfile", str(version / "manifest.sig")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Verified Successfully" in done.stdout, done.stderr
    for path, found in ((public, "Ed25519 private key, a PEM file"), (tmp_path / "none", "No such file")):
        with pytest.raises(edgeyolo.InvalidInput, match=found):
            publish(run, to, sign_key=path)


def test_a_key_of_another_kind_signs_nothing(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    (tmp_path / "ec.key").write_bytes(pem)
    with pytest.raises(edgeyolo.InvalidInput, match="expected an Ed25519 private key, found"):
        publish(onnx_run(tmp_path / "run"), tmp_path / "to", sign_key=tmp_path / "ec.key")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to, key = str(tmp_path / "to"), str(tmp_path / "k.key")
    runs = [str(onnx_run(tmp_path / str(i), notes=[str(i)])) for i in range(3)]
    assert main(["publish", "--keygen", key]) == 0
    for run in runs:
        assert main(["publish", run, "--to", to, "--sign", key, "--keep", "2"]) == 0
    c, b = read_current(Path(to))
    assert main(["publish", runs[2], "--to", to, "--sign", key, "--keep", "2"]) == 0
    assert main(["publish", "--rollback", to]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"{key}  private key: keep it to yourself",
        f'{key}.pub  public key: edgeyolo.load("DIR", public_key="{key}.pub")',
    ]
    assert lines[-4:] == [
        f"  kept for rollback: {b}",
        f"{to}: already current: version {c}",
        f"  kept for rollback: {b}",
        f"{to}: rolled back to version {b}",
    ]
    edgeyolo.load(to, public_key=f"{key}.pub").close()
    assert main(["publish", "--rollback", to]) == 1
    assert "no whole version before" in capsys.readouterr().err
    assert main(["info", to]) == 0
    assert b in capsys.readouterr().out


def test_the_command_refuses_what_is_unverified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, to = tmp_path / "run", str(tmp_path / "to")
    write_record(run, [entry(onnx_model(run / "model.onnx"), FAILED)])
    assert main(["publish", str(run), "--to", to]) == 1
    assert "2 boxes are missing" in capsys.readouterr().err
    assert main(["publish", str(run), "--to", to, "--allow-unverified"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["--to", "x"],
        ["run", "--to", "x", "--rollback", "x"],
        ["--rollback", "x", "--to", "x"],
        ["--keygen", "x", "--rollback", "x"],
        ["--rollback", "x", "--keep", "3"],
        ["run", "--to", "x", "--keep", "1"],
        ["run", "--to", "x", "--keep", "many"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_missing_packages_are_told_with_the_line_that_installs_them(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "sys.modules['{hidden}'] = None\n"
        "from edgeyolo.cli import main\n"
        "raise SystemExit(main({arguments!r}))\n"
    )
    for hidden, arguments in (
        ("edgeyolo.tools", ["publish", "--keygen", str(tmp_path / "a.key")]),
        ("cryptography", ["publish", "--keygen", str(tmp_path / "a.key")]),
    ):
        code = script.format(hidden=hidden, arguments=arguments)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "pip install 'edgeyolo[tools]'" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert listing(tmp_path) == []


def test_publishing_loads_nothing_of_training() -> None:
    script = (
        "import sys, edgeyolo.tools.publish\n"
        "print(sorted({'torch', 'ultralytics', 'onnxruntime', 'onnx', 'cryptography', 'cv2'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
