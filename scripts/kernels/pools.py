"""Paged caches full of random entries, and where the requests' pages lie in them."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import format_of
from pallas_kernels.pool import PagedPool

PAGE_SIZE = 64


def random_pool(storage_format: str, width: int, planes: int, pages: int) -> PagedPool:
    """A pool whose planes all hold normal values; its plane is the last, the furthest in memory.

    Plane by plane: values before they are encoded take more memory than after.
    """

    def plane(key: Array) -> Array:
        values, scales = jax.random.split(key)
        shape = (pages, PAGE_SIZE, width)
        return _encode(storage_format, jax.random.normal(values, shape), scales)

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


def _encode(
    storage_format: str, values: Float[Array, "pages page_size width"], key: Array
) -> Array:
    """Storage bits; scaled formats get scales between 0.5 and 2."""
    if storage_format == "float32":
        return values
    if storage_format == "bfloat16":
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    pages, page_size, _ = values.shape
    if storage_format == "fp8_planar":
        scales = jax.random.uniform(key, (pages, page_size), minval=0.5, maxval=2.0)
        parts = [_e4m3(values), _bytes(scales)]
        flat = jnp.concatenate([part.reshape(pages, -1) for part in parts], axis=1)
        return flat.reshape(pages, page_size, -1)
    assert storage_format == "fp8_ds_mla", f"{storage_format=} has no encoder here"
    latent, rope = values[..., :512], values[..., 512:]
    scales = jax.random.uniform(key, (pages, page_size, 4), minval=0.5, maxval=2.0)
    parts = [_e4m3(latent), _bytes(scales), _bytes(rope.astype(jnp.bfloat16))]
    return jnp.concatenate(parts, axis=-1)


def _e4m3(values: Array) -> Array:
    return jax.lax.bitcast_convert_type(values.astype(jnp.float8_e4m3fn), jnp.uint8)


def _bytes(values: Array) -> Array:
    """The bytes of numbers along the last axis."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(*values.shape[:-1], -1)
