"""Log-probabilities of tokens at chosen rows, from raw logits; called inside the head program."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.sampling.row_logprobs import RowLogprobs


def logprobs_of(
    logits: Float[Array, "S V"],
    targets: Int[Array, " S"],
    further: Int[Array, "S b"],
    *,
    most: int,
) -> RowLogprobs:
    """Look tokens up in the log-softmax of each row, in float32.

    log p_t = (x_t - max x) - log(sum over v of exp(x_v - max x)).

    Args:
        logits: As the model gives them, before temperature, penalties and bans.
        targets: A token of each row.
        further: More tokens of each row.
        most: n, how many of the most likely tokens to name; at most V.
    """
    logits = logits.astype(jnp.float32)
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    logprobs = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))
    target = jnp.take_along_axis(logprobs, targets[:, None], axis=-1)
    # Ranks and the best are those of the logits: two of them may share a rounded logarithm.
    reached = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    rank = jnp.sum(logits >= reached, axis=-1, dtype=jnp.int32)
    _, top_ids = jax.lax.top_k(logits, most)
    return RowLogprobs(
        target[:, 0],
        rank,
        top_ids,
        jnp.take_along_axis(logprobs, top_ids, axis=-1),
        jnp.take_along_axis(logprobs, further, axis=-1),
    )
