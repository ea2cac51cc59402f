"""Logits of chosen rows, float32: in the step for sampled rows, and in a program of their own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.sampling.logprobs import logprobs_of
from glm_jax.sampling.row_logprobs import RowLogprobs


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


def head_rows(
    hidden: Float[Array, "ranks N D"],
    head: Float[Array, "V D"],
    rows: Int[Array, " S"],
    targets: Int[Array, " S"],
    further: Int[Array, "S b"],
    *,
    most: int,
) -> tuple[Float[Array, "S V"], RowLogprobs]:
    """The head program: logits of rows of a step, and log-probabilities of tokens there.

    Args:
        hidden: Final-norm rows that a step left on the device; one rank today.
        head: Output projection.
        rows: Of the step.
        targets: A token of each.
        further: More tokens of each.
        most: How many of the most likely tokens to name.
    """
    logits = logits_of(hidden[0], head, rows)
    return logits, logprobs_of(logits, targets, further, most=most)
