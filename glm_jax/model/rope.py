"""Rotary positions (Su et al. 2021) in both pair layouts; used by attention and the indexer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Rotation(NamedTuple):
    """Cosines and sines of a set of rows, float32."""

    cos: Float[Array, "N half"]
    sin: Float[Array, "N half"]


def rotation(positions: Int[Array, " N"], width: int, theta: float) -> Rotation:
    """Angles position * theta^(-2i / width) for i in 0 .. width/2 - 1; positions are >= 0.

    Behind a condition that always holds: XLA's CPU backend would otherwise fuse the sines and
    cosines into every user and compute them again per head and layer (256 rows, 4 layers: 6 ms of
    a step of 210 ms), and it drops optimization barriers.
    """

    def turn() -> Rotation:
        exponents = jnp.arange(0, width, 2, dtype=jnp.float32) / width
        angles = positions[:, None].astype(jnp.float32) * theta**-exponents
        return Rotation(jnp.cos(angles), jnp.sin(angles))

    def nothing() -> Rotation:
        zeros = jnp.zeros((positions.shape[0], width // 2), jnp.float32)
        return Rotation(zeros, zeros)

    return jax.lax.cond(jnp.any(positions >= 0), turn, nothing)


def rotate(
    x: Float[Array, "N heads width"], turn: Rotation, *, interleaved: bool
) -> Float[Array, "N heads width"]:
    """Rotate each pair of components.

    ``interleaved`` pairs (2i, 2i+1), as every GLM-5.x does; otherwise (i, i + width/2), the
    half-split layout of DeepSeek-V3.2's indexer. The result keeps the layout of the input.
    """
    rows, heads, width = x.shape
    cos, sin = turn.cos[:, None], turn.sin[:, None]
    wide = x.astype(jnp.float32)
    if interleaved:
        pairs = wide.reshape(rows, heads, width // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = wide[..., : width // 2], wide[..., width // 2 :]
    turned = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
