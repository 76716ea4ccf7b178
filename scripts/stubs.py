"""Writes python/edgeyolo/_core.pyi from the built module, or checks that the committed one is up to date.

python scripts/stubs.py [--check]
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parents[1] / "python" / "edgeyolo" / "_core.pyi"


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pybind11_stubgen", "edgeyolo._core", "-o", folder, "--exit-code"],
            check=True,
            capture_output=True,
            text=True,
        )
        text = (Path(folder) / "edgeyolo" / "_core.pyi").read_text(encoding="utf-8")
    # The version is a fact of the build, not of the interface.
    text = re.sub(r"^__version__: str = .*$", "__version__: str", text, flags=re.M)
    text = text.replace("-> tuple:", "-> tuple[typing.Any, ...]:").replace("-> dict:", "-> dict[str, int]:")
    text = text.replace("os.PathLike |", "os.PathLike[str] |")
    for command in (["check", "--fix", "--select", "I"], ["format"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--quiet", "--stdin-filename", str(STUB), "-"],
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return text


def main() -> int:
    text = generate()
    if "--check" not in sys.argv[1:]:
        STUB.write_text(text, encoding="utf-8")
        return 0
    committed = STUB.read_text(encoding="utf-8")
    if committed == text:
        return 0
    sys.stdout.writelines(
        difflib.unified_diff(committed.splitlines(True), text.splitlines(True), "committed", "generated")
    )
    print("\n_core.pyi is out of date: python scripts/stubs.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
