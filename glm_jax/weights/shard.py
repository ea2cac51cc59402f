"""One safetensors file being written: header first, then tensors in any order, one at a time.

The exporter owns it. Unlike the safetensors library's writer it never holds the whole file.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Shaped

from glm_jax.weights.headers import NUMPY_DTYPES, TensorHeader


class ShardWriter:
    """Context manager around a new safetensors file.

    The file takes its name only when every tensor has been written and the block ended without an
    error; until then it is `<name>.partial`.
    """

    def __init__(self, path: Path, headers: Mapping[str, TensorHeader]) -> None:
        """Lay out the file.

        Args:
            path: the file's final name.
            headers: every tensor that will be written.
        """
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._headers = dict(headers)
        # Widest dtype first, as the safetensors library writes, keeps every tensor aligned.
        names = sorted(headers, key=lambda name: -NUMPY_DTYPES[headers[name].dtype].itemsize)
        self._offsets: dict[str, int] = {}
        position = 0
        entries = {}
        for name in names:
            end = position + tensor_bytes(headers[name])
            shape, dtype = headers[name]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            self._offsets[name] = position
            position = end
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":"))
        raw = text.encode()
        self._prologue = raw + b" " * (-len(raw) % 8)

    def __enter__(self) -> "ShardWriter":
        """Create the file and write its header."""
        self._file = self._partial.open("wb")
        self._file.write(len(self._prologue).to_bytes(8, "little") + self._prologue)
        return self

    def write(self, name: str, tensor: Shaped[np.ndarray, "..."]) -> None:
        """Write a tensor of exactly the announced shape and dtype.

        Raises:
            KeyError: the name was not announced, or was written before.
        """
        shape, dtype = self._headers[name]
        assert tensor.shape == shape, f"{name}: {tensor.shape=} {shape=}"
        assert tensor.dtype == NUMPY_DTYPES[dtype], f"{name}: {tensor.dtype=} {dtype=}"
        self._file.seek(8 + len(self._prologue) + self._offsets.pop(name))
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the file its name, or remove it after an error."""
        self._file.close()
        if kind is not None:
            self._partial.unlink()
            return
        assert not self._offsets, f"{self._path}: not written: {list(self._offsets)[:10]}"
        os.replace(self._partial, self._path)


def tensor_bytes(header: TensorHeader) -> int:
    """Return the bytes that a tensor takes in a file."""
    return math.prod(header.shape) * NUMPY_DTYPES[header.dtype].itemsize
