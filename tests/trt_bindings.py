"""NVIDIA's real Python bindings of TensorRT, without TensorRT: what they offer, and a builder that takes only that.

The bindings are a wheel of about 1 MB. They need nine functions of the libraries, 2 GB more; here these are nine lines
of C that return nothing, so that the bindings can be imported, in a process of their own, and asked for their classes,
enumerations and signatures. Nothing of TensorRT runs.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpu_fixtures import missing

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "trt-bindings"

# The first and the last release of each major that edgeyolo names; 10.3 is JetPack 6's. Third: the last Python that
# there is a wheel for.
PINS = (
    ("tensorrt-cu12-bindings", "10.3.0", (3, 12)),
    ("tensorrt-cu13-bindings", "10.16.1.11", (3, 13)),
    ("tensorrt-cu13-bindings", "11.0.0.114", (3, 13)),
    ("tensorrt-cu13-bindings", "11.4.0.106", (3, 14)),
)
VERSIONS = tuple(version for _, version, python in PINS if sys.version_info[:2] <= python)

LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")
FUNCTIONS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)

# Run beside the bindings: {class: {member: docstring}}, {enumeration: {name: value}}.
DUMP = """
import importlib, json, sys
trt = importlib.import_module(sys.argv[1])
enums, classes = {}, {}
for name in dir(trt):
    value = getattr(trt, name)
    if not isinstance(value, type):
        continue
    if hasattr(value, "__members__"):
        enums[name] = {key: int(member) for key, member in value.__members__.items()}
    else:
        members = {m: getattr(value, m) for m in dir(value) if not m.startswith("__") or m == "__init__"}
        kinds = {m: "" if isinstance(v, property) else "call " for m, v in members.items()}
        classes[name] = {m: kinds[m] + (v.__doc__ or "") for m, v in members.items()}
print(json.dumps({"version": trt.__version__, "enums": enums, "classes": classes}))
"""


@functools.cache
def surface(version: str) -> dict[str, Any]:
    """Classes, enumerations and signatures of one release's bindings; "rtx": of the TensorRT-RTX that is installed."""
    if version == "rtx":
        return asked("tensorrt_rtx", ROOT, {})
    package = next(name for name, number, _ in PINS if number == version)
    folder = CACHE / f"{version}-py{sys.version_info[0]}.{sys.version_info[1]}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fetch(package, version, folder)
        for name in LIBRARIES:
            empty_library(folder, f"lib{name}.so.{version.split('.')[0]}")
        (folder / "done").touch()
    return asked("tensorrt_bindings", folder, {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)})


