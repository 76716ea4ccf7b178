"""What counts as an image. Everything else is refused with the way to convert it, never guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInput

__all__ = ["as_frame", "as_image", "is_gpu_frame", "is_image"]

EXPECTED = "a uint8 array of the shape (height, width, 3), or (height, width), (height, width, 1), (height, width, 4)"
MAX_SIDE = 32767
DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def is_image(value: object) -> bool:
    """Whether a value is meant as one image, not as a sequence of images."""
    return value.ndim != 4 if isinstance(value, np.ndarray) else is_gpu_frame(value)


def is_gpu_frame(value: Any) -> bool:
    """Whether a value offers memory of an NVIDIA GPU, by DLPack or `__cuda_array_interface__`."""
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__dlpack_device__"):
        return value.__dlpack_device__()[0] in DLPACK_CUDA
    return hasattr(value, "__cuda_array_interface__")


def as_frame(value: Any) -> Any:
    """`as_image(value)`, except that an image in GPU memory is left as it is: the core checks it when it is used."""
    return value if is_gpu_frame(value) else as_image(value)


def as_image(value: Any) -> NDArray[np.uint8]:
    """Checks one image and returns it as uint8, without a copy unless it is uint16 (divided by 257, rounded).

    value: uint8 or uint16 array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), 1 to 32,767 pixels a side, any strides.
    Raises InvalidInput for anything else: None, a path, empty, float, bool, channels first.
    """
    # The usual case first: every frame comes through here.
    if type(value) is np.ndarray and value.dtype == np.uint8 and value.ndim == 3:
        height, width, channels = value.shape
        if channels == 3 and 0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE:
            return value
    if value is None:
        raise InvalidInput(
            f"the image is None: expected {EXPECTED}. A failed cv2.imread or camera read returns None; "
            "check it before the call, or let edgeyolo.open() report the file"
        )
    if not isinstance(value, np.ndarray):
        raise InvalidInput(f"expected {EXPECTED}, found {type(value).__name__}. {_conversion_hint(value)}")
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidInput(
            f"expected {EXPECTED}, found a masked array, whose mask has no meaning here; use image.filled(0)"
        )
    found = f"found dtype {value.dtype} and shape {value.shape}"
    if value.ndim not in (2, 3):
        raise InvalidInput(f"expected {EXPECTED}, {found}. Pass a batch as a list of images")
    if value.size == 0:
        raise InvalidInput(f"the image is empty: expected {EXPECTED}, {found}")
    if value.ndim == 3 and value.shape[2] not in (1, 3, 4):
        hint = "it has 1, 3 or 4 channels"
        if value.shape[0] in (1, 3, 4):
            hint = "the channels come last: use image.transpose(1, 2, 0)"
        raise InvalidInput(f"expected {EXPECTED}, {found}; {hint}")
    if max(value.shape[:2]) > MAX_SIDE:
        raise InvalidInput(f"an image is at most {MAX_SIDE} pixels wide and high, {found}; cut it into tiles")
    if value.dtype == np.uint8:
        return value
    if value.dtype.newbyteorder("=") == np.uint16:  # either byte order: TIFF and PGM readers return both
        # 65535 / 257 = 255: full scale stays full scale. Half up, in 32 bits.
        return ((value.astype(np.uint32) + 128) // 257).astype(np.uint8)
    hint = {
        "f": "use (image * 255).round().astype('uint8') for values in 0..1, image.astype('uint8') for 0..255",
        "b": "use image.astype('uint8') * 255",
    }.get(value.dtype.kind, "use image.astype('uint8') if its values are in 0..255")
    raise InvalidInput(f"expected {EXPECTED}, {found}; {hint}")


def _conversion_hint(value: object) -> str:
    if isinstance(value, (str, bytes)) or hasattr(value, "__fspath__"):
        return "For files use detector.stream(path) or edgeyolo.open(path)"
    module = type(value).__module__.partition(".")[0]
    if module == "PIL":
        return "Use numpy.asarray(image.convert('RGB')) and load the model with color='rgb'"
    if module == "torch":
        return "Use tensor.cpu().numpy(), with the channels last and uint8 values"
    return "Convert it to a numpy array"
