"""Reads a Hugging Face checkpoint into host arrays that the caller owns, a few rows at a time.

Called when a model is made. Host memory beyond the destination: a few megabytes and the scales of
one matrix; never a whole tensor. A matrix whose destination is in block FP8 is copied byte for byte
where the checkpoint has it so, and quantised in strips of whole blocks where not.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import ParamSpec, parameter_specs
from glm_jax.weights.checkpoint import open_checkpoint
from glm_jax.weights.errors import CheckpointError, CorruptCheckpointError
from glm_jax.weights.headers import NUMPY_DTYPES, StoredTensor
from glm_jax.weights.names import Piece
from glm_jax.weights.plan import LoadPlan, PlannedTensor, plan_load
from glm_jax.weights.quant import (
    BLOCK,
    FP8,
    QuantisedBlocks,
    dequantise_rows,
    quantise_blocks,
    scale_shape,
)

# A parameter's host array, or values and scales of one in block FP8.
Destination = np.ndarray | tuple[np.ndarray, np.ndarray]

# Elements read at once: 4 MB in float32, and still 64 rows of the widest matrix of GLM-5.3, which
# fill whole cache lines when they are written as columns.
_SLAB_ELEMENTS = 1 << 20


def load_parameters(
    path: str | Path,
    config: GlmConfig,
    destination: Callable[[str], Destination],
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> LoadPlan:
    """Fill a model's parameters from a checkpoint in BF16, F16, F32 or block FP8.

    Nothing is read before the whole checkpoint is known to match. Values are converted to the
    destination's dtype; FP8 is dequantised in float32 first, unless the destination is FP8 itself.

    Args:
        path: a checkpoint directory, or one safetensors file.
        config: the model.
        destination: returns the writable host array (possibly a strided view) of a parameter's
            shape to fill, by flat name; called once for each. float32 where the spec says so. For a
            quantised spec it may return a pair instead: float8_e4m3fn values ``[.., out, in]`` and
            float32 scales, one per started block of 128 x 128.
        progress: called as `progress(bytes_done, bytes_total, tensor_name)` after each tensor.

    Returns:
        What was read, and what was ignored.

    Raises:
        CheckpointError: see `errors.py` for its kinds. Also where a matrix that is to be quantised
            holds an infinity or a NaN.
        ValueError: a destination has a wrong shape or dtype.
    """
    stored = open_checkpoint(path)
    plan = plan_load({name: tensor.header for name, tensor in stored.items()}, config)
    targets = _Targets(destination, parameter_specs(config))
    # In the order of the files, so that a disk reads forward.
    ordered = sorted(plan.tensors, key=lambda t: (stored[t.name].path, stored[t.name].offset))
    total = sum(stored[name].nbytes for name in plan.consumed())
    done = 0
    for tensor in ordered:
        _load_tensor(tensor, stored, targets)
        done += stored[tensor.name].nbytes
        if tensor.scale_name is not None:
            done += stored[tensor.scale_name].nbytes
        if progress is not None:
            progress(done, total, tensor.name)
    return plan


class _Targets:
    """The destination arrays, asked for once each and checked."""

    def __init__(
        self, destination: Callable[[str], Destination], specs: dict[str, ParamSpec]
    ) -> None:
        self._destination = destination
        self._specs = specs
        self._arrays: dict[str, np.ndarray | QuantisedBlocks] = {}

    def __getitem__(self, name: str) -> np.ndarray | QuantisedBlocks:
        if name not in self._arrays:
            given = self._destination(name)
            if isinstance(given, np.ndarray):
                self._arrays[name] = self._plain(name, given)
            else:
                self._arrays[name] = self._blocks(name, QuantisedBlocks(*given))
        return self._arrays[name]

    def _plain(self, name: str, array: np.ndarray) -> np.ndarray:
        spec = self._specs[name]
        if array.shape != spec.shape:
            raise ValueError(
                f"destination of {name} has shape {array.shape}, expected {spec.shape}."
            )
        if spec.dtype == "float32" and array.dtype != np.float32:
            raise ValueError(f"destination of {name} is {array.dtype}, it has to be float32.")
        if not array.flags.writeable:
            raise ValueError(f"destination of {name} is read-only.")
        return array

    def _blocks(self, name: str, blocks: QuantisedBlocks) -> QuantisedBlocks:
        spec = self._specs[name]
        if not spec.quantised:
            raise ValueError(f"destination of {name} is a pair, but it has no block-FP8 form.")
        *stack, inputs, outputs = spec.shape
        for what, array, shape, dtype in (
            ("values", blocks.values, (outputs, inputs), FP8),
            ("scales", blocks.scales, scale_shape((outputs, inputs)), np.dtype(np.float32)),
        ):
            if (array.shape, array.dtype) != ((*stack, *shape), dtype):
                raise ValueError(
                    f"destination of {name} has {what} {array.dtype} {array.shape}, expected "
                    f"{dtype} {(*stack, *shape)}."
                )
        return blocks


class _Slab(NamedTuple):
    """Consecutive rows of a tensor, as stored, and the index of the first."""

    first_row: int
    rows: Shaped[np.ndarray, "rows ..."]


def _load_tensor(tensor: PlannedTensor, stored: dict[str, StoredTensor], targets: _Targets) -> None:
    scales = None
    if tensor.scale_name is not None:
        scales = _read_all(tensor.scale_name, stored[tensor.scale_name])
    for piece in tensor.pieces:
        target = targets[piece.parameter]
        if isinstance(target, QuantisedBlocks):
            blocks = piece.blocks_of(target)
            if scales is None:
                _quantise(tensor.name, stored[tensor.name], piece, blocks)
            else:
                blocks.scales[...] = scales
                _convert(tensor.name, stored[tensor.name], piece, blocks.values)
        else:
            rectangle = target[piece.index]
            filled = rectangle.T if piece.transposed else rectangle
            _convert(tensor.name, stored[tensor.name], piece, filled, scales)


def _convert(
    name: str,
    tensor: StoredTensor,
    piece: Piece,
    filled: Shaped[np.ndarray, "rows ..."],
    scales: Float[np.ndarray, "row_blocks col_blocks"] | None = None,
) -> None:
    """Fill a rectangle with a piece in the rectangle's dtype, dequantised if there are scales."""
    for slab in _slabs(name, tensor, piece):
        values = slab.rows
        if scales is not None:
            values = dequantise_rows(values, scales, first_row=slab.first_row)
        start = slab.first_row - piece.start
        _assign(filled[start : start + len(values)], values)


