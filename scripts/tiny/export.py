"""Between training's parameters and the shipped checkpoint: block-FP8 out, float32 back in."""

import json
from pathlib import Path

import numpy as np

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import parameter_specs
from glm_jax.weights import export_parameters, load_parameters
from scripts.tiny.checkpoint import TrainingState
from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape
from scripts.tiny.tokenizer import EOS_IDS, PAD_ID

LARGEST_BYTES = 16_000_000
BIAS_SUFFIX = ".moe.router_bias"


def export_model(folder: Path, shape: TinyShape, state: TrainingState) -> None:
    """Write config.json, model.safetensors (block-FP8) and generation_config.json.

    Raises:
        ValueError: the weights take more than LARGEST_BYTES.
    """
    config = model_config(shape)
    values = dict(state.parameters)
    for row, layer in enumerate(shape.sparse_layers):
        values[f"layers.{layer}{BIAS_SUFFIX}"] = state.router_bias[row]
    export_parameters(folder, config, lambda name: np.asarray(values[name]), dtype="fp8")
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": PAD_ID,
    }
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if size > LARGEST_BYTES:
        raise ValueError(
            f"the weights in {folder} take {size} bytes, more than {LARGEST_BYTES}. Make the "
            "shape smaller."
        )


def model_config(shape: TinyShape) -> GlmConfig:
    """Return the engine's config of this shape."""
    return GlmConfig.from_hf(shape.to_hf(EOS_IDS, PAD_ID))


def load_model(folder: Path, shape: TinyShape) -> tuple[Parameters, np.ndarray]:
    """Read a shipped checkpoint as training's parameters and correction bias, in float32."""
    config = model_config(shape)
    values = {
        name: np.zeros(spec.shape, np.float32) for name, spec in parameter_specs(config).items()
    }
    load_parameters(folder, config, values.__getitem__)
    names = [f"layers.{layer}{BIAS_SUFFIX}" for layer in shape.sparse_layers]
    bias = np.stack([values.pop(name) for name in names])
    return values, bias
