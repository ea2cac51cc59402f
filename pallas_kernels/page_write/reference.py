"""Slow, obvious form of page_write: every element of an entry is stored by its own index."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.pool import PagedPool


def page_write(pool: PagedPool, entries: Int[Array, " N"], rows: Float[Array, "N width"]) -> Array:
    """Look up where the elements lie in a page (see ``api``)."""
    planes, pages, page_size, size = pool.array.shape
    flat = pool.array.reshape(planes, pages, page_size * size)
    # A page past the last one: the row is dropped.
    page, offset = entries // page_size, entries % page_size
    places = jnp.asarray(_places(page_size, pool.stored.parts or (size,)))[offset]
    bits = pool.stored.encode_entries(rows)
    written = flat.at[pool.plane, page[:, None], places].set(bits, mode="drop")
    return written.reshape(pool.array.shape)


def _places(page_size: int, parts: tuple[int, ...]) -> Int[np.ndarray, "page_size entry_size"]:
    """Where in a page the elements of each of its entries lie."""
    ends = page_size * np.cumsum(parts)
    columns = [
        end + (np.arange(page_size)[:, None] - page_size) * part + np.arange(part)
        for end, part in zip(ends, parts, strict=True)
    ]
    return np.concatenate(columns, axis=1)
