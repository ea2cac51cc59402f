"""Finds the model a caller names - a folder, the embedded one, random weights - and loads it."""

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import jax

from glm_jax.model.config import GlmConfig
from glm_jax.model.hf_config import read_config_file
from glm_jax.model.parameters import FP8_BLOCK
from glm_jax.model.presets import PRESETS
from glm_jax.model.storage import ParameterStore
from glm_jax.model.transformer import Transformer
from glm_jax.weights.load import load_parameters
from glm_jax.weights.random import fill_random

EMBEDDED = "glm-5.3-mini"
RANDOM = "tiny-random"

Progress = Callable[[int, int, str], None]


class ModelFiles(NamedTuple):
    """A model's description and where its files are.

    Attributes:
        name: what to call it.
        config: its description.
        folder: of its files; None means random weights.
        fp8: whether its config says that the weights are stored in block FP8.
    """

    name: str
    config: GlmConfig
    folder: Path | None
    fp8: bool = False


def find_model(model: str | Path | None) -> ModelFiles:
    """Resolve what a caller passed as ``model``.

    Args:
        model: None for the embedded model, "tiny-random" for small random weights, or the folder
            of a Hugging Face checkpoint.

    Raises:
        FileNotFoundError: there is no such folder, or it has no config.json.
        ValueError: its config describes no model of this family.
    """
    if model is None:
        folder = Path(str(files("glm_jax"))) / "data" / EMBEDDED
        return _read(folder, EMBEDDED)
    if str(model) == RANDOM:
        return ModelFiles(RANDOM, PRESETS[RANDOM], None)
    folder = Path(model)
    if not folder.exists():
        raise FileNotFoundError(
            f"model {str(model)!r} is no folder here. Pass the folder of a checkpoint in Hugging "
            f"Face format, {RANDOM!r}, or nothing for the embedded model; models are not "
            "downloaded."
        )
    return _read(folder, folder.name)


def load_model(
    found: ModelFiles,
    *,
    dtype: str,
    storage: str,
    seed: int,
    device: jax.Device,
    weight_dtype: str | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """Fill the weights and move them to the device.

    Args:
        found: from ``find_model``.
        dtype: "float32" or "bfloat16", of plain weights.
        storage: "per_layer" or "stacked".
        seed: of random weights.
        device: where they go.
        weight_dtype: "float32", "bfloat16" or "fp8" (``storage.parameter_tree``); None is dtype.
        progress: called with bytes done, bytes in all and the tensor's name.

    Raises:
        CheckpointError: the checkpoint is incomplete, damaged or of another shape.
    """
    store = ParameterStore(found.config, dtype=dtype, storage=storage, weight_dtype=weight_dtype)
    if found.folder is None:
        fill_random(found.config, store.destination, seed)
    else:
        load_parameters(found.folder, found.config, store.destination, progress=progress)
    return store.to_device(device)


def _read(folder: Path, name: str) -> ModelFiles:
    data = read_config_file(folder)
    quantization = data.get("quantization_config") or {}
    # Blocks of another size are refused by the loader, whatever they are to become.
    block = quantization.get("weight_block_size")
    fp8 = quantization.get("quant_method") == "fp8" and block == [FP8_BLOCK, FP8_BLOCK]
    return ModelFiles(name, GlmConfig.from_hf(data), folder, fp8)
