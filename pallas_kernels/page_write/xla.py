"""page_write as XLA scatters of whole rows; the only fast form, see ``api``."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pool import PagedPool

# One window per row, along the last dimension; the first two are single indices.
_WINDOWS = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1,),
    inserted_window_dims=(0, 1),
    scatter_dims_to_operand_dims=(0, 1, 2),
)


def page_write(pool: PagedPool, entries: Int[Array, " N"], rows: Float[Array, "N width"]) -> Array:
    """One scatter, or one for each part of a planar page (see ``api``)."""
    _, pages, page_size, _ = pool.array.shape
    bits = pool.stored.encode_entries(rows)
    if entries.shape[0] == 1:
        # XLA turns a scatter of one row into a select over the whole array: a copy of the pool
        # per layer. A second row that writes nowhere keeps it a scatter.
        entries = jnp.pad(entries, (0, 1), constant_values=pages * page_size)
        bits = jnp.pad(bits, ((0, 1), (0, 0)))
    # Rows to drop get pages past the end, each its own: distinct indices may be promised, without
    # which XLA stores every byte by compare-and-swap on a GPU, in case two rows met.
    past = pages + jnp.arange(entries.shape[0], dtype=entries.dtype)
    page = jnp.where(entries < pages * page_size, entries // page_size, past)
    offset = entries % page_size
    if not pool.stored.parts:
        # Three coordinates, not one into a flat view: run operator by operator, a reshape copies
        # the pool.
        return pool.array.at[pool.plane, page, offset].set(bits, mode="drop", unique_indices=True)
    return _write_parts(pool, page, offset, bits)


def _write_parts(
    pool: PagedPool,
    page: Int[Array, " N"],
    offset: Int[Array, " N"],
    bits: Array,
) -> Array:
    """A window of each page for every part of every row."""
    planes, pages, page_size, size = pool.array.shape
    plane = jnp.broadcast_to(jnp.asarray(pool.plane, page.dtype), page.shape)
    flat, first = pool.array.reshape(planes, pages, page_size * size), 0
    for part in pool.stored.parts:
        start = page_size * first + offset * part
        flat = jax.lax.scatter(
            flat,
            jnp.stack([plane, page, start], axis=-1),
            bits[:, first : first + part],
            _WINDOWS,
            unique_indices=True,
            mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
        )
        first += part
    return flat.reshape(pool.array.shape)
