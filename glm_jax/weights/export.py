"""Writes parameters as a Hugging Face checkpoint: config.json and safetensors, BF16, F32 or FP8.

The inverse of the loader: what was loaded from the written files is bit-equal to the source, as
far as the chosen dtype holds it. Host memory: the source's parameters plus one tensor.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import ParamSpec, parameter_specs
from glm_jax.weights.checkpoint import INDEX_NAME, SINGLE_NAME
from glm_jax.weights.errors import CheckpointError
from glm_jax.weights.headers import NUMPY_DTYPES, TensorHeader
from glm_jax.weights.names import SCALE_SUFFIX, HfTensor, tensor_table
from glm_jax.weights.quant import (
    BLOCK,
    QuantisedBlocks,
    dequantise_rows,
    quantise_blocks,
    scale_shape,
)
from glm_jax.weights.shard import ShardWriter, tensor_bytes

# A parameter, or values and scales of one in block FP8.
Source = Callable[[str], np.ndarray | tuple[np.ndarray, np.ndarray]]

_PLAIN_DTYPES = {"bfloat16": "BF16", "float32": "F32", "fp8": "BF16"}

# One tensor of the table and what is stored for it: itself, in FP8 also its scales.
_Unit = tuple[str, dict[str, TensorHeader]]


class _Shard(NamedTuple):
    file: str
    units: list[_Unit]


def export_parameters(
    path: str | Path,
    config: GlmConfig,
    source: Source,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5_000_000_000,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Write a checkpoint directory that `load_parameters` and transformers read.

    Router weights and correction biases are float32 in every form, as transformers saves them.
    In FP8 the matrices that GLM-5.3 publishes so are quantised and the rest is BF16.

    Args:
        path: directory, made if it is not there; files of an earlier export are replaced.
        config: the model.
        source: returns a parameter by its flat name, in its spec's shape and any float dtype, or
            as `load_parameters` fills it where it is in block FP8; an FP8 export writes those
            bytes. It is called once for each parameter and its result is dropped soon after.
        dtype: "bfloat16", "float32" or "fp8".
        max_shard_bytes: tensors are spread over several files when they take more than this.
        progress: called as `progress(bytes_done, bytes_total, tensor_name)` after each tensor.

    Raises:
        ValueError: an unknown dtype, or a parameter of a wrong shape or with infinities (FP8).
        CheckpointError: the directory holds weight files that this export would not replace.
    """
    if dtype not in _PLAIN_DTYPES:
        raise ValueError(f"export dtype {dtype!r} is unknown; allowed: {sorted(_PLAIN_DTYPES)}.")
    directory = Path(path)
    table, specs = tensor_table(config), parameter_specs(config)
    units = [(name, _headers(name, tensor, specs, dtype)) for name, tensor in table.items()]
    shards = _shards(units, max_shard_bytes)
    total = sum(_unit_bytes(unit) for unit in units)
    directory.mkdir(parents=True, exist_ok=True)
    _check_leftovers(directory, shards)
    # Absent until the last file is written: a directory with a config is a whole checkpoint.
    (directory / "config.json").unlink(missing_ok=True)

    done, reader = 0, _ParameterReader(source, specs)
    for shard in shards:
        headers = {name: header for _, stored in shard.units for name, header in stored.items()}
        with ShardWriter(directory / shard.file, headers) as writer:
            for unit in shard.units:
                name, stored = unit
                matrix = reader.assemble(table[name])
                _write_unit(writer, name, stored, matrix)
                done += _unit_bytes(unit)
                if progress is not None:
                    progress(done, total, name)
    if len(shards) > 1:
        files = {
            name: shard.file for shard in shards for _, stored in shard.units for name in stored
        }
        _write_json(
            directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": files}
        )
    _write_json(directory / "config.json", hf_config(config, dtype))


def hf_config(config: GlmConfig, dtype: str) -> dict[str, Any]:
    """Return the `config.json` of an export, which says in what form the weights are."""
    if dtype != "fp8":
        return {**config.to_hf(), "dtype": dtype}
    plain = [
        name.removesuffix(".weight")
        for name, tensor in tensor_table(config).items()
        if len(tensor.shape) == 2 and not tensor.quantised
    ]
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": plain,
    }
    return {**config.to_hf(), "dtype": "bfloat16", "quantization_config": quantization}


