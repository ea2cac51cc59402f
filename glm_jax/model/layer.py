"""One decoder layer on all rows of a step; the same function for every storage and loop form."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.attention import AttentionRows
from glm_jax.model.block import Block
from glm_jax.model.cache import Cache, CacheFormat, read_entries, read_pages, write_plane
from glm_jax.model.config import GlmConfig
from glm_jax.model.indexer import Indexer
from glm_jax.model.mlp import Mlp
from glm_jax.model.moe import Moe
from glm_jax.model.norm import rms_norm
from glm_jax.model.rope import Rotation
from glm_jax.model.rows import Rows
from glm_jax.model.selection import Selection, select
from pallas_kernels.sparse_mla import sparse_mla


class Context(NamedTuple):
    """What all layers of a step share."""

    config: GlmConfig
    cache_format: CacheFormat
    rows: Rows
    turn: Rotation
    page_table: Int[Array, "slots W"]


class Stream(NamedTuple):
    """What flows from layer to layer."""

    x: Float[Array, "N D"]
    cache: Cache
    selection: Selection


class Layer(NamedTuple):
    """The modules of one layer and the planes they write."""

    block: Block
    indexer: Indexer | None  # None: a shared layer, it reuses the stream's selection
    feed_forward: Mlp | Moe
    plane: int | Int[Array, ""]
    index_plane: int | Int[Array, ""]


def run_layer(layer: Layer, stream: Stream, context: Context) -> Stream:
    """Add attention, then the feed-forward, each on normed rows.

    All rows of the step are written to the cache before any row reads it.
    """
    config, rows = context.config, context.rows
    x, cache, selection = stream
    h = rms_norm(x, layer.block.input_norm[...], config.rms_norm_eps)
    attention = layer.block.attention
    projected = attention.project(h, context.turn, config)
    encode = context.cache_format.encode
    cache = cache._replace(
        latent=write_plane(cache.latent, layer.plane, rows.entries, encode(projected.entry))
    )
    if layer.indexer is not None:
        index = layer.indexer(h, projected.q_compressed, context.turn, config)
        keys = write_plane(cache.index_keys, layer.index_plane, rows.entries, encode(index.key))
        cache = cache._replace(index_keys=keys)
        selection = select(
            index,
            rows,
            context.page_table,
            lambda pages: context.cache_format.decode(read_pages(keys, layer.index_plane, pages)),
            page_size=keys.shape[2],
            topk=selection.entries.shape[1],
        )
    mixed = _attend(projected, selection, cache.latent, layer.plane, context)
    x = x + attention.combine(mixed).astype(x.dtype)
    h = rms_norm(x, layer.block.post_norm[...], config.rms_norm_eps)
    if isinstance(layer.feed_forward, Moe):
        return Stream(x + layer.feed_forward(h, rows.valid, config), cache, selection)
    return Stream(x + layer.feed_forward(h), cache, selection)


def _attend(
    projected: AttentionRows,
    selection: Selection,
    latent: Array,
    plane: int | Int[Array, ""],
    context: Context,
) -> Float[Array, "N H C"]:
    """Sparse attention of each segment on its own path."""
    config = context.config
    groups, width = context.rows.group_positions.shape
    split = projected.entry.shape[0] - groups * width

    def read(entries: Array) -> Array:
        return context.cache_format.decode(read_entries(latent, plane, entries))

    segments = [
        part for part in (slice(0, split), slice(split, None)) if projected.entry[part].size
    ]
    outputs = [
        sparse_mla(
            projected.q_latent[part],
            projected.q_rope[part],
            selection.entries[part],
            selection.count[part],
            read,
            scale=(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5,
        )
        for part in segments
    ]
    return jnp.concatenate(outputs)
