"""Logits of chosen rows, float32; in the step for sampled rows, alone for whole prompts."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def logits_of(
    hidden: Float[Array, "N D"], head: Float[Array, "V D"], rows: Int[Array, " S"]
) -> Float[Array, "S V"]:
    """Project rows of the final hidden states onto the vocabulary."""
    return jax.lax.dot_general(
        hidden[rows],
        head.astype(hidden.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
