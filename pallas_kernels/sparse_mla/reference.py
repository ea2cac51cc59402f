"""Slow, obvious form of sparse_mla: every row's entries gathered at once, float32 throughout."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla.queries import Queries
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.up_projections import UpProjections
from pallas_kernels.tiles import Tiles


def sparse_mla_decode(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    pool: PagedPool,
    *,
    scale: float,
) -> Float[Array, "N H C"]:
    """Gather N x K entries and attend densely over them (see ``api``)."""
    latent_width = q_latent.shape[-1]
    gathered = pool.read_entries(entries)
    latent, rope = gathered[..., :latent_width], gathered[..., latent_width:]
    scores = jnp.einsum("nhc,nkc->nhk", q_latent, latent)
    scores += jnp.einsum("nhb,nkb->nhk", q_rope, rope)
    valid = (jnp.arange(entries.shape[1]) < count[:, None])[:, None]
    probabilities = jax.nn.softmax(jnp.where(valid, scores * scale, -1e30), axis=-1)
    probabilities = jnp.where(valid, probabilities, 0.0)
    return jnp.einsum("nhk,nkc->nhc", probabilities, jnp.where(valid[:, 0, :, None], latent, 0.0))


def sparse_mla_prefill(
    queries: Queries,
    selection: Selection,
    tiles: Tiles,
    pool: PagedPool,
    up: UpProjections,
    *,
    scale: float,
) -> Float[Array, "N H U"]:
    """The same for every row that a tile names (see ``api``)."""
    count = jnp.where(tiles.names(selection.count.shape[0]), selection.count, 0)
    q_latent = up.absorb(queries.nope)
    mixed = sparse_mla_decode(q_latent, queries.rope, selection.entries, count, pool, scale=scale)
    return up.expand(mixed)
