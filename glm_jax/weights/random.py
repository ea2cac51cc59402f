"""Draws weights for a model that has no checkpoint, into host arrays that the caller owns."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import ParamSpec, parameter_specs
from glm_jax.weights.quant import QuantisedBlocks, quantise_blocks


def fill_random(
    config: GlmConfig,
    destination: Callable[[str], np.ndarray | tuple[np.ndarray, np.ndarray]],
    seed: int,
) -> None:
    """Fill every parameter: norms near 1, biases that matter, activations of one size throughout.

    Args:
        config: the model.
        destination: as ``load_parameters`` takes it; what is in block FP8 gets the same draws,
            quantised.
        seed: same seed, same weights.
    """
    generator = np.random.default_rng(seed)
    for name, spec in parameter_specs(config).items():
        drawn, target = _draw(name, spec, generator), destination(name)
        if isinstance(target, np.ndarray):
            target[...] = drawn
        else:
            _quantise(drawn, QuantisedBlocks(*target))


def _draw(
    name: str, spec: ParamSpec, generator: np.random.Generator
) -> Float[np.ndarray, "*shape"]:
    """Norms 1 +- 0.1, biases +- 0.1, the rest scaled so that activations keep their size."""
    drawn = generator.standard_normal(spec.shape, dtype=np.float32)
    if name.endswith("bias"):
        return 0.1 * drawn
    if "norm" in name:
        return 1.0 + 0.1 * drawn
    if name in ("embed", "head"):
        return drawn * (1.0 if name == "embed" else spec.shape[-1] ** -0.5)
    fan_in = spec.shape[-1] if name.endswith("k_up") else spec.shape[-2]
    return drawn * fan_in**-0.5


def _quantise(drawn: Float[np.ndarray, "*stack inputs outputs"], target: QuantisedBlocks) -> None:
    for place in np.ndindex(drawn.shape[:-2]):
        target.values[place], target.scales[place] = quantise_blocks(drawn[place].T)
