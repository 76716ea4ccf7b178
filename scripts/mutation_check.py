"""Breaks one rule of the GPU layer at a time and shows that a test notices. Runs on the simulated driver; minutes.

    python scripts/mutation_check.py [build folder]

Works on a copy of the sources. Exit code 1 when a broken rule passes all tests. Needs what `make test-cpp` needs.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPU, PIPELINE = "edgeyolo_gpu_tests", "edgeyolo_pipeline10_tests"

# What is dropped, the file, its text, what stands there instead, and the tests that must notice.
MUTATIONS = (
    (
        "a graph must have nodes",
        "cpp/graph_capture.cpp",
        'if (result.nodes == 0) throw Refused("the capture recorded nothing");',
        "",
        GPU,
    ),
    (
        "a replay is compared with execution",
        "cpp/graph_capture.cpp",
        "result.note = self_check(stream, program, result.exec);",
        "(void)&self_check;",
        GPU,
    ),
    (
        "the engine must accept the capture",
        "cpp/graph_capture.cpp",
        '    if (!accepted) throw Refused(with_words("the engine refused to be captured", program));\n',
        "    (void)accepted;\n",
        GPU,
    ),
    (
        "the device's context is pushed first",
        "cpp/cuda.cpp",
        '    device.check(device.driver.cuCtxPushCurrent(device.context), "cuCtxPushCurrent");\n',
        "",
        GPU,
    ),
    (
        "the caller's context comes back",
        "cpp/cuda.cpp",
        '    report(device_, "cuCtxPopCurrent", device_.driver.cuCtxPopCurrent(&popped));\n',
        "    (void)popped;\n",
        GPU,
    ),
    (
        "captures of other threads do not disturb our calls",
        "cpp/cuda.cpp",
        "    return driver.cuThreadExchangeStreamCaptureMode(&mode) == success ? mode : unknown_mode;\n",
        "    (void)mode;\n    (void)driver;\n    return unknown_mode;\n",
        GPU,
    ),
    (
        "the parameter block waits for the frame's event",
        "cpp/slot.cpp",
        "    finished_.synchronize();\n",
        "",
        PIPELINE,
    ),
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


def must(*command: str | Path) -> None:
    done = run(*command)
    if done.returncode:
        sys.exit(f"{' '.join(str(part) for part in command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def main() -> int:
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "source"
        build = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(name) / "build"
        for folder in ("cpp", "cmake", "tests"):
            shutil.copytree(ROOT / folder, copy / folder)
        shutil.copy(ROOT / "CMakeLists.txt", copy)
        options = "-DEDGEYOLO_PYTHON=OFF -DEDGEYOLO_TESTS=ON -DEDGEYOLO_CUDA=OFF -DEDGEYOLO_TENSORRT_HEADERS=pypi"
        must("cmake", "-S", copy, "-B", build, "-DCMAKE_BUILD_TYPE=Debug", *options.split())
        targets = ("--target", GPU, PIPELINE)
        must("cmake", "--build", build, "-j2", *targets)
        for tests in (GPU, PIPELINE):
            must(build / "tests" / "cpp" / tests, "--gtest_brief=1")
        print("all tests pass with every rule in place", flush=True)
        for rule, file, text, instead, tests in MUTATIONS:
            path = copy / file
            original = path.read_text(encoding="utf-8")
            if original.count(text) != 1:
                sys.exit(f"{file} has {original.count(text)} times what this script replaces: {text!r}")
            path.write_text(original.replace(text, instead), encoding="utf-8")
            must("cmake", "--build", build, "-j2", *targets)
            try:
                done = subprocess.run(
                    [str(build / "tests" / "cpp" / tests), "--gtest_brief=1"],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=300,
                )
                failed = [line for line in done.stdout.splitlines() if line.startswith("[  FAILED  ]") and "ms" in line]
                noticed = done.returncode != 0
                how = f"{len(failed)} tests fail" if failed else f"the tests end with {done.returncode}"
            except subprocess.TimeoutExpired:
                noticed, how = True, "the tests hang"
            missed += not noticed
            print(f"{'noticed' if noticed else 'MISSED':8} {rule}: {how if noticed else 'all tests pass'}", flush=True)
            path.write_text(original, encoding="utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
