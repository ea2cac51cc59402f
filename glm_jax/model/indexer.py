"""Lightning indexer of a full layer: its queries, its cached key, its head weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_jax.model.config import GlmConfig
from glm_jax.model.linear import Linear
from glm_jax.model.norm import INDEX_KEY_NORM_EPS, layer_norm
from glm_jax.model.rope import Rotation, rotate


class IndexRows(NamedTuple):
    """What the indexer computes for each row; float32, because it decides."""

    queries: Float[Array, "N M I"]
    key: Float[Array, "N I"]
    weights: Float[Array, "N M"]


class Indexer(nnx.Module):
    """Weights of one indexer."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        """Wrap arrays, or shapes of arrays, by their names."""
        self.query = Linear(arrays["query"])  # [R, M*I]
        self.key = Linear(arrays["key"])  # [D, I]
        self.key_norm_scale = nnx.Param(arrays["key_norm_scale"])  # [I]
        self.key_norm_bias = nnx.Param(arrays["key_norm_bias"])  # [I]
        self.head_weight = Linear(arrays["head_weight"])  # [D, M]

    def __call__(
        self,
        x: Float[Array, "N D"],
        q_latent: Float[Array, "N R"],
        turn: Rotation,
        config: GlmConfig,
        kernels: str | None,
    ) -> IndexRows:
        """Project rows.

        RoPE turns the *first* ``qk_rope_head_dim`` components (in attention it is the last ones).
        The weights carry both factors M^-0.5 and I^-0.5; they may be negative.
        """
        heads, width = config.index_n_heads, config.index_head_dim
        queries = self.query(q_latent, kernels).reshape(-1, heads, width)
        key = layer_norm(
            self.key(x, kernels),
            self.key_norm_scale[...],
            self.key_norm_bias[...],
            INDEX_KEY_NORM_EPS,
        )
        weights = self.head_weight(x, kernels).astype(jnp.float32) * (heads * width) ** -0.5
        return IndexRows(
            queries=_rotate_first(queries.astype(jnp.float32), turn, config),
            key=_rotate_first(key.astype(jnp.float32)[:, None], turn, config)[:, 0],
            weights=weights,
        )


def _rotate_first(
    x: Float[Array, "N heads I"], turn: Rotation, config: GlmConfig
) -> Float[Array, "N heads I"]:
    """Turn the leading rope part, pass the rest."""
    rope = config.qk_rope_head_dim
    turned = rotate(x[..., :rope], turn, interleaved=config.indexer_rope_interleave)
    return jnp.concatenate([turned, x[..., rope:]], axis=-1)
