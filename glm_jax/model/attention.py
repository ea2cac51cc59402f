"""Multi-head latent attention: weights and row-wise projections (DeepSeek-V2 report, 2.1).

One cached 576-wide entry serves as key and value for all heads; ``pallas_kernels.sparse_mla`` has
the attention itself.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.model.config import GlmConfig
from glm_jax.model.linear import Linear
from glm_jax.model.norm import rms_norm
from glm_jax.model.rope import Rotation, rotate
from pallas_kernels.sparse_mla import Queries, UpProjections


class AttentionRows(NamedTuple):
    """What attention computes for each row before any row is read from the cache."""

    q_compressed: Float[Array, "N R"]  # also the indexer's input
    queries: Queries
    entry: Float[Array, "N C_plus_B"]  # normed latent, then the rotated shared key


class Attention(nnx.Module):
    """Weights of one attention layer."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        self.q_a = Linear(arrays["q_a"])  # [D, R]
        self.q_a_norm = nnx.Param(arrays["q_a_norm"])  # [R]
        self.q_b = Linear(arrays["q_b"])  # [R, H*(A+B)]
        self.kv_a = Linear(arrays["kv_a"])  # [D, C+B]
        self.kv_a_norm = nnx.Param(arrays["kv_a_norm"])  # [C]
        self.k_up = nnx.Param(arrays["k_up"])  # [H, A, C]
        self.v_up = nnx.Param(arrays["v_up"])  # [H, C, U]
        self.o = Linear(arrays["o"])  # [H*U, D]

    def project(
        self, x: Float[Array, "N D"], turn: Rotation, config: GlmConfig, kernels: str | None
    ) -> AttentionRows:
        """Queries and the cache entry of every row; no row sees another."""
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        latent = config.kv_lora_rank
        q_compressed = rms_norm(self.q_a(x, kernels), self.q_a_norm[...], config.latent_norm_eps)
        q = self.q_b(q_compressed, kernels).reshape(-1, heads, nope + config.qk_rope_head_dim)
        interleaved = config.rope_interleave
        kv = self.kv_a(x, kernels)
        k_rope = rotate(kv[:, None, latent:], turn, interleaved=interleaved)[:, 0]
        normed = rms_norm(kv[:, :latent], self.kv_a_norm[...], config.latent_norm_eps)
        return AttentionRows(
            q_compressed=q_compressed,
            queries=Queries(
                nope=q[..., :nope],
                rope=rotate(q[..., nope:], turn, interleaved=interleaved).astype(jnp.float32),
            ),
            entry=jnp.concatenate([normed, k_rope], axis=-1),
        )

    def up(self, dtype: str) -> UpProjections:
        """From latents to the heads' keys and values, to be multiplied in ``dtype``."""
        return UpProjections(self.k_up[...].astype(dtype), self.v_up[...].astype(dtype))

    def combine(self, values: Float[Array, "N H U"], kernels: str | None) -> Float[Array, "N D"]:
        """Mixtures of each head to the model width."""
        return self.o(values.reshape(values.shape[0], -1), kernels)
