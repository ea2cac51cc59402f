"""A NumPy array as text in JSON, and back, bit by bit."""

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def write_array(array: np.ndarray) -> list[Any]:
    """Return [dtype, shape, compressed bytes] as JSON values."""
    packed = zlib.compress(np.ascontiguousarray(array).tobytes(), level=1)
    return [array.dtype.str, list(array.shape), base64.b64encode(packed).decode()]


def read_array(values: Sequence[Any]) -> np.ndarray:
    """Return the array of what `write_array` made.

    Raises:
        ValueError: It was made by something else.
    """
    try:
        dtype, shape, packed = values
        content = zlib.decompress(base64.b64decode(packed, validate=True))
        return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
    except (TypeError, ValueError, zlib.error) as error:
        raise ValueError(f"no packed array: {type(error).__name__}: {error}") from error
