"""For an environment of the installed wheel and numpy alone: the package imports, and says what is missing."""

import importlib.metadata
import sys
from pathlib import Path

import edgeyolo

heavy = {"torch", "onnxruntime", "cv2", "ultralytics", "tensorrt"} & set(sys.modules)
assert not heavy, f"imported with the package: {heavy}"

files = importlib.metadata.files("edgeyolo") or []
sizes = {str(file): Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).exists()}
unwanted = [name for name in sizes if name.endswith(".pt") or "/tests/" in name]
assert not unwanted, f"not meant for the wheel: {unwanted}"

model = edgeyolo.demo_model()
try:
    edgeyolo.load(model)
except edgeyolo.EngineError as error:
    assert "pip install 'edgeyolo[cpu]'" in str(error), error
else:
    raise AssertionError("ONNX Runtime is not installed here, loading must say so")
print(
    f"edgeyolo {edgeyolo.__version__}: imports with numpy alone, "
    f"{len(files)} files, {sum(sizes.values()) / 1e6:.2f} MB installed"
)