def _headers(
    name: str, tensor: HfTensor, specs: dict[str, ParamSpec], dtype: str
) -> dict[str, TensorHeader]:
    if dtype == "fp8" and tensor.quantised:
        return {
            name: TensorHeader(tensor.shape, "F8_E4M3"),
            name + SCALE_SUFFIX: TensorHeader(scale_shape(tensor.shape), "F32"),
        }
    always_float32 = specs[tensor.pieces[0].parameter].dtype == "float32"
    return {name: TensorHeader(tensor.shape, "F32" if always_float32 else _PLAIN_DTYPES[dtype])}


def _shards(units: list[_Unit], max_shard_bytes: int) -> list[_Shard]:
    """Split tensors in order; one larger than the limit has a file of its own."""
    groups: list[list[_Unit]] = [[]]
    room = max_shard_bytes
    for unit in units:
        size = _unit_bytes(unit)
        if size > room and groups[-1]:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(unit)
        room -= size
    if len(groups) == 1:
        return [_Shard(SINGLE_NAME, groups[0])]
    count = len(groups)
    return [_Shard(f"model-{i:05d}-of-{count:05d}.safetensors", g) for i, g in enumerate(groups, 1)]


def _unit_bytes(unit: _Unit) -> int:
    return sum(tensor_bytes(header) for header in unit[1].values())


def _check_leftovers(directory: Path, shards: list[_Shard]) -> None:
    """Refuse to mix with other weights: a reader could take either."""
    written = {shard.file for shard in shards} | ({INDEX_NAME} if len(shards) > 1 else set())
    present = {file.name for file in directory.glob("*.safetensors*") if file.suffix != ".partial"}
    leftovers = sorted(present - written)
    if leftovers:
        raise CheckpointError(
            f"{directory} already holds {len(leftovers)} weight files that this export would not "
            f"replace: {', '.join(leftovers[:10])}. Choose an empty directory or remove them."
        )


class _ParameterReader:
    """Gathers tensors from parameters, asking the source for each parameter once.

    The table has all tensors of a parameter side by side, so only the parameters of the current
    tensor are held.
    """

    def __init__(self, source: Source, specs: dict[str, ParamSpec]) -> None:
        self._source = source
        self._specs = specs
        self._held: dict[str, np.ndarray | QuantisedBlocks] = {}

    def assemble(self, tensor: HfTensor) -> Shaped[np.ndarray, "..."] | QuantisedBlocks:
        """Return a tensor in its Hugging Face layout; possibly a view of a parameter."""
        names = {piece.parameter for piece in tensor.pieces}
        self._held = {name: self._parameter(name) for name in names}
        first = self._held[tensor.pieces[0].parameter]
        if isinstance(first, QuantisedBlocks):
            (piece,) = tensor.pieces
            return piece.blocks_of(first)
        parts = list(self._parts(tensor))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _parts(self, tensor: HfTensor) -> Iterator[np.ndarray]:
        for piece in tensor.pieces:
            parameter = self._held[piece.parameter]
            assert isinstance(parameter, np.ndarray), f"{piece.parameter=}"
            rectangle = parameter[piece.index]
            yield rectangle.T if piece.transposed else rectangle

    def _parameter(self, name: str) -> np.ndarray | QuantisedBlocks:
        if name in self._held:
            return self._held[name]
        given, expected = self._source(name), self._specs[name].shape
        if isinstance(given, tuple):
            blocks = QuantisedBlocks(*map(np.asarray, given))
            parameter, shape = blocks, blocks.values.swapaxes(-1, -2).shape
        else:
            parameter = np.asarray(given)
            shape = parameter.shape
        if shape != expected:
            raise ValueError(f"parameter {name} has shape {shape}, expected {expected}.")
        return parameter


def _write_unit(
    writer: ShardWriter,
    name: str,
    stored: dict[str, TensorHeader],
    tensor: np.ndarray | QuantisedBlocks,
) -> None:
    if name + SCALE_SUFFIX not in stored:
        plain = dequantise_rows(*tensor) if isinstance(tensor, QuantisedBlocks) else tensor
        writer.write(name, plain.astype(NUMPY_DTYPES[stored[name].dtype], copy=False))
        return
    try:
        quantised = tensor if isinstance(tensor, QuantisedBlocks) else quantise_blocks(tensor)
    except ValueError as error:
        raise ValueError(f"cannot write {name} in FP8: {error}") from error
    writer.write(name, quantised.values)
    writer.write(name + SCALE_SUFFIX, quantised.scales)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
