"""Signed versions: what is not signed with the key that was asked for is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edgeyolo.tools.publish import publish, write_keys

import edgeyolo
from export_run import entry, onnx_model, onnx_run, rewrite, version_of

RED = np.full((64, 64, 3), (0, 0, 255), np.uint8)  # BGR
OTHERS = ("cat", "dog", "cow")


def test_signatures(tmp_path: Path) -> None:
    key, other, to = tmp_path / "a.key", tmp_path / "b.key", tmp_path / "to"
    public, foreign = write_keys(key), write_keys(other)
    publish(onnx_run(tmp_path / "unsigned"), to)
    with pytest.raises(
        edgeyolo.ManifestError, match=r"manifest\.sig: a public key was given, and the version is not signed"
    ):
        edgeyolo.load(to, public_key=public)
    publish(onnx_run(tmp_path / "signed", notes=["signed"]), to, sign_key=key)
    for given in (public, str(public), public.read_bytes()):
        with edgeyolo.load(to, public_key=given) as detector:
            assert detector.info()["published"]["signature"] == "checked"
    with edgeyolo.load(to) as detector:
        assert detector.info()["published"]["signature"] == "not checked"
    with pytest.raises(edgeyolo.ManifestError, match=r"manifest\.sig: manifest\.json was not signed with the key"):
        edgeyolo.load(to, public_key=foreign)
    for given, message in (
        (key, "expected an Ed25519 public key"),
        (tmp_path / "none", "No such file"),
        (b"no key", "expected an Ed25519 public key"),
    ):
        with pytest.raises(edgeyolo.InvalidInput, match=message):
            edgeyolo.load(to, public_key=given)


def test_a_signed_manifest_cannot_be_changed_by_who_has_no_key(tmp_path: Path) -> None:
    """Everything but the signature is made to fit: id, current, digest of another model."""
    key, to = tmp_path / "a.key", tmp_path / "to"
    public = write_keys(key)
    publish(onnx_run(tmp_path / "run"), to, sign_key=key)
    evil = onnx_model(tmp_path / "evil" / "model.onnx", names=OTHERS)

    def change(manifest: Any) -> None:
        shutil.copy(evil, version_of(to) / "model.onnx")
        manifest["models"][0] |= {"sha256": entry(evil)["sha256"], "bytes": evil.stat().st_size}
        manifest["names"] = dict(enumerate(OTHERS))

    version = rewrite(to, change)
    with edgeyolo.load(to) as detector:  # whole, but from nobody knows whom
        assert detector(RED)[0].name == "cat"
    with pytest.raises(edgeyolo.ManifestError, match="was not signed with the key"):
        edgeyolo.load(to, public_key=public)
    (version / "manifest.sig").unlink()
    rewrite(to, lambda manifest: None)
    with pytest.raises(edgeyolo.ManifestError, match="the version is not signed"):
        edgeyolo.load(to, public_key=public)


def test_without_cryptography_a_signature_cannot_be_checked(tmp_path: Path) -> None:
    key, to = tmp_path / "a.key", tmp_path / "to"
    public = write_keys(key)
    publish(onnx_run(tmp_path / "run"), to, sign_key=key)
    script = (
        f"import sys; sys.modules['cryptography'] = None\nimport edgeyolo\nedgeyolo.load({str(to)!r}).close()\n"
        f"try: edgeyolo.load({str(to)!r}, public_key={str(public)!r})\n"
        "except edgeyolo.EngineError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "pip install cryptography" in done.stdout
