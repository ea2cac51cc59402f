"""Small pieces every layer uses: norms, rotary positions, gated MLP."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Rotation = tuple[Float[Array, "T half"], Float[Array, "T half"]]


def rms_norm(
    x: Float[Array, "*b N"], scale: Float[Array, " N"], eps: float
) -> Float[Array, "*b N"]:
    """Divide by the root mean square, then scale."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * scale


def layer_norm(
    x: Float[Array, "*b N"], scale: Float[Array, " N"], bias: Float[Array, " N"], eps: float
) -> Float[Array, "*b N"]:
    """Subtract the mean, divide by the deviation, scale and shift."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred**2).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + eps) * scale + bias


def rotation(positions: Int[Array, " T"], width: int, theta: float) -> Rotation:
    """Return cos and sin of the angles of each position; `width` / 2 pairs."""
    frequencies = theta ** (-jnp.arange(0, width, 2) / width)
    angles = positions[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "batch T *heads B"], turn: Rotation) -> Float[Array, "batch T *heads B"]:
    """Turn interleaved pairs (2i, 2i+1).

    The result is stored evens first, then odds: queries and keys are stored alike, so their dot
    products are those of the interleaved form.
    """
    cos, sin = turn
    if x.ndim == 4:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.concatenate([even * cos - odd * sin, odd * cos + even * sin], -1)


def gated_mlp(
    x: Float[Array, "*b D"], gate_up: Float[Array, "D F2"], down: Float[Array, "F D"]
) -> Float[Array, "*b D"]:
    """Compute down(silu(gate x) * up x); gate is the first half of `gate_up`."""
    gate, up = jnp.split(x @ gate_up, 2, -1)
    return (jax.nn.silu(gate) * up) @ down
