"""Stores rows of values in one plane of a paged pool; called by every layer, before it attends.

    pool[entry[n]] = encode(row[n])        for every n with entry[n] < pages * page_size

``encode`` is the pool's format (``pallas_kernels.formats``): it may quantise. ``entry[n]`` is
``page * page_size + offset``; at or past the plane's end it writes nowhere, which is how pad rows
are dropped. (Never -1: JAX would count it from the end.) No two rows name the same entry.

CPU and GPU share one fast implementation, XLA's scatter. Compiled for an H200 it writes in place,
with the encoding fused into it: one kernel for float32 and bfloat16, two or three for fp8_ds_mla
and three for fp8_planar, of which one finds the largest magnitudes (jax 0.10.2, 1 to 8384 rows).
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import find
from pallas_kernels.pool import PagedPool


def page_write(
    pool: PagedPool,
    entries: Int[Array, " N"],
    rows: Float[Array, "N width"],
    *,
    implementation: str | None = None,
) -> Array:
    """Write all rows of a layer.

    Args:
        pool: the layer's plane of the cache.
        entries: where each row goes.
        rows: values, of any float type.
        implementation: "reference" or "xla"; None is "xla" on every platform.

    Returns:
        The pool's array with the rows in it: the same memory where it is donated.

    Raises:
        ValueError: the implementation is unknown or does not exist, or the format does not store
            rows of this width.
    """
    if implementation == "mosaic_gpu":
        raise ValueError(
            "page_write has no implementation 'mosaic_gpu': XLA's scatter writes in place on a "
            "GPU too. Use 'xla'."
        )
    width, size = rows.shape[1], pool.array.shape[-1]
    if pool.stored.entry_size(width) != size:
        raise ValueError(
            f"page_write got rows of {width} values for a {pool.storage_format} pool whose "
            f"entries have {size} elements; they need {pool.stored.entry_size(width)}. Make the "
            "pool with that size."
        )
    write = find("page_write", "page_write", implementation or "xla")
    return write(pool, entries, rows)
