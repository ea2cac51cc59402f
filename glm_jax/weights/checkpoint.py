"""A checkpoint directory: which file holds which tensor, read from headers and the shard index."""

import json
from pathlib import Path

from glm_jax.weights.errors import CheckpointNotFoundError, CorruptCheckpointError
from glm_jax.weights.headers import StoredTensor, read_headers

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def open_checkpoint(path: str | Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint by name, reading headers only.

    Args:
        path: a directory with `model.safetensors` or an index and its shards, or one file.

    Raises:
        CheckpointNotFoundError: nothing is there, or shards that the index names are not.
        CorruptCheckpointError: a file is cut off, or the index and the files disagree.
    """
    given = Path(path)
    if given.is_file():
        return read_headers(given)
    if not given.is_dir():
        raise CheckpointNotFoundError(f"no checkpoint at {given}: no such file or directory.")
    if (given / SINGLE_NAME).is_file():
        return read_headers(given / SINGLE_NAME)
    if (given / INDEX_NAME).is_file():
        return _open_shards(given, _read_index(given / INDEX_NAME))
    present = sorted(file.name for file in given.iterdir())[:10]
    raise CheckpointNotFoundError(
        f"no weights in {given}: expected {SINGLE_NAME} or {INDEX_NAME} with its shards, found "
        f"{', '.join(present) or 'an empty directory'}."
    )


def _read_index(path: Path) -> dict[str, str]:
    """Return the file name for each tensor name."""
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is not a shard index: {error!r}.") from error
    if not isinstance(weight_map, dict):
        raise CorruptCheckpointError(f"{path}: weight_map is not an object.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CorruptCheckpointError(f"{path}: {name} is in {file!r}, expected a file name.")
    return weight_map


def _open_shards(directory: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    files = sorted(set(weight_map.values()))
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        raise CheckpointNotFoundError(
            f"{len(absent)} of {len(files)} shards are not in {directory}: "
            f"{', '.join(absent[:10])}. Fetch them."
        )
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_headers(directory / file).items():
            if name in stored:
                raise CorruptCheckpointError(
                    f"{name} is in two shards of {directory}: {stored[name].path.name} and {file}."
                )
            stored[name] = tensor
    lost = [
        name
        for name, file in weight_map.items()
        if name not in stored or stored[name].path.name != file
    ]
    if lost:
        raise CorruptCheckpointError(
            f"{len(lost)} tensors are not in the shard that the index of {directory} names: "
            + ", ".join(f"{name} ({weight_map[name]})" for name in lost[:10])
            + "."
        )
    return stored
