"""Which cached entries each row attends to: full layers choose, shared layers reuse the choice."""

from typing import NamedTuple

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
        parts.append(select_chunks(index, rows.tiles, prefill_rows, keys))
    if groups:
        decode = slice(prefill_rows, None)
        found, count = select_groups(
            index.queries[decode].reshape(groups, width, *index.queries.shape[1:]),
            index.weights[decode].reshape(groups, width, -1),
            rows.group_positions,
            rows.group_page_table,
            keys,
        )
        parts.append((found.reshape(groups * width, -1), count.reshape(-1)))
    positions = jnp.concatenate([part[0] for part in parts])
    count = jnp.concatenate([part[1] for part in parts])
    return to_entries((positions, count), page_table, rows.slots, keys.pool.page_size)


def select_chunks(index: IndexRows, tiles: Tiles, rows: int, keys: Keys) -> Found:
    """Select for the rows named by ``tiles``; every other row of the ``rows`` gets count 0.

    A pad place of a tile names a row at or past ``rows`` and is dropped.
    """
    places = jnp.minimum(tiles.rows, rows - 1)
    found, count = index_topk_prefill(
        index.queries[places],
        index.weights[places],
        tiles.positions,
        tiles.page_table,
        keys.pool,
        topk=keys.topk,
        implementation=keys.kernels,
    )
    start = jnp.zeros((rows, keys.topk), jnp.int32)
    return (
        start.at[tiles.rows].set(found, mode="drop"),
        start[:, 0].at[tiles.rows].set(count, mode="drop"),
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
    width = positions.shape[1]
    if keys.decode_path == "groups":
        operator = index_topk_decode
    else:
        operator = index_topk_prefill
        spare = (0, max(0, TILE_ROWS - width))
        queries = jnp.pad(queries, ((0, 0), spare, (0, 0), (0, 0)))
        weights = jnp.pad(weights, ((0, 0), spare, (0, 0)))
        positions = jnp.pad(positions, ((0, 0), spare), constant_values=-1)
    found, count = operator(
        queries,
        weights,
        positions,
        page_table,
        keys.pool,
        topk=keys.topk,
        implementation=keys.kernels,
    )
    return found[:, :width], count[:, :width]


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
