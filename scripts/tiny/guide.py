"""Guided attention: a few heads are shown where to look, so that copying is learnt in minutes.

Copying what followed an earlier occurrence takes two heads in a row: one that carries the token
before to each position, one that looks for the current token among those. Left alone they form
after far more steps than this training has (none in 1.9 million tokens here). The positions are
known from the tokens, so the heads get them as a target, until the language loss needs them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scripts.tiny.attention import MASKED

# Heads of this layer look one and two tokens back, in this order. Not of an early layer: seen here,
# the first five hold no direction that all tokens share, without which a head cannot look by
# distance; layer 0 got nowhere in 130 steps, layer 5 had begun by itself.
BACK_LAYER = 5
GUIDED_HEADS = {
    BACK_LAYER: (1, 2),
    6: (0, 2),  # these look for a continuation, with the selection of layer 6's indexer
    7: (3, 4),
}


def continuations(tokens: Int[Array, "batch T_next"]) -> Bool[Array, "batch T T"]:
    """Mark, for every row i, the keys that show what follows it.

    A key j <= i is marked when its token is the next token of i and the token before it is that of
    i; where some such keys also agree two tokens back, only those are marked. Example: in
    "a b c a", behind the second "a", the key of "b" is marked if the next token is "b".
    """
    now, following = tokens[:, :-1], tokens[:, 1:]
    count = now.shape[1]
    positions = jnp.arange(count)
    before = jnp.pad(now, ((0, 0), (1, 0)), constant_values=-1)[:, :count]
    before_that = jnp.pad(now, ((0, 0), (2, 0)), constant_values=-2)[:, :count]
    once = (before[:, None, :] == now[:, :, None]) & (now[:, None, :] == following[:, :, None])
    once = once & (positions[:, None] >= positions)
    twice = once & (before_that[:, None, :] == before[:, :, None])
    return jnp.where(twice.any(-1, keepdims=True), twice, once)


def guide_loss(
    tokens: Int[Array, "batch T_next"], logs: tuple[Float[Array, "batch heads T T"], ...]
) -> Float[Array, ""]:
    """Return how surprised the guided heads are by their targets.

    `logs` are log attention weights of the guided layers in order; the first looks back.
    """
    back, copies = logs[0], logs[1:]
    looks_back = [
        -jnp.diagonal(back[:, head], offset=-(head + 1), axis1=1, axis2=2).mean()
        for head in range(back.shape[1])
    ]
    marked = continuations(tokens)
    known = marked.any(-1)
    losses = []
    for weights in copies:
        kept = jnp.where(marked[:, None], weights, MASKED)
        surprise = -jax.nn.logsumexp(kept, -1)
        total = jnp.where(known[:, None], surprise, 0.0).sum((0, 2))
        losses.append((total / jnp.maximum(known.sum(), 1)).mean())
    return jnp.stack(looks_back).mean() + jnp.stack(losses).mean()
