"""Which cached entries each row attends to: full layers choose, shared layers reuse the choice."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from glm_jax.model.indexer import IndexRows
from glm_jax.model.rows import Rows
from pallas_kernels.index_topk import index_topk_decode, index_topk_prefill


class Selection(NamedTuple):
    """Selected entries of every row; places at or after ``count`` point to entry 0."""

    entries: Int[Array, "N K"]  # page * page_size + offset, inside one plane
    count: Int[Array, " N"]


def empty_selection(rows: int, topk: int) -> Selection:
    """Nothing selected; what the layers start from."""
    return Selection(jnp.zeros((rows, topk), jnp.int32), jnp.zeros((rows,), jnp.int32))


def select(
    index: IndexRows,
    rows: Rows,
    page_table: Int[Array, "slots W"],
    read_keys: Callable[[Array], Array],
    *,
    page_size: int,
    topk: int,
) -> Selection:
    """Score and select for both segments.

    Args:
        index: indexer projections of all rows; their keys are already in the cache.
        rows: the step's rows.
        page_table: pages of each slot.
        read_keys: pages ``[T, b]`` to float32 index keys ``[T, b, page_size, I]`` of this layer.
        page_size: entries per page.
        topk: entries per row.
    """
    tiles = rows.tiles
    groups, width = rows.group_positions.shape
    prefill_rows = rows.tokens.shape[0] - groups * width
    parts = []
    if prefill_rows:
        places = jnp.minimum(tiles.rows, prefill_rows - 1)
        found, count = index_topk_prefill(
            index.queries[places],
            index.weights[places],
            tiles.positions,
            tiles.page_table,
            read_keys,
            page_size=page_size,
            topk=topk,
        )
        start = empty_selection(prefill_rows, topk)
        parts.append(
            (
                start.entries.at[tiles.rows].set(found, mode="drop"),
                start.count.at[tiles.rows].set(count, mode="drop"),
            )
        )
    if groups:
        decode = slice(prefill_rows, None)
        found, count = index_topk_decode(
            index.queries[decode].reshape(groups, width, *index.queries.shape[1:]),
            index.weights[decode].reshape(groups, width, -1),
            rows.group_positions,
            rows.group_page_table,
            read_keys,
            page_size=page_size,
            topk=topk,
        )
        parts.append((found.reshape(groups * width, topk), count.reshape(-1)))
    positions = jnp.concatenate([part[0] for part in parts])
    count = jnp.concatenate([part[1] for part in parts])
    chosen = jnp.arange(topk) < count[:, None]
    safe = jnp.where(chosen, positions, 0)
    page = page_table[rows.slots[:, None], safe // page_size]
    return Selection(jnp.where(chosen, page * page_size + safe % page_size, 0), count)
