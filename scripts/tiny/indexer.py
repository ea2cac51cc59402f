"""The lightning indexer: scores, selection by threshold, and what its training needs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scripts.tiny.attention import MASKED
from scripts.tiny.layers import Rotation, layer_norm, rotate
from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape

KEY_NORM_EPS = 1e-6


class IndexInputs(NamedTuple):
    """What a score is made of; `rows` may be fewer than the tokens."""

    queries: Float[Array, "batch rows M I"]
    keys: Float[Array, "batch S I"]
    head_weights: Float[Array, "batch rows M"]


def index_inputs(
    shape: TinyShape,
    weights: Parameters,
    latent: Float[Array, "batch T R"],
    x: Float[Array, "batch T D"],
    turn: Rotation,
    *,
    row_stride: int | None = None,
) -> IndexInputs:
    """Project index queries (every `row_stride`-th row, or all), keys and head weights."""
    batch, _, _ = x.shape
    keys = layer_norm(
        x @ weights["indexer.key"],
        weights["indexer.key_norm_scale"],
        weights["indexer.key_norm_bias"],
        KEY_NORM_EPS,
    )
    rotated_keys = _rotate_front(keys, turn)
    if row_stride is not None:
        every = slice(row_stride - 1, None, row_stride)
        latent, x = latent[:, every], x[:, every]
        turn = (turn[0][every], turn[1][every])
    queries = (latent @ weights["indexer.query"]).reshape(
        batch, -1, shape.index_n_heads, shape.index_head_dim
    )
    head_weights = (x @ weights["indexer.head_weight"]) * shape.index_n_heads**-0.5
    return IndexInputs(_rotate_front(queries, turn), rotated_keys, head_weights)


def _rotate_front(x: Float[Array, "batch T *h I"], turn: Rotation) -> Float[Array, "batch T *h I"]:
    front, rest = jnp.split(x, [2 * turn[0].shape[-1]], -1)
    return jnp.concatenate([rotate(front, turn), rest], -1)


def index_scores(inputs: IndexInputs) -> Float[Array, "batch rows S"]:
    """Return sum over heads of weight * relu(query . key) (scaled), not masked."""
    batch, rows, heads, width = inputs.queries.shape
    scaled = (inputs.queries * width**-0.5).reshape(batch, rows * heads, width)
    per_head = jnp.einsum("bxd,bsd->bxs", scaled, inputs.keys).reshape(batch, rows, heads, -1)
    return jnp.einsum("brms,brm->brs", jax.nn.relu(per_head), inputs.head_weights)


def select_above_threshold(
    scores: Float[Array, "batch rows S"], count: int, iterations: int = 26
) -> Bool[Array, "batch rows S"]:
    """Mark about the `count` largest scores of each row by bisection (ties at the edge all stay).

    A sort of every row costs more than the layer on CPU; 26 halvings of the range do not.
    """
    finite = scores > 0.1 * MASKED
    low = jnp.where(finite, scores, jnp.inf).min(-1, keepdims=True)
    high = scores.max(-1, keepdims=True) + 1e-3

    def halve(_: int, bounds: tuple) -> tuple:
        low, high = bounds
        middle = 0.5 * (low + high)
        enough = (scores >= middle).sum(-1, keepdims=True) >= count
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = jax.lax.fori_loop(0, iterations, halve, (low, high))
    return (scores >= low) | (finite.sum(-1, keepdims=True) <= count)


def select_keys(
    shape: TinyShape,
    weights: Parameters,
    latent: Float[Array, "batch T R"],
    x: Float[Array, "batch T D"],
    turn: Rotation,
    *,
    block: int,
) -> Bool[Array, "batch T T"]:
    """Return the indexer's selection for every query; causality is applied in attention.

    Rows of blocks that end within index_topk are all True.
    """
    frozen = {name: jax.lax.stop_gradient(w) for name, w in weights.items() if "indexer" in name}
    latent, x = jax.lax.stop_gradient(latent), jax.lax.stop_gradient(x)
    inputs = index_inputs(shape, frozen, latent, x, turn)
    batch, tokens = x.shape[:2]
    blocks = []
    for start in range(0, tokens, block):
        end = min(start + block, tokens)
        if end <= shape.index_topk:
            blocks.append(jnp.ones((batch, end - start, tokens), bool))
            continue
        part = IndexInputs(
            inputs.queries[:, start:end], inputs.keys[:, :end], inputs.head_weights[:, start:end]
        )
        causal = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        chosen = select_above_threshold(
            jnp.where(causal, index_scores(part), MASKED), shape.index_topk
        )
        blocks.append(jnp.pad(chosen, ((0, 0), (0, 0), (0, tokens - end))))
    return jnp.concatenate(blocks, 1)


def recent_keys(count: int, keep: int) -> Bool[Array, "1 T T"]:
    """Return a control: each query keeps the last `keep` keys, itself included."""
    positions = jnp.arange(count)
    return (positions[:, None] - positions < keep)[None]


def random_keys(count: int, keep: int, seed: int) -> Bool[Array, "1 T T"]:
    """Return a control: each query keeps `keep` random keys among those it may see."""
    draws = jax.random.uniform(jax.random.key(seed), (1, count, count))
    positions = jnp.arange(count)
    return select_above_threshold(jnp.where(positions[:, None] >= positions, draws, MASKED), keep)
