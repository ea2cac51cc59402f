"""Multi-head latent attention of rows over their own selected cache entries.

An entry is one cached vector ``[latent C | rope B]``, shared by all heads. For row n and head h
over the entries e_0 .. e_(count-1) selected for the row (DeepSeek-V2 report, section 2.1; W_UK and
W_UV are the up-projections of key and value):

    s_j       = (q_nope[n, h] . (W_UK[h] latent(e_j)) + q_rope[n, h] . rope(e_j)) * scale
    out[n, h] = W_UV[h]^T sum_j softmax(s)_j * latent(e_j)

Absorbed, W_UK is applied to the query once and W_UV to the sum: 2 C + B multiply-adds per entry and
head. Expanded, it is applied to every entry of a context and shared by the rows that see it:
A + B + U per entry and head. ``scale`` is (nope + rope)^-0.5 of the *original* head.

A row with count 0 yields zeros. Places after ``count`` may hold any index inside the pool; they get
probability exactly 0, and anything, NaN included, may stand in entries that are not selected.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import find
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla.queries import Queries
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.up_projections import UpProjections
from pallas_kernels.tiles import Tiles


def sparse_mla_decode(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    pool: PagedPool,
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "N H C"]:
    """Absorbed attention: few rows, nothing to share between them.

    Args:
        q_latent: queries in latent space, ``UpProjections.absorb``.
        q_rope: rotated queries.
        entries: the entries selected for each row, ``page * page_size + offset``.
        count: valid entries per row.
        pool: the layer's plane of the cache.
        scale: softmax scale.
        implementation: "reference", "xla" or "mosaic_gpu"; None chooses by platform.

    Returns:
        Mixtures of latents, float32; ``UpProjections.expand`` makes values of them.
    """
    decode = find("sparse_mla", "sparse_mla_decode", implementation)
    return decode(q_latent, q_rope, entries, count, pool, scale=scale)


def sparse_mla_prefill(
    queries: Queries,
    selection: Selection,
    tiles: Tiles,
    pool: PagedPool,
    up: UpProjections,
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "N H U"]:
    """Attention of prompt rows, tile by tile.

    An implementation may attend to the whole context with a mask, expanded, where that is cheaper
    than gathering every row's entries: short contexts, long chunks.

    Args:
        queries: of all rows.
        selection: of all rows.
        tiles: the rows cut into tiles; rows that no tile names yield zeros.
        pool: the layer's plane of the cache.
        up: the layer's up-projections.
        scale: softmax scale.
        implementation: "reference", "xla" or "mosaic_gpu"; None chooses by platform.

    Returns:
        Mixtures of values, in the dtype of the up-projections.
    """
    prefill = find("sparse_mla", "sparse_mla_prefill", implementation)
    return prefill(queries, selection, tiles, pool, up, scale=scale)
