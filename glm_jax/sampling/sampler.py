"""Draws one token per sampled row from its logits; called inside the step program.

The random numbers of a draw depend on the request's seed and on the position of the drawn token
only, never on the slot, the batch, the cell, chunking or speculation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from glm_jax.sampling.controls import ControlRows, apply_controls


class RowSettings(NamedTuple):
    """Sampling settings of each sampled row."""

    temperature: Float[Array, " S"]  # 0 = greedy
    top_k: Int[Array, " S"]  # 0 = off
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    seed: UInt[Array, "S 2"]
    position: Int[Array, " S"]  # of the token to be drawn
    min_length: Int[Array, " S"]
    stop_ids: Int[Array, "S T"]


def sample(
    logits: Float[Array, "S V"], rows: RowSettings, controls: ControlRows | None = None
) -> Int[Array, " S"]:
    """Draw a token for every row; greedy rows take the largest logit, the lowest id among equals.

    Order as in vLLM: allowed ids, bad words and bias, banned stop ids, penalties, temperature,
    min-p, top-k, top-p, then the draw. (Stop ids come first here: no bias and no penalty lifts
    -inf, and a forced token must stay allowed.)

    Args:
        logits: float32.
        rows: their settings.
        controls: what else changes the logits; None where no slot can have any.
    """
    banned = rows.position < rows.min_length
    logits = jax.lax.cond(
        jnp.any(banned), lambda: _ban_stop_ids(logits, rows, banned), lambda: logits
    )
    if controls is not None:
        logits = apply_controls(logits, controls)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    warm = rows.temperature > 0
    return jax.lax.cond(
        jnp.any(warm),
        lambda: jnp.where(warm, _draw(logits, rows), greedy),
        lambda: greedy,
    )


def _ban_stop_ids(
    logits: Float[Array, "S V"], rows: RowSettings, banned: Array
) -> Float[Array, "S V"]:
    ids = jnp.where(banned[:, None], rows.stop_ids, logits.shape[1])
    line = jnp.arange(logits.shape[0])[:, None]
    return logits.at[line, ids].set(-jnp.inf, mode="drop")


def _draw(logits: Float[Array, "S V"], rows: RowSettings) -> Int[Array, " S"]:
    """Gumbel-max over the kept tokens (exact sampling from the truncated softmax)."""
    # A greedy row's temperature is 0; its draw is discarded, only infinities must be avoided.
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    truncates = (rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)
    # Greedy rows and pads must not switch the sort on.
    truncates &= rows.temperature > 0
    kept = jax.lax.cond(jnp.any(truncates), lambda: _truncate(scaled, rows), lambda: scaled)

    def noise(seed: UInt[Array, "2"], position: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (logits.shape[1],), jnp.float32)

    return jnp.argmax(kept + jax.vmap(noise)(rows.seed, rows.position), axis=-1).astype(jnp.int32)


def _truncate(scaled: Float[Array, "S V"], rows: RowSettings) -> Float[Array, "S V"]:
    """Mask tokens outside min-p, top-k and top-p with -inf.

    A token equal to the last kept one stays only if its id is lower (stable sort), so that exactly
    k tokens remain.
    """
    vocab = scaled.shape[1]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    relative = ranked - ranked[:, :1]
    rank = jnp.arange(vocab)
    by_min_p = relative >= jnp.log(rows.min_p)[:, None]  # log 0 = -inf keeps all
    limit = jnp.where(rows.top_k > 0, rows.top_k, vocab)
    kept = by_min_p & (rank < limit[:, None])
    probability = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # Off is not "below 1": rounding may bring the mass before the last tokens to 1.
    by_top_p = (before < rows.top_p[:, None]) | (rows.top_p >= 1.0)[:, None]
    kept &= by_top_p | (rank == 0)
    line = jnp.arange(scaled.shape[0])[:, None]
    return jnp.full_like(scaled, -jnp.inf).at[line, order].set(jnp.where(kept, ranked, -jnp.inf))
