"""Slow, obvious form of sparse_mla: every row's entries gathered at once, float32 throughout."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def sparse_mla(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    read: Callable[[Array], Array],
    *,
    scale: float,
) -> Float[Array, "N H C"]:
    """Gather N x K entries and attend densely over them (see ``api``)."""
    latent_width = q_latent.shape[-1]
    gathered = read(entries)
    latent, rope = gathered[..., :latent_width], gathered[..., latent_width:]
    scores = jnp.einsum("nhc,nkc->nhk", q_latent, latent)
    scores += jnp.einsum("nhb,nkb->nhk", q_rope, rope)
    valid = (jnp.arange(entries.shape[1]) < count[:, None])[:, None]
    probabilities = jax.nn.softmax(jnp.where(valid, scores * scale, -1e30), axis=-1)
    probabilities = jnp.where(valid, probabilities, 0.0)
    return jnp.einsum("nhk,nkc->nhc", probabilities, jnp.where(valid[:, 0, :, None], latent, 0.0))
