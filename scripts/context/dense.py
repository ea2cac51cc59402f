"""Attention over every key of a context with the selection as a mask, to compare sparse with.

What transformers does: the scores of all keys, minus infinity outside the selection. As fast as it
is known to run on a CPU, since a slow rival proves nothing: keys are read block by block for all
rows of a request, the blocks go through a running softmax, and the number of blocks follows the
context. Decode rows are absorbed, prompt rows expanded (``pallas_kernels.sparse_mla.api`` says
what that is). Blocks may hold anything finite outside the selection.
"""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model import layer as model_layer
from glm_jax.model import transformer
from glm_jax.model.cache import Cache
from glm_jax.model.layer import Context, Form, Layer, Planes, Stream, run_layer
from glm_jax.model.rows import Rows
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import Queries, Selection, UpProjections
from pallas_kernels.tiles import Tiles

# Keys per turn. Measured on two CPU cores at the embedded model's lengths, 16K keys: decode 48 ms
# with 64 keys, 34 with 512, 28 with 1024 to 4096 (XLA gives smaller products one core only); 512
# prompt rows 245 ms with 128 keys, 166 with 256, 188 with 512, 211 with 1024. The tiles of
# ``sparse_mla.expanded``, made to take the whole context, need 357 ms.
DECODE_KEYS = 1024
PREFILL_KEYS = 256
_MASKED = -1e30


def dense_decode(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    selection: Selection,
    page_table: Int[Array, "N W"],
    positions: Int[Array, " N"],
    pool: PagedPool,
    *,
    scale: float,
) -> Float[Array, "N H C"]:
    """Attend from decode rows, each of a request of its own, to all keys up to their positions.

    Args:
        q_latent: queries in latent space.
        q_rope: rotated queries.
        selection: what the mask leaves.
        page_table: pages of each row's request.
        positions: of the rows; -1 for a pad row, which yields zeros.
        pool: the layer's plane of the cache.
        scale: softmax scale.

    Returns:
        Mixtures of latents, float32.
    """
    rows, heads, latent_width = q_latent.shape
    query = jnp.concatenate([q_latent, q_rope], axis=-1) * scale
    pages, block = _block(DECODE_KEYS, pool.page_size)
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))
    seen = _seen(selection, table.shape[1] * pool.page_size)

    def attend(row: Int[Array, ""], out: Float[Array, "N H C"]) -> Float[Array, "N H C"]:
        def turn(
            index: Int[Array, ""], state: tuple[Array, Array, Array]
        ) -> tuple[Array, Array, Array]:
            top, total, mixed = state
            own = jax.lax.dynamic_slice_in_dim(table[row], index * pages, pages)
            entries = pool.read_pages(own).reshape(block, -1)
            live = jax.lax.dynamic_slice_in_dim(seen[row], index * block, block)[:, None]
            scores = jnp.where(live, entries @ query[row].T, _MASKED)
            new_top = jnp.maximum(top, jnp.max(scores, axis=0))
            weights = jnp.where(live, jnp.exp(scores - new_top), 0.0)
            fade = jnp.exp(top - new_top)
            mixed = mixed * fade[:, None] + jnp.einsum("kh,kc->hc", weights, entries)
            return new_top, total * fade + jnp.sum(weights, axis=0), mixed

        start = jnp.full((heads,), _MASKED), jnp.zeros((heads,)), jnp.zeros(query.shape[1:])
        turns = (positions[row] + block) // block
        _, total, mixed = jax.lax.fori_loop(0, turns, turn, start)
        value = mixed[:, :latent_width] / jnp.where(total > 0, total, 1.0)[:, None]
        return out.at[row].set(value)

    return jax.lax.fori_loop(0, rows, attend, jnp.zeros((rows, heads, latent_width)))


