"""Multi-head latent attention for training on CPU: expanded keys, block-causal, own gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from scripts.tiny.layers import Rotation, rms_norm, rotate
from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape

MASKED = -1e30


class Keys(NamedTuple):
    """Expanded keys and values of one layer."""

    nope: Float[Array, "batch H T A"]
    rope: Float[Array, "batch T B"]
    value: Float[Array, "batch H T U"]


def project_queries(
    shape: TinyShape, weights: Parameters, x: Float[Array, "batch T D"], turn: Rotation
) -> tuple[Float[Array, "batch T R"], Float[Array, "batch H T K"]]:
    """Return the normed query latent (the indexer reads it too) and the rotated queries."""
    batch, tokens, _ = x.shape
    latent = rms_norm(
        x @ weights["attention.q_a"], weights["attention.q_a_norm"], shape.rms_norm_eps
    )
    heads = (latent @ weights["attention.q_b"]).reshape(
        batch, tokens, shape.num_attention_heads, shape.qk_head_dim
    )
    nope, rope = jnp.split(heads, [shape.qk_nope_head_dim], -1)
    queries = jnp.concatenate([nope, rotate(rope, turn)], -1)
    return latent, queries.transpose(0, 2, 1, 3)


def project_keys(
    shape: TinyShape, weights: Parameters, x: Float[Array, "batch T D"], turn: Rotation
) -> Keys:
    """Expand keys and values without forming the 512-wide latent.

    The norm's scale is folded in the up-projection, and the down- and up-projection are multiplied
    once per step. What is left of the norm is one number per token, |x A|^2 = x (A A^T) x^T.
    """
    batch, tokens, hidden = x.shape
    down, rope_down = jnp.split(weights["attention.kv_a"], [shape.kv_lora_rank], 1)
    k_up = weights["attention.k_up"].transpose(2, 0, 1)
    v_up = weights["attention.v_up"].transpose(1, 0, 2)
    up = jnp.concatenate([k_up, v_up], -1).reshape(shape.kv_lora_rank, -1)
    folded = (down * weights["attention.kv_a_norm"]) @ up
    gram = down @ down.T / shape.kv_lora_rank
    width = folded.shape[1]
    wide = x @ jnp.concatenate([folded, gram, rope_down], 1)
    mean_square = jnp.sum(wide[..., width : width + hidden] * x, -1, keepdims=True)
    expanded = wide[..., :width] * jax.lax.rsqrt(mean_square + shape.rms_norm_eps)
    per_head = expanded.reshape(batch, tokens, shape.num_attention_heads, -1).transpose(0, 2, 1, 3)
    nope, value = jnp.split(per_head, [shape.qk_nope_head_dim], -1)
    return Keys(nope, rotate(wide[..., width + hidden :], turn), value)


@jax.custom_vjp
def attention_block(
    queries: Float[Array, "batch H Q K"],
    keys_t: Float[Array, "batch H K S"],
    values: Float[Array, "batch H S U"],
    allowed: Bool[Array, "#batch 1 Q S"],
) -> tuple[Float[Array, "batch H Q U"], Float[Array, "batch H Q S"]]:
    """Return the attention output and the weights; gradients flow through the output only.

    The gradient is written by hand because XLA's CPU matmul is four times slower when the large
    operand is the transposed one: only small operands are transposed here.
    """
    scores = jnp.where(allowed, queries @ keys_t, MASKED)
    exponent = jnp.exp(scores - scores.max(-1, keepdims=True))
    weights = exponent * (1 / exponent.sum(-1, keepdims=True))
    return weights @ values, weights


def _attention_forward(queries, keys_t, values, allowed):  # noqa: ANN001, ANN202
    output, weights = attention_block(queries, keys_t, values, allowed)
    return (output, weights), (queries, keys_t, values, weights, output)


def _attention_backward(saved, gradients):  # noqa: ANN001, ANN202
    queries, keys_t, values, weights, output = saved
    d_output = gradients[0]
    d_weights = d_output @ _transpose(values)
    d_scores = weights * (d_weights - (d_output * output).sum(-1, keepdims=True))
    d_queries = d_scores @ _transpose(keys_t)
    d_keys_t = _transpose(queries) @ d_scores
    d_values = _transpose(_transpose(d_output) @ weights)
    return d_queries, d_keys_t, d_values, None


attention_block.defvjp(_attention_forward, _attention_backward)


def attend(
    shape: TinyShape,
    queries: Float[Array, "batch H T K"],
    keys: Keys,
    selected: Bool[Array, "batch T S"] | None,
    *,
    block: int,
    row_stride: int | None,
) -> tuple[Float[Array, "batch T HU"], Float[Array, "batch rows S"] | None]:
    """Attend in blocks of queries, each to the keys up to its end.

    Args:
        shape: sizes.
        queries: rotated queries.
        keys: expanded keys and values.
        selected: keys that the indexer chose, or None for all; rows before index_topk ignore it.
        block: queries per block.
        row_stride: if given, every such row's weights (mean over heads) are returned as well.
    """
    batch, _, tokens, _ = queries.shape
    scaled = queries * shape.qk_head_dim**-0.5
    rope = jnp.broadcast_to(keys.rope[:, None], (*keys.nope.shape[:3], shape.qk_rope_head_dim))
    keys_t = _transpose(jnp.concatenate([keys.nope, rope], -1))
    outputs, sampled = [], []
    for start in range(0, tokens, block):
        end = min(start + block, tokens)
        allowed = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None, None]
        if selected is not None and end > shape.index_topk:
            allowed = allowed & selected[:, None, start:end, :end]
        output, weights = attention_block(
            scaled[:, :, start:end], keys_t[..., :end], keys.value[:, :, :end], allowed
        )
        outputs.append(output)
        if row_stride is not None:
            rows = jax.lax.stop_gradient(weights[:, :, row_stride - 1 :: row_stride].mean(1))
            sampled.append(jnp.pad(rows, ((0, 0), (0, 0), (0, tokens - end))))
    merged = jnp.concatenate(outputs, 2).transpose(0, 2, 1, 3).reshape(batch, tokens, -1)
    return merged, jnp.concatenate(sampled, 1) if sampled else None


def head_log_weights(
    shape: TinyShape, queries: Float[Array, "batch H T K"], keys: Keys, heads: tuple[int, ...]
) -> Float[Array, "batch heads T T"]:
    """Return the log attention weights of some heads over all causal keys."""
    rope = jnp.broadcast_to(keys.rope[:, None], (*keys.nope.shape[:3], shape.qk_rope_head_dim))
    whole = jnp.concatenate([keys.nope, rope], -1)[:, heads, :]
    scores = queries[:, heads, :] @ _transpose(whole) * shape.qk_head_dim**-0.5
    positions = jnp.arange(queries.shape[2])
    return jax.nn.log_softmax(jnp.where(positions[:, None] >= positions, scores, MASKED))


def _transpose(x: Float[Array, "*b N M"]) -> Float[Array, "*b M N"]:
    return jnp.swapaxes(x, -1, -2)
