"""One decoder layer on all rows of a step; the same functions for every storage, loop and mode.

A layer is ``before_attention``, attention per segment, ``after_attention``. One program runs them
in a row (``run_layer``); the pieces of ``pieces.py`` are the same functions, compiled one by one.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.attention import AttentionRows
from glm_jax.model.block import Block
from glm_jax.model.cache import Cache, CacheFormat
from glm_jax.model.config import GlmConfig
from glm_jax.model.indexer import Indexer, IndexRows
from glm_jax.model.mlp import Mlp
from glm_jax.model.moe import MoeLayer, MoeRows
from glm_jax.model.norm import rms_norm
from glm_jax.model.rope import Rotation
from glm_jax.model.rows import TILE_ROWS, WIDE_TILE_ROWS, Rows
from glm_jax.model.selection import Keys, select
from pallas_kernels.page_write import page_write
from pallas_kernels.sparse_mla import (
    Queries,
    Selection,
    UpProjections,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from pallas_kernels.tiles import Tiles


class Form(NamedTuple):
    """What is fixed for all steps of an engine.

    Attributes:
        config: the model.
        cache_format: how cache rows are stored.
        decode_path: which path decode rows take through the indexer (``Keys``).
        kernels: implementation of the operators (``pallas_kernels.dispatch``).
        dtype: of activations; weights of another one are cast when they are used.
    """

    config: GlmConfig
    cache_format: CacheFormat
    decode_path: str = "groups"
    kernels: str | None = None
    dtype: str = "float32"

    @property
    def tile_rows(self) -> int:
        """Rows of a prefill tile, at most."""
        return WIDE_TILE_ROWS if self.kernels == "xla" else TILE_ROWS


class Context(NamedTuple):
    """What all layers of a step share."""

    form: Form
    rows: Rows
    turn: Rotation
    page_table: Int[Array, "slots W"]


class Stream(NamedTuple):
    """What flows from layer to layer."""

    x: Float[Array, "N D"]
    cache: Cache
    selection: Selection
    expert_rows: Int[Array, "sparse_layers E"]


class Planes(NamedTuple):
    """The planes of a layer in the two arrays of the cache."""

    latent: int | Int[Array, ""]
    index: int | Int[Array, ""]


class Layer(NamedTuple):
    """The modules of one layer and the planes they write."""

    block: Block
    indexer: Indexer | None  # None: a shared layer, it reuses the stream's selection
    feed_forward: Mlp | MoeLayer
    plane: int | Int[Array, ""]
    index_plane: int | Int[Array, ""]
    sparse_before: int | Int[Array, ""]  # layers with experts in front of this one

    @property
    def planes(self) -> Planes:
        """Both planes."""
        return Planes(self.plane, self.index_plane)


class Projected(NamedTuple):
    """What a layer makes of its rows before any of them reads the cache."""

    queries: Queries
    entry: Float[Array, "N C+B"]
    index: IndexRows | None  # None: a shared layer


def run_layer(layer: Layer, stream: Stream, context: Context) -> Stream:
    """Add attention, then the feed-forward, each on normed rows."""
    form, planes = context.form, layer.planes
    projected = project_rows(layer.block, layer.indexer, stream.x, context.turn, form)
    cache = write_rows(projected, stream.cache, context.rows.entries, planes, form)
    x, selection, expert_rows = finish_layer(
        layer, projected, stream.x, cache, stream.selection, context
    )
    counts = stream.expert_rows
    if expert_rows is not None:
        counts = counts.at[layer.sparse_before].set(expert_rows)
    return Stream(x, cache, selection, counts)


def before_attention(
    block: Block,
    indexer: Indexer | None,
    x: Float[Array, "N D"],
    cache: Cache,
    entries: Int[Array, " N"],
    turn: Rotation,
    planes: Planes,
    form: Form,
) -> tuple[Queries, IndexRows | None, Cache]:
    """Project all rows and write their cache entries.

    All rows of the step are in the cache before any row reads it.

    Args:
        block: norms and attention of the layer.
        indexer: None in a shared layer.
        x: the stream.
        cache: of the rank.
        entries: where each row is written; past the pool writes nowhere.
        turn: rotation of each row's position.
        planes: of the layer.
        form: the engine's form.

    Returns:
        The queries, the indexer's projections (None in a shared layer), the cache.
    """
    projected = project_rows(block, indexer, x, turn, form)
    cache = write_rows(projected, cache, entries, planes, form)
    return projected.queries, projected.index, cache


def project_rows(
    block: Block, indexer: Indexer | None, x: Float[Array, "N D"], turn: Rotation, form: Form
) -> Projected:
    """Queries, cache entries and index projections of all rows; see ``before_attention``."""
    config = form.config
    h = rms_norm(x, block.input_norm[...], config.rms_norm_eps)
    rows: AttentionRows = block.attention.project(h, turn, config, form.kernels)
    index = None
    if indexer is not None:
        index = indexer(h, rows.q_compressed, turn, config, form.kernels)
    return Projected(rows.queries, rows.entry, index)


def write_rows(
    projected: Projected, cache: Cache, entries: Int[Array, " N"], planes: Planes, form: Form
) -> Cache:
    """Write the entries of all rows, and their keys in a full layer; see ``before_attention``."""
    stored = form.cache_format
    # There is no page_write for Mosaic: XLA's, the default, is in place on a GPU too.
    write = partial(
        page_write, implementation=None if form.kernels == "mosaic_gpu" else form.kernels
    )
    latent = write(stored.latent_pool(cache, planes.latent), entries, projected.entry)
    if projected.index is None:
        return cache._replace(latent=latent)
    keys = write(stored.index_pool(cache, planes.index), entries, projected.index.key)
    return Cache(latent, keys)


def finish_layer(
    layer: Layer,
    projected: Projected,
    x: Float[Array, "N D"],
    cache: Cache,
    selection: Selection,
    context: Context,
) -> tuple[Float[Array, "N D"], Selection, Int[Array, " E"] | None]:
    """What a layer does once its rows are in the cache, which it only reads.

    Args:
        layer: its modules.
        projected: of ``project_rows``.
        x: the stream.
        cache: with the rows' entries.
        selection: the stream's; a full layer only takes its width.
        context: of the step.

    Returns:
        The stream, the selection, and the rows of each expert, None in a dense layer.
    """
    form, rows, planes = context.form, context.rows, layer.planes
    queries, _, index = projected
    if index is not None:
        keys = keys_of(cache, planes, form, topk=selection.entries.shape[1])
        selection = select(index, rows, context.page_table, keys)
    groups, width = rows.group_positions.shape
    split = x.shape[0] - groups * width
    up, parts = layer.block.attention.up(form.dtype), []
    if split:
        first = _rows(queries, slice(0, split)), _rows(selection, slice(0, split))
        parts.append(attend_chunks(*first, rows.tiles, cache, planes, up, form))
    if groups:
        second = _rows(queries, slice(split, None)), _rows(selection, slice(split, None))
        parts.append(attend_groups(*second, cache, planes, up, form))
    values = jnp.concatenate(parts)
    x, expert_rows = after_attention(layer.block, layer.feed_forward, x, values, rows.valid, form)
    return x, selection, expert_rows


def keys_of(cache: Cache, planes: Planes, form: Form, *, topk: int) -> Keys:
    """The index keys of a full layer."""
    pool = form.cache_format.index_pool(cache, planes.index)
    return Keys(pool, topk, form.decode_path, form.kernels)


def attend_chunks(
    queries: Queries,
    selection: Selection,
    tiles: Tiles,
    cache: Cache,
    planes: Planes,
    up: UpProjections,
    form: Form,
) -> Float[Array, "N H U"]:
    """Sparse attention of prompt rows; rows that no tile names yield zeros."""
    return sparse_mla_prefill(
        queries,
        selection,
        tiles,
        form.cache_format.latent_pool(cache, planes.latent),
        up,
        scale=_scale(form.config),
        implementation=form.kernels,
    )


def attend_groups(
    queries: Queries,
    selection: Selection,
    cache: Cache,
    planes: Planes,
    up: UpProjections,
    form: Form,
) -> Float[Array, "N H U"]:
    """Sparse attention of decode rows."""
    mixed = sparse_mla_decode(
        up.absorb(queries.nope),
        queries.rope,
        selection.entries,
        selection.count,
        form.cache_format.latent_pool(cache, planes.latent),
        scale=_scale(form.config),
        implementation=form.kernels,
    )
    return up.expand(mixed)


def after_attention(
    block: Block,
    feed_forward: Mlp | MoeLayer,
    x: Float[Array, "N D"],
    values: Float[Array, "N H U"],
    valid: Bool[Array, " N"],
    form: Form,
) -> tuple[Float[Array, "N D"], Int[Array, " E"] | None]:
    """Add what attention brought, then the feed-forward; pad rows reach no expert.

    Returns:
        The rows; how many of them each expert got, None in a dense layer.
    """
    config = form.config
    x = x + block.attention.combine(values, form.kernels).astype(x.dtype)
    h = rms_norm(x, block.post_norm[...], config.rms_norm_eps)
    if isinstance(feed_forward, MoeLayer):
        routed: MoeRows = feed_forward(h, valid, config, form.kernels)
        return x + routed.x, routed.expert_rows
    return x + feed_forward(h, form.kernels), None


def _scale(config: GlmConfig) -> float:
    """Of the original head, not of the cached entry."""
    return (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5


def _rows(tree: Any, part: slice) -> Any:
    return jax.tree.map(lambda array: array[part], tree)