def dense_prefill(
    queries: Queries,
    selection: Selection,
    tiles: Tiles,
    pool: PagedPool,
    up: UpProjections,
    *,
    scale: float,
    implementation: str | None = None,
) -> Float[Array, "N H U"]:
    """Attend from the rows of one chunk, which fills the segment, to all keys up to its last row.

    The signature of ``sparse_mla_prefill``; there is one implementation, whatever is asked for.
    Keys and values of all heads are made once a block and used by every row.
    """
    rows, heads, _ = queries.nope.shape
    query = jnp.concatenate([queries.nope, queries.rope], axis=-1).transpose(1, 0, 2) * scale
    pages, block = _block(PREFILL_KEYS, pool.page_size)
    table = jnp.pad(tiles.page_table[0], (0, -tiles.page_table.shape[1] % pages))
    seen = _seen(selection, table.shape[0] * pool.page_size)
    key_up, value_up = up.key.transpose(0, 2, 1), up.value

    def turn(
        index: Int[Array, ""], state: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        top, total, mixed = state
        own = jax.lax.dynamic_slice_in_dim(table, index * pages, pages)
        entries = pool.read_pages(own).reshape(block, -1)
        latent, rope = entries[:, : key_up.shape[1]], entries[:, key_up.shape[1] :]
        shared = jnp.broadcast_to(rope, (heads, *rope.shape))
        keys = jnp.concatenate([_for_every_head(latent, key_up), shared], axis=-1)
        live = jax.lax.dynamic_slice_in_dim(seen, index * block, block, axis=1)
        scores = jnp.where(live, jnp.einsum("hra,hka->hrk", query, keys), _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(live, jnp.exp(scores - new_top[..., None]), 0.0)
        fade = jnp.exp(top - new_top)
        added = jnp.einsum("hrk,hku->hru", weights, _for_every_head(latent, value_up))
        mixed = mixed * fade[..., None] + added
        return new_top, total * fade + jnp.sum(weights, axis=-1), mixed

    start = (
        jnp.full((heads, rows), _MASKED),
        jnp.zeros((heads, rows)),
        jnp.zeros((heads, rows, value_up.shape[-1])),
    )
    _, total, mixed = jax.lax.fori_loop(0, tiles.chunk_last[0] // block + 1, turn, start)
    values = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return values.transpose(1, 0, 2).astype(value_up.dtype)


@contextmanager
def dense_attention() -> Generator[None]:
    """Steps traced inside attend densely; everything else of them is the product's.

    The product has no such option. What its layers call is replaced while the trace runs:
    ``sparse_mla_prefill``; and ``attend_groups``, since ``sparse_mla_decode`` is not told the page
    tables that all keys are read by. A layer's own context brings them.
    """

    def run_dense(layer: Layer, stream: Stream, context: Context) -> Stream:
        attend = functools.partial(_attend_groups, rows=context.rows)
        with mock.patch.object(model_layer, "attend_groups", attend):
            return run_layer(layer, stream, context)

    with (
        mock.patch.object(transformer, "run_layer", run_dense),
        mock.patch.object(model_layer, "sparse_mla_prefill", dense_prefill),
    ):
        yield


def _attend_groups(
    queries: Queries,
    selection: Selection,
    cache: Cache,
    planes: Planes,
    up: UpProjections,
    form: Form,
    *,
    rows: Rows,
) -> Float[Array, "N H U"]:
    """Stand in for ``layer.attend_groups``; groups of one row."""
    mixed = dense_decode(
        up.absorb(queries.nope),
        queries.rope,
        selection,
        rows.group_page_table,
        rows.group_positions[:, 0],
        form.cache_format.latent_pool(cache, planes.latent),
        scale=head_scale(form),
    )
    return up.expand(mixed)


def head_scale(form: Form) -> float:
    """The softmax scale: of the original head, not of the cached entry."""
    return (form.config.qk_nope_head_dim + form.config.qk_rope_head_dim) ** -0.5


def _block(keys: int, page_size: int) -> tuple[int, int]:
    """Whole pages of about ``keys`` keys: how many, and the keys they hold."""
    pages = max(1, keys // page_size)
    return pages, pages * page_size


def _seen(selection: Selection, keys: int) -> Bool[Array, "N S"]:
    """The selection as a mask over the first ``keys`` keys."""
    rows, topk = selection.positions.shape
    meant = jnp.arange(topk) < selection.count[:, None]
    key = jnp.where(meant, selection.positions, keys)
    nothing = jnp.zeros((rows, keys), bool)
    return nothing.at[jnp.arange(rows)[:, None], key].set(True, mode="drop")


def _for_every_head(
    latent: Float[Array, "k C"], weights: Float[Array, "H C outer"]
) -> Float[Array, "H k outer"]:
    """One product for all heads."""
    heads, width, outer = weights.shape
    flat = latent @ weights.transpose(1, 0, 2).reshape(width, heads * outer)
    return flat.reshape(-1, heads, outer).transpose(1, 0, 2)
