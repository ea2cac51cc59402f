"""The dense rival that sparse attention is timed against."""

from unittest import mock

import jax
import numpy as np
import pytest

from bucketing.cell import Cell
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.model import layer
from glm_jax.model.presets import PRESETS
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import (
    Queries,
    Selection,
    UpProjections,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from pallas_kernels.tiles import Tiles
from scripts.bench_context import check_contexts
from scripts.context import dense
from scripts.context.rounds import Side, growth, measure

HEADS, NOPE, ROPE, LATENT, VALUE = 3, 6, 4, 12, 5
TOPK, PAGE_SIZE, PAGES = 8, 4, 30
SCALE = 0.3


def normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def select(rng, positions, tables):
    """TOPK of the keys that each row may see; a row at -1 selects none."""
    chosen = np.zeros((len(positions), TOPK), np.int32)
    count = np.minimum(positions + 1, TOPK).astype(np.int32)
    for row, position in enumerate(positions):
        seen = rng.choice(position + 1, count[row], replace=False) if position >= 0 else []
        chosen[row, : count[row]] = np.sort(seen)
    entries = np.take_along_axis(tables, chosen // PAGE_SIZE, 1) * PAGE_SIZE + chosen % PAGE_SIZE
    return Selection(chosen, entries.astype(np.int32), count)


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks that no page table is a multiple of, and several of them."""
    monkeypatch.setattr(dense, "DECODE_KEYS", 16)
    monkeypatch.setattr(dense, "PREFILL_KEYS", 16)


@pytest.mark.usefixtures("short_blocks")
def test_dense_decode_equals_sparse():
    rng = np.random.default_rng(0)
    positions = np.array([70, 2, -1, 119], np.int32)
    tables = np.stack([1 + rng.permutation(PAGES) for _ in positions]).astype(np.int32)
    pool = normal(rng, 2, PAGES + 1, PAGE_SIZE, LATENT + ROPE)

    def both(q_latent, q_rope, selection, tables, positions, array):
        plane = PagedPool(array, 1, "float32")
        queries = q_latent, q_rope
        chosen = selection.entries, selection.count
        return (
            sparse_mla_decode(*queries, *chosen, plane, scale=SCALE, implementation="xla"),
            dense.dense_decode(*queries, selection, tables, positions, plane, scale=SCALE),
        )

    sparse, masked = jax.jit(both)(
        normal(rng, 4, HEADS, LATENT),
        normal(rng, 4, HEADS, ROPE),
        select(rng, positions, tables),
        tables,
        positions,
        pool,
    )
    np.testing.assert_allclose(masked, sparse, rtol=1e-5, atol=1e-5)
    assert not np.asarray(masked)[2].any()


@pytest.mark.usefixtures("short_blocks")
def test_dense_prefill_equals_sparse():
    rng = np.random.default_rng(1)
    rows, tile_rows, first = 12, 4, 97
    positions = first + np.arange(rows, dtype=np.int32)
    table = (1 + rng.permutation(PAGES)).astype(np.int32)
    number = rows // tile_rows
    tiles = Tiles(
        rows=np.arange(rows, dtype=np.int32).reshape(number, tile_rows),
        positions=positions.reshape(number, tile_rows),
        page_table=np.tile(table, (number, 1)),
        chunk_first=np.full(number, first, np.int32),
        chunk_last=np.full(number, positions[-1], np.int32),
    )

    def both(queries, selection, tiles, array, up):
        arguments = queries, selection, tiles, PagedPool(array, 0, "float32"), up
        return (
            sparse_mla_prefill(*arguments, scale=SCALE, implementation="xla"),
            dense.dense_prefill(*arguments, scale=SCALE),
        )

    sparse, masked = jax.jit(both)(
        Queries(normal(rng, rows, HEADS, NOPE), normal(rng, rows, HEADS, ROPE)),
        select(rng, positions, np.tile(table, (rows, 1))),
        tiles,
        normal(rng, 1, PAGES + 1, PAGE_SIZE, LATENT + ROPE),
        UpProjections(normal(rng, HEADS, NOPE, LATENT), normal(rng, HEADS, LATENT, VALUE)),
    )
    np.testing.assert_allclose(masked, sparse, rtol=1e-5, atol=1e-5)


def test_only_steps_traced_inside_attend_densely():
    config = PRESETS["tiny-random"]
    options = EngineConfig(
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        page_size=8,
        prefill_buckets=(16,),
        group_buckets=(4,),
        dtype="float32",
        weight_dtype="float32",
        kv_cache_dtype="float32",
        layer_storage="per_layer",
        layer_loop="unrolled",
        kernels="xla",
    )
    own = layer.sparse_mla_prefill, layer.attend_groups
    with (
        mock.patch.object(dense, "dense_prefill", wraps=dense.dense_prefill) as prefill,
        mock.patch.object(dense, "dense_decode", wraps=dense.dense_decode) as decode,
    ):
        with dense.dense_attention():
            Lowering(config, options).lower(Cell(16, 4, 1))
        assert prefill.call_count == decode.call_count == config.num_hidden_layers
    assert (layer.sparse_mla_prefill, layer.attend_groups) == own


def test_the_second_run_of_a_short_side_counts_and_the_only_one_of_a_long_side():
    side = Side(1024, "decode 8", "step", "sparse")
    seconds = iter([0.1, 0.08, 0.1, 0.16, 0.24])
    (figures,) = measure({side: lambda: next(seconds)}, 3, lambda _: None)
    assert figures[:4] == side
    assert figures.ms_per_token == pytest.approx(20.0)
    assert (figures.p10, figures.p90) == pytest.approx((12.0, 28.0))


def test_growth_compares_the_longest_with_the_shortest_context():
    sides = [Side(context, "decode 1", "indexer", "both") for context in (4096, 1024, 2048)]
    rows = measure(
        {side: lambda side=side: side.context / 1e6 for side in sides}, 1, lambda _: None
    )
    assert growth(rows, "decode 1", "indexer", "both") == pytest.approx(4.0)


def test_contexts_that_hold_no_chunk_or_exceed_the_model_are_refused():
    assert check_contexts([2048, 512], 2048) == [512, 2048]
    for contexts in ([256], [4096], [1024, 1024]):
        with pytest.raises(ValueError, match="allowed: different ones, from 512"):
            check_contexts(contexts, 2048)
