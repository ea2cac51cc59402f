"""sparse_mla for the CPU: a few rows at a time: K x 576 values in memory, not N x K x 576."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Rows gathered together: 1 to 8 rows per block were within 20 % of each other on CPU.
BLOCK_ROWS = 8


def sparse_mla(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    read: Callable[[Array], Array],
    *,
    scale: float,
) -> Float[Array, "N H C"]:
    """Map over blocks of rows (see ``api``)."""
    rows = entries.shape[0]
    latent_width = q_latent.shape[-1]
    queries = jnp.concatenate([q_latent, q_rope], axis=-1) * scale

    def attend(operands: tuple[Array, Array, Array]) -> Float[Array, "n H C"]:
        query, entry, valid_count = operands
        gathered = read(entry)
        valid = jnp.arange(entry.shape[1]) < valid_count[:, None]
        # where, not a product: an entry that is not selected may hold NaN.
        safe = jnp.where(valid[..., None], gathered, 0.0)
        scores = jnp.where(valid[:, None], jnp.einsum("nhe,nke->nhk", query, safe), -1e30)
        weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)) * valid[:, None]
        total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
        return jnp.einsum("nhk,nkc->nhc", weights / total, safe[..., :latent_width])

    if rows <= BLOCK_ROWS:
        return attend((queries, entries, count))
    spare = -rows % BLOCK_ROWS

    def blocked(array: Array) -> Array:
        padded = jnp.pad(array, ((0, spare), *((0, 0),) * (array.ndim - 1)))
        return padded.reshape(-1, BLOCK_ROWS, *array.shape[1:])

    out = jax.lax.map(attend, (blocked(queries), blocked(entries), blocked(count)))
    return out.reshape(rows + spare, *q_latent.shape[1:])[:rows]
