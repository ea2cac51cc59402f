"""Exact top-k of the lightning indexer over paged keys; called by the model's full layers.

Maths (DeepSeek-V3.2 report, "lightning indexer"), for row t of a request at position p:

    I[t, s] = sum_m w[t, m] * relu(q[t, m] . k[s])        s = 0 .. p
    selected = the K largest I[t, 0..p], the lower position first among equals

The factors index_heads^-0.5 and index_dim^-0.5 are the caller's (folded in ``weights``).

Layout contract: ``page_table[t, j]`` names the page of tile t that holds positions
``j * page_size ..`` in ``keys``. Rows of one tile belong to one request. A row with position < 0 is
a pad: its count is 0. Anything, NaN included, may stand in entries that no row may see.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import find
from pallas_kernels.pool import PagedPool
from pallas_kernels.tiles import Tiles


def index_topk_decode(
    queries: Float[Array, "G Q M I"],
    weights: Float[Array, "G Q M"],
    positions: Int[Array, "G Q"],
    page_table: Int[Array, "G W"],
    keys: PagedPool,
    *,
    topk: int,
    implementation: str | None = None,
) -> tuple[Int[Array, "G Q K"], Int[Array, "G Q"]]:
    """Select for decode groups, all at once; the Q rows of a group share one read of the keys.

    Returns:
        Positions in the request (valid in the first ``count`` places, anything after), and the
        count ``min(position + 1, K)``, 0 for a pad row.
    """
    decode = find("index_topk", "index_topk_decode", implementation)
    return decode(queries, weights, positions, page_table, keys, topk=topk)


def index_topk_prefill(
    queries: Float[Array, "N M I"],
    weights: Float[Array, "N M"],
    tiles: Tiles,
    keys: PagedPool,
    *,
    topk: int,
    implementation: str | None = None,
) -> tuple[Int[Array, "N K"], Int[Array, " N"]]:
    """Select positions for prompt rows, tile by tile.

    A tile costs what its own context costs; a tile of pads costs nothing. Rows that no tile names
    get count 0.
    """
    prefill = find("index_topk", "index_topk_prefill", implementation)
    return prefill(queries, weights, tiles, keys, topk=topk)
