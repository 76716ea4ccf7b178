"""The architecture is a test: who may import whom. See DESIGN.md."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "python" / "edgeyolo"
TOOLS = ROOT / "tools"
CPP = ROOT / "cpp"

# What the runtime may import, and where. Everything else in it is the standard library.
HOMES = {
    "numpy": None,  # anywhere
    "cv2": {"opencv.py"},
    "onnxruntime": {"session.py", "onnx_network.py"},
    "rich": {"output.py"},
    "supervision": {"detections.py"},
    "cryptography": {"published.py"},
}
NEVER_IN_RUNTIME = {"torch", "torchvision", "ultralytics", "tensorrt", "onnx", "modelopt", "cuda"}

# The order of the frame: a module imports only modules of lower rank.
RANKS = [
    {"errors", "address", "remote"},
    {"_core", "image", "manifest", "head", "opencv", "assets", "device"},
    {"detections", "pictures", "backend", "onnx_network", "published"},
    {"device_detections", "backend_cpu", "backend_engine", "onnx_slot", "video", "draw"},
    {"session", "engine", "backend_onnx_cuda", "handle", "options", "live", "lookup"},
    {"source", "onnx_cuda"},
    {"loading"},
    {"detector"},
    {"cli"},
    {"__main__"},
]


def imports(path: Path) -> list[tuple[str, bool, int]]:
    """(module, whether at import time, line) of each import; relative ones begin with a dot."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            inside.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in inside, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if node.level and not node.module:
                found += [("." * node.level + alias.name, node not in inside, node.lineno) for alias in node.names]
            else:
                found.append((base, node not in inside, node.lineno))
    return found


def runtime_files() -> list[Path]:
    return sorted(RUNTIME.rglob("*.py"))


@pytest.mark.parametrize("path", runtime_files(), ids=lambda path: str(path.relative_to(RUNTIME)))
def test_third_party_imports_have_one_home(path: Path) -> None:
    for module, at_import_time, line in imports(path):
        top = module.split(".")[0]
        if not top:
            continue
        assert top not in NEVER_IN_RUNTIME, f"{path}:{line} imports {module}"
        if top in HOMES:
            homes = HOMES[top]
            assert homes is None or path.name in homes, f"{path}:{line}: {top} is imported only in {homes}"
            if homes is not None:
                assert not at_import_time, (
                    f"{path}:{line}: {top} must be imported where it is used, not with the module"
                )


def rank(name: str) -> int:
    for position, names in enumerate(RANKS):
        if name in names:
            return position
    raise AssertionError(f"{name} has no rank: add it to RANKS in this file")


@pytest.mark.parametrize(
    "path", [p for p in runtime_files() if p.name != "__init__.py" or p.parent != RUNTIME], ids=lambda path: path.name
)
def test_runtime_modules_import_downwards_only(path: Path) -> None:
    own = path.relative_to(RUNTIME).parts[0].removesuffix(".py")
    depth = len(path.relative_to(RUNTIME).parts)
    for module, _, line in imports(path):
        level = len(module) - len(module.lstrip("."))
        if level == 0:
            if module.split(".")[0] == "edgeyolo":
                assert own in ("cli", "__main__"), f"{path}:{line}: use a relative import"
            continue
        if level < depth:
            continue  # inside the same sub-package
        target = module.lstrip(".").split(".")[0]
        if target and target not in (own, "__version__"):
            assert rank(target) < rank(own), f"{path}:{line}: {own} may not import {target}"


# The lines of the tools: the steps of a line import no other step, only the page in front of them names them together.
# A step is a module, or several that begin with its name.
EXPORT_STEPS = {"weights", "onnx", "silu", "calibration", "precision", "engine", "verify", "report"}
EXPORT_SHARED = {"graph"}  # what an ONNX file says of itself
STEP_OWNS = {"checkpoint": "weights"}  # modules that carry another name
EXPORT_PAGES = {
    *("export", "export_gate", "export_options", "export_record", "publish"),
    *("finetune", "finetune_loop", "finetune_options", "finetune_setup"),
}


def step_of(module: str) -> str:
    return STEP_OWNS.get(module, module.split("_")[0])