def _quantise(name: str, tensor: StoredTensor, piece: Piece, blocks: QuantisedBlocks) -> None:
    """Fill a rectangle in block FP8 from a tensor in a wider type."""
    for slab in _slabs(name, tensor, piece, multiple=BLOCK):
        try:
            quantised = quantise_blocks(slab.rows)
        except ValueError as error:
            raise CheckpointError(f"cannot quantise {name} to FP8: {error}") from error
        start = slab.first_row - piece.start
        _assign(blocks.values[start : start + len(slab.rows)], quantised.values)
        first = start // BLOCK
        blocks.scales[first : first + len(quantised.scales)] = quantised.scales


def _slabs(name: str, tensor: StoredTensor, piece: Piece, *, multiple: int = 1) -> Iterator[_Slab]:
    """Rows of a piece, as many at once as fit; all slabs but the last are a multiple of rows."""
    shape, dtype = tensor.header.shape, NUMPY_DTYPES[tensor.header.dtype]
    row_elements = int(np.prod(shape[1:], dtype=np.int64))
    step = max(1, _SLAB_ELEMENTS // (row_elements * multiple)) * multiple
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset + piece.start * row_elements * dtype.itemsize)
        for first in range(piece.start, piece.stop, step):
            rows = min(step, piece.stop - first)
            flat = np.fromfile(file, dtype, rows * row_elements)
            if flat.size != rows * row_elements:
                raise CorruptCheckpointError(
                    f"{tensor.path} ended while {name} was read: it changed since it was opened."
                )
            yield _Slab(first, flat.reshape(rows, *shape[1:]))


def _read_all(name: str, tensor: StoredTensor) -> Float[np.ndarray, "row_blocks col_blocks"]:
    whole = Piece(0, tensor.header.shape[0], name)
    return np.concatenate([slab.rows for slab in _slabs(name, tensor, whole)])


def _assign(target: Shaped[np.ndarray, "..."], values: Shaped[np.ndarray, "..."]) -> None:
    # Converted while contiguous, then copied across: in one go it takes twice as long.
    converted = values.astype(target.dtype, copy=False)
    if target.dtype.itemsize < 4:
        # NumPy copies bfloat16 and FP8 element by element through a callback; bits go fast.
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target.view(bits)[...] = converted.view(bits)
    else:
        target[...] = converted
