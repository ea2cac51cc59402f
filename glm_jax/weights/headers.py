"""Safetensors headers: what tensors a file holds and where; no tensor data is read here.

Read by hand because safetensors' NumPy front end has no FP8 and maps whole files, while the
loader reads a few rows at a time. Layout: 8 bytes header size, JSON header, data.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from glm_jax.weights.errors import CorruptCheckpointError
from glm_jax.weights.quant import FP8

# The floating-point dtypes that the loader and exporter handle.
NUMPY_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": FP8,
}

_SIZE_BYTES = 8
# The limit of the safetensors library itself.
_MAX_HEADER_BYTES = 100_000_000


class TensorHeader(NamedTuple):
    """Shape and safetensors dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str


class StoredTensor(NamedTuple):
    """A tensor in a file: its bytes are `offset` to `offset + nbytes` of the file."""

    header: TensorHeader
    path: Path
    offset: int
    nbytes: int


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        CorruptCheckpointError: the file is cut off or is not a safetensors file.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_SIZE_BYTES), "little")
        if file_bytes < _SIZE_BYTES or size > min(file_bytes - _SIZE_BYTES, _MAX_HEADER_BYTES):
            raise CorruptCheckpointError(
                f"{path} is cut off or is not a safetensors file: its header would take {size} "
                f"bytes and the file has {file_bytes}. Fetch it again."
            )
        raw = file.read(size)
    entries = _parse(path, raw)
    data_start = _SIZE_BYTES + size
    stored = {name: _stored(path, name, entry, data_start) for name, entry in entries.items()}
    _check_extent(path, stored, data_start, file_bytes)
    return stored


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptCheckpointError(f"{path} has a header that is not JSON: {error}.") from error
    if not isinstance(header, dict):
        raise CorruptCheckpointError(f"{path} has a header that is not a JSON object.")
    header.pop("__metadata__", None)
    return header


def _stored(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        dtype = str(entry["dtype"])
        begin, end = (int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{path}: the header entry of {name} is malformed.") from error
    # Other dtypes may be of any width: the plan refuses or ignores them by name.
    itemsize = NUMPY_DTYPES[dtype].itemsize if dtype in NUMPY_DTYPES else None
    wrong_size = itemsize is not None and end - begin != itemsize * math.prod(shape)
    if begin < 0 or end < begin or wrong_size:
        raise CorruptCheckpointError(
            f"{path}: {name} is {dtype} {list(shape)} but takes {end - begin} bytes."
        )
    return StoredTensor(TensorHeader(shape, dtype), path, data_start + begin, end - begin)


def _check_extent(
    path: Path, stored: dict[str, StoredTensor], data_start: int, file_bytes: int
) -> None:
    """Check that the tensors follow each other without gaps up to the end of the file."""
    position = data_start
    for name, tensor in sorted(stored.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise CorruptCheckpointError(
                f"{path}: {name} starts at byte {tensor.offset}, expected {position}."
            )
        position += tensor.nbytes
    if position != file_bytes:
        state = "cut off" if position > file_bytes else "longer than its header says"
        raise CorruptCheckpointError(
            f"{path} is {state}: the header needs {position} bytes and the file has {file_bytes}. "
            "Fetch it again."
        )
