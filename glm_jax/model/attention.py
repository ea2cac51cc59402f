"""Multi-head latent attention, absorbed form: weights and row-wise projections.

Queries are carried into latent space through the key up-projection, so that the cached 576-wide
entry serves as key and value for all heads (DeepSeek-V2 report, section 2.1).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.model.config import GlmConfig
from glm_jax.model.norm import rms_norm
from glm_jax.model.rope import Rotation, rotate


class AttentionRows(NamedTuple):
    """What attention computes for each row before any row is read from the cache."""

    q_compressed: Float[Array, "N R"]  # also the indexer's input
    q_latent: Float[Array, "N H C"]  # float32
    q_rope: Float[Array, "N H B"]  # float32
    entry: Float[Array, "N C_plus_B"]  # normed latent, then the rotated shared key


class Attention(nnx.Module):
    """Weights of one attention layer."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        self.q_a = nnx.Param(arrays["q_a"])  # [D, R]
        self.q_a_norm = nnx.Param(arrays["q_a_norm"])  # [R]
        self.q_b = nnx.Param(arrays["q_b"])  # [R, H*(A+B)]
        self.kv_a = nnx.Param(arrays["kv_a"])  # [D, C+B]
        self.kv_a_norm = nnx.Param(arrays["kv_a_norm"])  # [C]
        self.k_up = nnx.Param(arrays["k_up"])  # [H, A, C]
        self.v_up = nnx.Param(arrays["v_up"])  # [H, C, U]
        self.o = nnx.Param(arrays["o"])  # [H*U, D]

    def project(self, x: Float[Array, "N D"], turn: Rotation, config: GlmConfig) -> AttentionRows:
        """Queries and the cache entry of every row; no row sees another."""
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        latent = config.kv_lora_rank
        q_compressed = rms_norm(x @ self.q_a[...], self.q_a_norm[...], config.latent_norm_eps)
        q = (q_compressed @ self.q_b[...]).reshape(-1, heads, nope + config.qk_rope_head_dim)
        q_latent = _per_head(q[..., :nope], self.k_up[...])
        interleaved = config.rope_interleave
        kv = x @ self.kv_a[...]
        k_rope = rotate(kv[:, None, latent:], turn, interleaved=interleaved)[:, 0]
        normed = rms_norm(kv[:, :latent], self.kv_a_norm[...], config.latent_norm_eps)
        return AttentionRows(
            q_compressed=q_compressed,
            q_latent=q_latent.astype(jnp.float32),
            q_rope=rotate(q[..., nope:], turn, interleaved=interleaved).astype(jnp.float32),
            entry=jnp.concatenate([normed, k_rope], axis=-1),
        )

    def combine(self, mixed: Float[Array, "N H C"]) -> Float[Array, "N D"]:
        """Latent mixtures of each head to the model width."""
        values = _per_head(mixed.astype(self.v_up.dtype), self.v_up[...])
        return values.reshape(mixed.shape[0], -1) @ self.o[...]


def _per_head(
    x: Float[Array, "N H inner"], weights: Float[Array, "H inner outer"]
) -> Float[Array, "N H outer"]:
    """Multiply every head's part of the rows by that head's matrix.

    Heads first, by hand: as one einsum with the heads in the middle, XLA's CPU backend lays the
    product out for its consumer and falls back to a plain loop (8 rows, 8 heads, 32 by 512: 200
    microseconds instead of 35).
    """
    return jnp.matmul(x.transpose(1, 0, 2), weights).transpose(1, 0, 2)