@pytest.mark.parametrize("path", sorted((TOOLS / "model").glob("*.py")), ids=lambda path: path.stem)
def test_export_steps_do_not_import_each_other(path: Path) -> None:
    if path.stem == "__init__":
        return
    own = step_of(path.stem)
    assert own in EXPORT_STEPS | EXPORT_SHARED, f"{path.name} belongs to no step"
    for module, _, line in imports(path):
        if module.startswith("..") and not module.startswith("..."):
            assert module[2:].split(".")[0] not in EXPORT_PAGES, f"{path}:{line} imports a page"
        elif module.startswith(".") and not module.startswith(".."):
            other = step_of(module[1:].split(".")[0])
            assert other in {own} | EXPORT_SHARED, f"{path}:{line}: the step {own} imports the step {other}"
        elif module.split(".")[0] == "ultralytics":
            assert own in ("weights", "onnx"), f"{path}:{line}: ultralytics stays inside weights and onnx"


# The steps of fine-tuning, each with the modules that are part of it. They meet in the page alone.
TRAIN_STEPS = {
    "data": set(),
    "augment": {"warp", "warp_triton"},
    "evaluate": {"evaluate_forward", "evaluate_pictures"},
    "checkpoint": {"classes"},
    "log": {"log_html"},
    "clock": set(),
}
# How much memory there is; whether Triton is; drawings of metrics; recording CUDA graphs.
TRAIN_SHARED = {"memory", "norm_silu", "curves", "graph"}


@pytest.mark.parametrize("own", sorted(TRAIN_STEPS))
def test_training_steps_do_not_import_each_other(own: str) -> None:
    for name in {own} | TRAIN_STEPS[own]:
        path = TOOLS / "train" / f"{name}.py"
        for module, _, line in imports(path):
            if module.startswith(".") and not module.startswith(".."):
                other = module[1:].split(".")[0]
                assert other in {own} | TRAIN_STEPS[own] | TRAIN_SHARED, f"{path}:{line}: {own} imports {other}"


# C++: one home each for pybind11, NVIDIA's headers and the operating system's loader.
CPP_HOMES = {
    r"#include <pybind11/": {
        "bindings.cpp",
        "bindings.hpp",
        "bindings_arrays.cpp",
        "bindings_arrays.hpp",
        "bindings_devices.cpp",
        "bindings_gpu.cpp",
        "bindings_halves.cpp",
    },
    r"#include <NvInfer": {"trt/adapter.cpp"},
    r"#include <dlfcn\.h>": {"cuda_driver.cpp", "trt/loader.cpp", "trt/adapter.cpp"},
    r"#include <(cuda|cuda_runtime|cuda_runtime_api)\.h>": set(),
    r"\b(exit|abort|_exit|terminate)\(": set(),
}


def cpp_files() -> list[Path]:
    return sorted(p for p in CPP.rglob("*") if p.suffix in (".cpp", ".hpp", ".cu", ".cuh"))


@pytest.mark.parametrize("path", cpp_files(), ids=lambda path: str(path.relative_to(CPP)))
def test_cpp_homes(path: Path) -> None:
    text = re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8"))
    name = path.relative_to(CPP).as_posix()
    for pattern, homes in CPP_HOMES.items():
        if name not in homes:
            assert not re.search(pattern, text), f"{name} contains {pattern}"


# A step of the frame includes no other step; only the page in front of them names them together.
STEPS = {"letterbox", "decode", "nms"}
STEP_MAY_INCLUDE = {"nms": {"decode"}}  # Candidates are what decode hands to nms


@pytest.mark.parametrize("path", cpp_files(), ids=lambda path: str(path.relative_to(CPP)))
def test_cpp_steps_do_not_include_each_other(path: Path) -> None:
    own = path.stem.split("_")[0]
    if own not in STEPS:
        return
    for header in re.findall(r'#include "([\w/]+)\.hpp"', path.read_text(encoding="utf-8")):
        other = header.split("_")[0]
        if other in STEPS and other != own:
            assert other in STEP_MAY_INCLUDE.get(own, set()), f"{path.name} includes {header}.hpp"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_long_files_say_why() -> None:
    for path in tracked():
        if path.suffix in (".py", ".cpp", ".hpp", ".cu") and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            if len(lines) > 400:
                assert "onger than most" in re.sub(r"\s+(//|#)?\s*", " ", "\n".join(lines[:15])), (
                    f"{path}: {len(lines)} lines, no reason given"
                )


def test_no_machine_paths() -> None:
    forbidden = re.compile("|".join(("/wo" + "rk/", "/ro" + "ot/", "/opt/" + "dev", "/opt/" + "ey")))
    for path in tracked():
        if path.exists() and path.suffix not in (".png", ".jpg", ".onnx", ".pt"):
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                assert not forbidden.search(line), f"{path}:{number}: {line.strip()[:100]}"
