"""The manifest of a published version: what is no such thing is refused, by the entry's name."""

from __future__ import annotations

import json
from typing import Any

import pytest

import edgeyolo
from edgeyolo.published import parse_manifest
from export_run import PASSED, record

MODEL = {"file": "model.onnx", "sha256": "0" * 64, "kind": "onnx", "precision": "fp32", "bytes": 1}
BAD_MODELS = [
    ({"file": "../model.onnx"}, "'file' must be a plain file name"),
    ({"file": "/tmp/model.onnx"}, "'file' must be a plain file name"),
    ({"file": "a/model.onnx"}, "'file' must be a plain file name"),
    ({"file": "..\\model.onnx"}, "'file' must be a plain file name"),
    ({"file": ".model.onnx"}, "'file' must be a plain file name"),
    ({"file": "model.onnx\n"}, "'file' must be a plain file name"),
    ({"file": "m\u00f6del.onnx"}, "'file' must be a plain file name"),
    ({"file": "model\x00.onnx"}, "'file' must be a plain file name"),
    ({"file": "x" * 130 + ".onnx"}, "'file' must be a plain file name"),
    ({"file": ""}, "'file' must be a plain file name"),
    ({"file": "manifest.json"}, r"ends in \.onnx"),
    ({"file": "model.engine"}, r"ends in \.onnx"),
    ({"kind": "tensorrt"}, r"ends in \.engine or \.plan"),
    ({"file": None}, "'file' must be a plain file name"),
    ({"file": ["model.onnx"]}, "'file' must be"),
    ({"kind": "pickle"}, "'kind' must be one of tensorrt, tensorrt-rtx, onnx, found 'pickle'"),
    ({"kind": ["onnx"]}, "'kind' must be one of"),
    ({"sha256": "0" * 63}, "'sha256' must be 64 hexadecimal digits"),
    ({"sha256": "G" * 64}, "'sha256' must be"),
    ({"sha256": 0}, "'sha256' must be"),
    ({"bytes": 0}, "'bytes' must be a number of bytes above 0, found 0"),
    ({"bytes": -1}, "'bytes' must be"),
    ({"bytes": True}, "'bytes' must be"),
    ({"bytes": 1.0}, "'bytes' must be"),
    ({"bytes": "1"}, "'bytes' must be"),
    ({"precision": None}, "'precision' must be text"),
    ({"verification": []}, "'verification' must be a JSON object or null"),
    ({"verification": "passed"}, "'verification' must be a JSON object"),
    ({"verification": {**PASSED, "passed": 1}}, "'passed' must be true or false, found 1"),
    ({"verification": {**PASSED, "passed": "true"}}, "'passed' must be true or false"),
    ({"verification": {}}, "'passed' must be true or false, found None"),
    ({"verification": {**PASSED, "statement": None}}, "'statement' must be text"),
    ({"verification": {**PASSED, "failures": "none"}}, "'failures' must be a list"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_MODELS)
def test_malformed_models(changed: dict[str, Any], message: str) -> None:
    good = {**MODEL, "verification": PASSED}
    parse_manifest(json.dumps(record([good])).encode(), "m")
    with pytest.raises(edgeyolo.ManifestError, match=rf"^where: models\[1\](\.verification)?: .*{message}"):
        parse_manifest(json.dumps(record([good, {**good, "file": "b.onnx", **changed}])).encode(), "where")


BAD_MANIFESTS: list[tuple[dict[str, Any], str]] = [
    ({"format": 2}, "expected format 1, found 2; update edgeyolo"),
    ({"format": True}, "expected format 1, found True"),
    ({"format": 1.0}, r"expected format 1, found 1\.0"),
    ({"format": None}, "expected format 1, found None"),
    ({"models": []}, "'models' must be a list of 1 to 16 models"),
    ({"models": [MODEL] * 17}, "'models' must be a list of 1 to 16 models"),
    ({"models": {"0": MODEL}}, "'models' must be a list"),
    ({"models": [MODEL, MODEL]}, "names a file twice"),
    ({"models": [MODEL, {**MODEL, "file": "MODEL.onnx"}]}, "names a file twice"),
    ({"models": ["model.onnx"]}, r"models\[0\]: expected a JSON object"),
    ({"head": "softmax"}, "'head' must be one of raw"),
    ({"head": 7}, "'head' must be one of raw"),
    ({"names": []}, "at least one class name"),
    ({"names": {"0": "a", "2": "b"}}, "must number its 2 classes"),
    ({"names": {"0": 7}}, "must hold text"),
    ({"names": None}, "it states no 'names'"),
    ({"imgsz": None}, "it states no 'imgsz'"),
    ({"imgsz": [64]}, "'imgsz' must be"),
    ({"imgsz": [64, 99999]}, "'imgsz' must be"),
    ({"stride": 0}, "'stride' must be"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_MANIFESTS)
def test_malformed_manifests(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(edgeyolo.ManifestError, match=f"^where: .*{message}"):
        parse_manifest(json.dumps({**record([MODEL]), **changed}).encode(), "where")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[]", r"expected a JSON object, found \[\]"),
        (b"null", "expected a JSON object, found None"),
        (b'{"format": 1, "format": 1}', "a key is there twice"),
        (b'{"format": NaN}', "NaN is no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"format": ' + b"9" * 10_000 + b"}", "no JSON|expected format"),
    ],
)
def test_what_is_no_manifest(text: bytes, message: str) -> None:
    with pytest.raises(edgeyolo.ManifestError, match=f"^where: .*{message}"):
        parse_manifest(text, "where")
