"""Writes C++ base classes for the test TensorRT from NVIDIA's NvInferImpl.h, at build time.

    python gen_nvinfer.py INCLUDE_FOLDER OUTPUT.hpp

For each abstract class apiv::VName a class NameDefaults that overrides every pure virtual method: it logs an error that
names the method and answers a zero. nvinfer.cpp derives from them and implements what the adapter may use; whatever
else the adapter calls makes a test fail, in every version of the headers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TYPES = {"char", "int32_t", "TempfileControlFlags"}  # a parameter that ends with one of these has no name
CLASSES = ("Runtime", "CudaEngine", "ExecutionContext", "EngineInspector")


def methods(text: str, name: str) -> list[str]:
    body = re.search(rf"class\s+{name}\s*:\s*public\s+\w+\s*\{{(.*?)\n\}};", text, re.DOTALL)
    if body is None:
        raise SystemExit(f"{name} is not in these headers: does gen_nvinfer.py still fit them?")
    found = re.findall(r"virtual\s+(.*?)\s*=\s*0\s*;", body.group(1), re.DOTALL)
    return [re.sub(r"\s+", " ", method).strip() for method in found]


def override(owner: str, declaration: str) -> str:
    match = re.fullmatch(r"(.+?)\b(\w+)\s*\((.*)\)\s*((?:const)?)\s*((?:noexcept)?)", declaration)
    if match is None:
        raise SystemExit(f"cannot read the method: {declaration}")
    result, name, parameters, const, noexcept = match.groups()
    # Types alone: a parameter's name would only warn that it is unused.
    types = []
    for parameter in filter(None, (part.strip() for part in parameters.split(","))):
        named = re.fullmatch(r"(.*[\s*&])(\w+)", parameter)
        types.append(named.group(1).strip() if named and named.group(2) not in TYPES else parameter)
    result = result.strip()
    if result.endswith("&"):
        answer = f"static char zeros[256]; return reinterpret_cast<{result}>(zeros);"
    else:
        answer = "" if result == "void" else "return {};"
    return (
        f"    {result} {name}({', '.join(types)}) {const} {noexcept} override "
        f'{{ not_implemented("{owner}::{name}"); {answer} }}'
    )


def main() -> None:
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    text = (folder / "NvInferImpl.h").read_text(encoding="utf-8")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^#if ENABLE_.*?^#endif", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = ["// Generated from NVIDIA's headers by gen_nvinfer.py.", "#pragma once", "#include <NvInferRuntime.h>", ""]
    lines += ["namespace edgeyolo::toy {", "using namespace nvinfer1;", "void not_implemented(const char* method);"]
    for name in CLASSES:
        lines.append(f"class {name}Defaults : public apiv::V{name} {{\n  public:")
        lines += [override(name, method) for method in methods(text, f"V{name}")]
        lines.append("};")
    lines.append("}  // namespace edgeyolo::toy")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    temporary.replace(target)


if __name__ == "__main__":
    main()
