"""Which cached entries each row attends to: full layers choose, shared layers reuse the choice."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.indexer import IndexRows
from glm_jax.model.rows import TILE_ROWS, Rows
from pallas_kernels.index_topk import index_topk_decode, index_topk_prefill
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import Selection
from pallas_kernels.tiles import Tiles

# Positions in the request, and how many of them are meant; what both segments return.
Found = tuple[Int[Array, "*rows K"], Int[Array, "*rows"]]


class Keys(NamedTuple):
    """The index keys of one layer and how to search them.

    Attributes:
        pool: the layer's plane of index keys.
        topk: entries per row.
        decode_path: "groups", or "extend" to send decode rows through the path of prefill rows.
        kernels: implementation of the operators.
    """

    pool: PagedPool
    topk: int
    decode_path: str = "groups"
    kernels: str | None = None


def empty_selection(rows: int, topk: int) -> Selection:
    """Nothing selected; what the layers start from."""
    nothing = jnp.zeros((rows, topk), jnp.int32)
    return Selection(nothing, nothing, nothing[:, 0])


def select(
    index: IndexRows, rows: Rows, page_table: Int[Array, "slots W"], keys: Keys
) -> Selection:
    """Score and select for both segments of a step.

    Args:
        index: indexer projections of all rows; their keys are already in the cache.
        rows: the step's rows.
        page_table: pages of each slot.
        keys: of this layer.
    """
    groups, width = rows.group_positions.shape
    prefill_rows = rows.tokens.shape[0] - groups * width
    parts: list[Found] = []
    if prefill_rows:
        # All rows: a slice of the queries would be another copy of them.
        found, count = select_chunks(index, rows.tiles, keys)
        parts.append((found[:prefill_rows], count[:prefill_rows]))
    if groups:
        decode = jax.tree.map(lambda array: array[prefill_rows:], index)
        found, count = select_groups(
            decode.queries.reshape(groups, width, *index.queries.shape[1:]),
            decode.weights.reshape(groups, width, -1),
            rows.group_positions,
            rows.group_page_table,
            keys,
        )
        parts.append((found.reshape(groups * width, -1), count.reshape(-1)))
    positions = jnp.concatenate([part[0] for part in parts])
    count = jnp.concatenate([part[1] for part in parts])
    return to_entries((positions, count), page_table, rows.slots, keys.pool.page_size)


def select_chunks(index: IndexRows, tiles: Tiles, keys: Keys) -> Found:
    """Select for the rows that ``tiles`` names; every other row gets count 0."""
    return index_topk_prefill(
        index.queries,
        index.weights,
        tiles,
        keys.pool,
        topk=keys.topk,
        implementation=keys.kernels,
    )


def select_groups(
    queries: Float[Array, "G Q M I"],
    weights: Float[Array, "G Q M"],
    positions: Int[Array, "G Q"],
    page_table: Int[Array, "G W"],
    keys: Keys,
) -> Found:
    """Select for decode groups.

    With ``decode_path`` "extend" a group is padded to a prefill tile and takes that path: what
    engines with a single extend kernel do, here to measure the difference.
    """
    groups, width = positions.shape
    if keys.decode_path == "groups":
        return index_topk_decode(
            queries,
            weights,
            positions,
            page_table,
            keys.pool,
            topk=keys.topk,
            implementation=keys.kernels,
        )
    row = jnp.arange(groups * width, dtype=jnp.int32).reshape(groups, width)
    spare = (0, 0), (0, max(0, TILE_ROWS - width))
    flat = IndexRows(
        queries.reshape(groups * width, *queries.shape[2:]),
        jnp.zeros((groups * width, queries.shape[-1])),
        weights.reshape(groups * width, -1),
    )
    tiles = Tiles(
        rows=jnp.pad(row, spare, constant_values=groups * width),
        positions=jnp.pad(positions, spare, constant_values=-1),
        page_table=page_table,
        chunk_first=positions[:, 0],
        chunk_last=jnp.max(positions, axis=1),
    )
    found, count = select_chunks(flat, tiles, keys)
    return found.reshape(groups, width, -1), count.reshape(groups, width)


def to_entries(
    found: Found,
    page_table: Int[Array, "slots W"],
    slots: Int[Array, "*rows"],
    page_size: int,
) -> Selection:
    """Turn positions in requests into entries of the pool.

    Args:
        found: positions and counts of rows.
        page_table: pages of each slot.
        slots: slot of each row.
        page_size: entries per page.
    """
    positions, count = found
    chosen = jnp.arange(positions.shape[-1]) < count[..., None]
    safe = jnp.where(chosen, positions, 0)
    page = page_table[slots[..., None], safe // page_size]
    return Selection(safe, jnp.where(chosen, page * page_size + safe % page_size, 0), count)
