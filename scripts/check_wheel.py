"""For an environment of the installed wheel and numpy alone: the package imports, and says what is missing.

python scripts/check_wheel.py WHEEL
"""

import sys
import zipfile

import edgeyolo

heavy = {"torch", "onnxruntime", "cv2", "ultralytics", "tensorrt"} & set(sys.modules)
assert not heavy, f"imported with the package: {heavy}"

with zipfile.ZipFile(sys.argv[1]) as wheel:
    sizes = {entry.filename: entry.compress_size for entry in wheel.infolist()}
unwanted = [name for name in sizes if name.endswith((".pt", ".a", ".o")) or "/tests/" in name]
assert not unwanted, f"not meant for the wheel: {unwanted}"
without_model = sum(size for name, size in sizes.items() if not name.endswith(".onnx"))
assert without_model < 2e6, f"the wheel has {without_model / 1e6:.2f} MB without the model, at most 2 MB are wanted"

model = edgeyolo.demo_model()
try:
    edgeyolo.load(model)
except edgeyolo.EngineError as error:
    assert "pip install 'edgeyolo[cpu]'" in str(error), error
else:
    raise AssertionError("ONNX Runtime is not installed here, loading must say so")
print(
    f"edgeyolo {edgeyolo.__version__}: imports with numpy alone; the wheel holds {len(sizes)} files, "
    f"{without_model / 1e6:.2f} MB without the model"
)
