"""Paged caches full of random entries, and where the requests' pages lie in them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_kernels.formats import format_of
from pallas_kernels.page_write import page_write
from pallas_kernels.pool import PagedPool

PAGE_SIZE = 64


def random_pool(storage_format: str, width: int, planes: int, pages: int) -> PagedPool:
    """A pool whose planes all hold normal values; its plane is the last, the furthest in memory.

    Plane by plane: values before they are encoded take more memory than after.
    """
    stored, entries = format_of(storage_format), pages * PAGE_SIZE
    shape = (1, pages, PAGE_SIZE, stored.entry_size(width))

    def plane(key: Array) -> Array:
        empty = PagedPool(jnp.zeros(shape, stored.storage), 0, storage_format)
        values = jax.random.normal(key, (entries, width))
        return page_write(empty, jnp.arange(entries), values)[0]

    array = jax.lax.map(plane, jax.random.split(jax.random.key(0), planes))
    return PagedPool(array, jnp.int32(planes - 1), storage_format)


def entry_bytes(storage_format: str, width: int) -> int:
    """Bytes of one entry."""
    stored = format_of(storage_format)
    return stored.entry_size(width) * stored.storage.itemsize


def page_table(requests: int, pages: int) -> Int[np.ndarray, "requests pages"]:
    """Pages 1, 2, .. in random order; page 0 belongs to nobody."""
    order = np.random.default_rng(0).permutation(requests * pages) + 1
    return order.reshape(requests, pages).astype(np.int32)
