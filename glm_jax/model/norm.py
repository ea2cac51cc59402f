"""RMSNorm and LayerNorm with float32 statistics; used by every layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# torch.nn.LayerNorm's value in the reference indexer; not a config key.
INDEX_KEY_NORM_EPS = 1e-6


def rms_norm(x: Float[Array, "N D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "N D"]:
    """Divide rows by their root mean square (Zhang & Sennrich 2019) and scale them."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "N I"], scale: Float[Array, " I"], bias: Float[Array, " I"], eps: float
) -> Float[Array, "N I"]:
    """Subtract the mean, divide by the deviation, then scale and shift (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(variance + eps)
    return (normal * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
