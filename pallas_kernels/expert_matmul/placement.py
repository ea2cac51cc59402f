"""Where the rows of each expert stand in the grouped matrices of the GPU kernel.

Everything has a static shape and no sort or loop: counts and ranks are sums of comparisons, in
pieces small enough that 65536 assignments to 256 experts take 17 million of them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.expert_matmul.config import ROW_GROUP

_CHUNK = 256


class Placement(NamedTuple):
    """Rows grouped by expert, groups aligned to ROW_GROUP; tiles that never span two experts."""

    place: Int[Array, "N X"]  # of each assignment; P where it is dropped
    row: Int[Array, " P"]  # which row of x stands there; 0 in gaps
    tile_expert: Int[Array, " tiles"]
    tile_start: Int[Array, " tiles"]  # first place
    tile_rows: Int[Array, " tiles"]  # that belong to the expert; the others are not to be stored
    used: Int[Array, "1"]  # tiles before this one exist


def place_rows(experts: Int[Array, "N X"], number: int, tile_size: int) -> Placement:
    """Group assignments by expert, in their given order, into tiles of at most ``tile_size``.

    Expert ``number`` means dropped.
    """
    rows, choices = experts.shape
    flat = experts.reshape(-1)
    assignments = rows * choices
    # Gaps of at most ROW_GROUP - 1 rows per expert; and a tile may be read in full anywhere.
    places = assignments + (ROW_GROUP - 1) * min(number, assignments) + tile_size
    places = _groups(places, ROW_GROUP) * ROW_GROUP
    rank, sizes = _ranks(flat, number)
    starts = _sums_before(_groups(sizes, ROW_GROUP) * ROW_GROUP)
    kept = flat < number
    place = jnp.where(kept, starts[jnp.where(kept, flat, 0)] + rank, places)
    row = jnp.zeros(places, jnp.int32)
    row = row.at[place].set(jnp.arange(assignments, dtype=jnp.int32) // choices, mode="drop")

    expert_tiles = _groups(sizes, tile_size)
    tiles_before = _sums_before(expert_tiles)
    tile = jnp.arange(assignments // tile_size + min(number, assignments), dtype=jnp.int32)
    ended = (tiles_before + expert_tiles) <= tile[:, None]
    tile_expert = jnp.minimum(jnp.sum(ended, axis=1, dtype=jnp.int32), number - 1)
    done = (tile - tiles_before[tile_expert]) * tile_size
    return Placement(
        place.reshape(rows, choices),
        row,
        tile_expert,
        starts[tile_expert] + done,
        jnp.minimum(sizes[tile_expert] - done, tile_size),
        jnp.sum(expert_tiles, dtype=jnp.int32, keepdims=True),
    )


def _ranks(flat: Int[Array, " A"], number: int) -> tuple[Int[Array, " A"], Int[Array, " E"]]:
    """How many earlier assignments have the same expert, and how many have each."""
    assignments = flat.shape[0]
    chunks = _groups(assignments, _CHUNK)
    missing = chunks * _CHUNK - assignments
    chunked = jnp.pad(flat, (0, missing), constant_values=number).reshape(chunks, _CHUNK)
    earlier = jnp.tril(jnp.ones((_CHUNK, _CHUNK), bool), -1)
    same = chunked[:, :, None] == chunked[:, None, :]
    in_chunk = jnp.sum(same & earlier, axis=2, dtype=jnp.int32)
    counts = jnp.sum(chunked[:, :, None] == jnp.arange(number), axis=1, dtype=jnp.int32)
    before = _sums_before(counts)
    known = jnp.minimum(chunked, number - 1)
    rank = in_chunk + jnp.take_along_axis(before, known, axis=1)
    return rank.reshape(-1)[:assignments], jnp.sum(counts, axis=0, dtype=jnp.int32)


def _sums_before(numbers: Array) -> Array:
    """Sum of all earlier numbers along the first axis.

    As comparisons in one pass: a scan is a chain of kernels on a GPU.
    """
    size = numbers.shape[0]
    earlier = jnp.tril(jnp.ones((size, size), bool), -1)
    earlier = earlier.reshape(size, size, *(1,) * (numbers.ndim - 1))
    return jnp.sum(jnp.where(earlier, numbers, 0), axis=1, dtype=jnp.int32)


def _groups(number: Any, size: int) -> Any:
    """``number / size``, rounded up."""
    return (number + size - 1) // size
