"""The only place that calls NVIDIA ModelOpt (0.47.0), and the cures for what it does wrong.

Each cure is a function of its own, so that a test can take it away and see the fault come back. What is wrong:

- `convert_to_mixed_precision` overwrites symbolic sizes of value_info with one name, "unk", for all of them. ONNX
  Runtime then takes tensors of different size for equal ones and fails. See `infer_again`.
- It drops the model's metadata: names, strides, head. See `keep_metadata`.
- Without `calibration_data` both functions calibrate on noise and say nothing. Ranges are measured by
  precision_graph.measure_ranges() instead, and `quantise` insists on pictures.
- `quantize` has no range check when it turns what it did not quantise into FP16, and does the decode in FP16 as well.
  It is therefore asked for an FP32 remainder; `autocast` comes after it.
- It puts Q/DQ in front of TopK, Flatten, GatherElements and ReduceMax of end-to-end heads: 8 bits for the scores that
  are sorted. The caller excludes the whole decode by name.
- It wants calibration batches of exactly the graph's batch size. See precision_graph.batches().
- It rewrites its input file in place, leaves side files beside the output, logs to stdout, prints progress bars, takes
  over the root logger. See `scratch` and `quiet`.
- When a package is missing it names an extra that does not install. See `require`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from edgeyolo.errors import EngineError, InvalidInput

from .precision_graph import batches

__all__ = ["Method", "autocast", "quantise"]

Method = Literal["max", "entropy"]
INSTALL = (
    "pip install nvidia-modelopt==0.47.0 onnx-graphsurgeon==0.6.1 polygraphy==0.53.6 lief==1.0.0 onnxscript==0.7.2 "
    "(without ModelOpt's own [onnx] extra, which replaces onnx and onnxruntime)"
)


def autocast(model: onnx.ModelProto, wide: Collection[str]) -> onnx.ModelProto:
    """The graph in FP16 except for the nodes named in `wide`; inputs and outputs keep their types."""
    with scratch(model) as path, quiet() as said:
        convert = require("modelopt.onnx.autocast", "convert_to_mixed_precision")
        try:
            # An infinite limit switches ModelOpt's own range check off, and with it the run on random data.
            converted: onnx.ModelProto = convert(
                str(path), keep_io_types=True, data_max=np.inf, nodes_to_exclude=patterns(wide)
            )
        except Exception as error:  # ModelOpt's errors are of every class
            raise EngineError(_told("converting to FP16", error, said)) from error
    return infer_again(keep_metadata(converted, model))


def quantise(
    model: onnx.ModelProto, images: NDArray[np.float32], skip: Collection[str], *, method: Method
) -> onnx.ModelProto:
    """The graph with INT8 Q/DQ pairs, ranges from `images`, everything else in FP32. Nodes in `skip` get none."""
    if images is None or len(images) == 0:
        raise InvalidInput("calibration needs pictures, found none")
    with scratch(model) as path, quiet() as said:
        quantize = require("modelopt.onnx.quantization", "quantize")
        out = path.with_name("quantised.onnx")
        try:
            quantize(
                str(path),
                quantize_mode="int8",
                calibration_data=batches(model, images),
                calibration_method=method,
                calibration_eps=["cpu"],
                nodes_to_exclude=patterns(skip),
                high_precision_dtype="fp32",
                output_path=str(out),
                log_level="WARNING",
            )
            converted = onnx.load(str(out))
        except Exception as error:  # ModelOpt's errors are of every class
            raise EngineError(_told("quantising to INT8", error, said)) from error
    return infer_again(keep_metadata(converted, model))


def infer_again(model: onnx.ModelProto) -> onnx.ModelProto:
    """Shapes and types of intermediate tensors, derived anew from the operators."""
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model)


def keep_metadata(model: onnx.ModelProto, source: onnx.ModelProto) -> onnx.ModelProto:
    del model.metadata_props[:]
    model.metadata_props.extend(source.metadata_props)
    return model


def patterns(names: Collection[str]) -> list[str]:
    """ModelOpt matches regular expressions at the beginning of a name; these match one name each."""
    return [f"{re.escape(name)}$" for name in names]


@contextlib.contextmanager
def scratch(model: onnx.ModelProto) -> Iterator[Path]:
    """The graph as a file that may be rewritten, in a folder that takes side files with it when it goes."""
    with tempfile.TemporaryDirectory(prefix="edgeyolo-precision-") as folder:
        path = Path(folder) / "graph.onnx"
        onnx.save(model, str(path))
        yield path


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """Keeps what ModelOpt, and ONNX Runtime's quantiser under it, print and log; yields the warnings and errors.

    Not for several threads at once: standard output is the process's. Loggers are as before afterwards.
    """
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.name.startswith("modelopt") or "modelopt" in record.pathname:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())
            return False
        return True

    root = logging.getLogger()
    loggers = [root, *(logging.getLogger(name) for name in ("modelopt.onnx", "modelopt.onnx.autocast"))]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    guard = logging.NullHandler()  # logging.warning() gives a root logger without handlers one on stderr, for good
    root.addHandler(guard)
    for logger in loggers:
        logger.addFilter(keep)
    try:
        nowhere = io.StringIO()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield said
    finally:
        for logger, handlers, level, propagate in before:
            logger.removeFilter(keep)
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate


def require(module: str, name: str) -> Callable[..., Any]:
    """A function of ModelOpt. Raises EngineError, naming the module that is really missing."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        cause: BaseException = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__ or cause
        missing = cause.name if isinstance(cause, ImportError) and cause.name else str(cause)
        raise EngineError(f"FP16 and INT8 need NVIDIA ModelOpt; it lacks the module {missing!r}: {INSTALL}") from error
    return found


def _told(doing: str, error: Exception, said: list[str]) -> str:
    hints = f"; it also said: {' | '.join(said[-3:])}" if said else ""
    return f"ModelOpt failed while {doing}: {type(error).__name__}: {' '.join(str(error).split())[:300]}{hints}"