def fetch(package: str, version: str, folder: Path) -> None:
    wanted = [f"{package}=={version}", "--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *wanted], capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        missing(f"pip download {package}=={version} failed: {done.stderr[-300:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder)


def empty_library(folder: Path, name: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        missing("needs a C compiler")
        return
    source = folder / "empty.c"
    source.write_text("".join(f"void *{function}(void) {{ return 0; }}\n" for function in FUNCTIONS))
    target = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
    subprocess.run([compiler, *target], check=True)


def asked(module: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", DUMP, module],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{module} cannot be imported: {done.stderr[-600:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def names_used(source: str) -> Iterator[tuple[str, str]]:
    """(outermost function, "trt.X.Y") for each chain of names that begins with `trt`."""
    for top in ast.parse(source).body:
        inner: set[ast.AST] = set()
        for node in ast.walk(top):
            if not isinstance(node, ast.Attribute) or node in inner:
                continue
            chain, parts = node, [node.attr]
            while isinstance(chain.value, ast.Attribute):
                chain = chain.value
                inner.add(chain)
                parts.append(chain.attr)
            if isinstance(chain.value, ast.Name) and chain.value.id == "trt":
                yield getattr(top, "name", ""), ".".join(["trt", *reversed(parts)])


def fault(surface: dict[str, Any], name: str) -> str | None:
    """What is wrong with "trt.X.Y.Z" in these bindings; None when it is there."""
    parts = name.split(".")[1:]
    if parts[0].startswith("__"):  # the module's own
        return None
    if parts[0] in surface["enums"]:
        if len(parts) > 1 and parts[1] != "__members__" and parts[1] not in surface["enums"][parts[0]]:
            return f"{parts[0]} has no {parts[1]}"
    elif parts[0] in surface["classes"]:
        if len(parts) > 1 and parts[1] not in surface["classes"][parts[0]] and not parts[1].startswith("__"):
            return f"{parts[0]} has no {parts[1]}"
    else:
        return f"no {parts[0]}"
    return None


class Signature:
    """The overloads in a docstring of pybind11, each "f(self: X, a: int, b: bool = False) -> Y"."""

    def __init__(self, doc: str) -> None:
        lines = [line for line in doc.splitlines() if re.match(r"(\d+\. )?\w+\(self: ", line)]
        assert lines, f"no signature in {doc[:200]!r}"
        self.returns = lines[0].rpartition(") -> ")[2].strip()
        self.overloads = [split_arguments(line[line.index("(") + 1 : line.rindex(")")])[1:] for line in lines]

    def check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TypeError unless an overload takes that many arguments of those names."""
        for overload in self.overloads:
            names = [argument.partition(":")[0].strip() for argument in overload]
            required = {n for n, argument in zip(names, overload, strict=True) if " = " not in argument}
            given = {*names[: len(args)], *kwargs}
            unique = len(given) == len(args) + len(kwargs)
            if len(args) <= len(names) and unique and required <= given <= set(names):
                return
        raise TypeError(f"{name} takes {self.overloads}, found {len(args)} arguments and the keywords {sorted(kwargs)}")


def split_arguments(text: str) -> list[str]:
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


class Enumeration:
    """A real enumeration's names and values. Members know their name."""

    def __init__(self, values: dict[str, int]) -> None:
        self.__members__ = {name: Member(value, name) for name, value in values.items()}

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__["__members__"]
        if name not in members:
            raise AttributeError(name)
        return members[name]


class Member(int):
    name: str

    def __new__(cls, value: int, name: str) -> Member:
        member = super().__new__(cls, value)
        member.name = name
        return member


class Strict:
    """An object of a class of the bindings: only its members, called only as their signatures say. `answers` gives
    values; what is not in it answers by its documented type. Calls and assignments are written to `calls`."""

    def __init__(self, fake: FakeTensorrt, kind: str) -> None:
        self.__dict__.update(_fake=fake, _kind=kind, _members=fake.surface["classes"][kind])

    def _member(self, name: str) -> str:
        if name not in self._members:
            raise AttributeError(f"{self._kind} of TensorRT {self._fake.__version__} has no {name}")
        return str(self._members[name])

    def __getattr__(self, name: str) -> Any:
        doc = self._member(name)
        answer = self._fake.answers.get(f"{self._kind}.{name}")
        if not doc.startswith("call "):
            return answer(self) if callable(answer) else answer
        signature = Signature(doc.removeprefix("call "))

        def call(*args: Any, **kwargs: Any) -> Any:
            signature.check(f"{self._kind}.{name}", args, kwargs)
            self._fake.calls.append((f"{self._kind}.{name}", *args, *kwargs.values()))
            if answer is not None:
                return answer(self, *args) if callable(answer) else answer
            kind = signature.returns.rsplit(".", 1)[-1]
            if kind in self._fake.surface["classes"]:
                return Strict(self._fake, kind)
            return {"bool": True, "int": 0, "None": None}[kind]

        return call

    def __setattr__(self, name: str, value: Any) -> None:
        assert not self._member(name).startswith("call "), f"{self._kind}.{name} is a method"
        self._fake.calls.append((f"{self._kind}.{name} =", value))
        self._fake.answers[f"{self._kind}.{name}"] = value

    def __bytes__(self) -> bytes:
        return bytes(self._fake.answers["bytes"])


class FakeTensorrt:
    """The module `tensorrt` of one release as far as its bindings describe it, with a network of three layers."""

    def __init__(self, version: str) -> None:
        self.surface = surface(version)
        self.__version__ = str(self.surface["version"])
        self.calls: list[tuple[Any, ...]] = []
        self.warnings: list[str] = []
        fake = self

        class ILogger:
            Severity = Enumeration({"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2, "INFO": 3, "VERBOSE": 4})

            def __init__(self) -> None:
                fake.logger = self

        self.ILogger = ILogger
        self.logger: Any = None
        dtype = SimpleNamespace(name="HALF")
        tensors = {name: self.tensor(name, dtype) for name in ("images", "middle", "output0")}
        layers = [self.layer(i, tensors["middle" if i == 0 else "output0"]) for i in range(2)]
        self.answers: dict[str, Any] = {
            "bytes": b"the plan",
            "Builder.num_DLA_cores": 2,
            "INetworkDefinition.num_inputs": 1,
            "INetworkDefinition.num_outputs": 1,
            "INetworkDefinition.num_layers": 2,
            "INetworkDefinition.get_input": lambda _, index: tensors["images"],
            "INetworkDefinition.get_output": lambda _, index: tensors["output0"],
            "INetworkDefinition.get_layer": lambda _, index: layers[index],
            "OnnxParser.num_errors": 0,
            "ITensor.set_dynamic_range": True,
            "Builder.build_serialized_network": self.build,
        }

    def build(self, builder: Any, network: Any, config: Any) -> Any:
        for text in self.warnings:
            self.logger.log(Member(2, "WARNING"), text)
        return Strict(self, "IHostMemory")

    def tensor(self, name: str, dtype: Any) -> Any:
        made = Strict(self, "ITensor")
        made.__dict__.update(name=name, shape=(1, 3, 64, 64), dtype=dtype)
        for member in ("name", "shape", "dtype"):
            made._member(member)
        return made

    def layer(self, index: int, output: Any) -> Any:
        made = Strict(self, "ILayer")
        for member in ("name", "type", "num_outputs", "get_output"):
            made._member(member)
        made.__dict__.update(
            name=f"layer{index}", type=SimpleNamespace(name="CONVOLUTION"), num_outputs=1, get_output=lambda i: output
        )
        return made

    def __getattr__(self, name: str) -> Any:
        known: dict[str, Any] = self.__dict__["surface"]
        if name in known["enums"]:
            return Enumeration(known["enums"][name])
        if name in known["classes"]:
            return self.constructor(name)
        raise AttributeError(f"TensorRT {self.__version__} has no {name}")

    def constructor(self, kind: str) -> Callable[..., Strict]:
        signature = Signature(str(self.surface["classes"][kind]["__init__"]).removeprefix("call "))

        def make(*args: Any, **kwargs: Any) -> Strict:
            signature.check(kind, args, kwargs)
            self.calls.append((kind, *args))
            return Strict(self, kind)

        return make
