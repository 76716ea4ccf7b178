"""Who may read what was published."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from edgeyolo.tools.publish import publish

import edgeyolo
from export_run import onnx_run


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_permissions_are_those_of_the_umask(mask: int, file: int, folder: int, tmp_path: Path) -> None:
    run, to, before = onnx_run(tmp_path / "run"), tmp_path / "door", os.umask(mask)
    try:
        version = to / "versions" / publish(run, to).version
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (version, version.parent, to)} == {folder}
    assert {path.stat().st_mode & 0o777 for path in (*version.iterdir(), to / "current")} == {file}


def test_a_version_of_another_user_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, to = onnx_run(tmp_path / "run"), tmp_path / "door"
    publish(run, to)
    real = os.open

    def refused(path: Any, *args: Any, **options: Any) -> int:
        if path == "manifest.json":
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(edgeyolo.ManifestError, match=r"Permission denied; let user \d+ read it, .* umask"):
        edgeyolo.load(to)
