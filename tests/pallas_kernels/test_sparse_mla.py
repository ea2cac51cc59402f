import functools

import jax
import numpy as np
import pytest

from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import Queries, Selection, UpProjections, api
from pallas_kernels.sparse_mla.cases import CASES, SparseMlaCase
from pallas_kernels.sparse_mla.crossover import Sizes, expanded_pays, most_expanded_keys
from pallas_kernels.tiles import Tiles

DECODE, PREFILL = CASES
TILE_ROWS = 16
SCALE = 0.25
# (first position, rows) of chunks: short enough for the expanded form, and beyond the crossover.
EXPANDED = ((0, 40), (70, 33))
ABSORBED = ((300, 24),)


def _normal(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


@functools.cache
def _decoder(case: SparseMlaCase, implementation: str):
    def call(q_latent, q_rope, entries, count, pool):
        plane = PagedPool(pool, 1, "float32")
        return api.sparse_mla_decode(
            q_latent, q_rope, entries, count, plane, scale=SCALE, implementation=implementation
        )

    return jax.jit(call)


def _decode_problem(case: SparseMlaCase):
    rng = np.random.default_rng(3)
    count = rng.integers(1, case.topk + 1, case.rows)
    count[0] = 0  # a pad row
    pool = case.pages * case.page_size
    return {
        "q_latent": _normal(rng, case.rows, case.heads, case.latent),
        "q_rope": _normal(rng, case.rows, case.heads, case.rope),
        "entries": rng.integers(1, pool, (case.rows, case.topk)).astype(np.int32),
        "count": count.astype(np.int32),
        "pool": _normal(rng, 2, case.pages, case.page_size, case.latent + case.rope),
    }


def _attend_by_hand(query, cached, latent: int) -> np.ndarray:
    """One row and head in float64, absorbed."""
    logits = cached @ query * SCALE
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ cached[:, :latent]


def _decode_by_hand(problem) -> np.ndarray:
    rows, heads, latent = problem["q_latent"].shape
    out = np.zeros((rows, heads, latent))
    plane = problem["pool"][1].reshape(-1, problem["pool"].shape[-1]).astype(np.float64)
    for n, h in np.ndindex(rows, heads):
        entries = problem["entries"][n, : problem["count"][n]]
        if len(entries):
            query = np.concatenate([problem["q_latent"][n, h], problem["q_rope"][n, h]])
            out[n, h] = _attend_by_hand(query, plane[entries], latent)
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_decode_equals_a_float64_loop(implementation):
    problem = _decode_problem(DECODE)
    out = np.asarray(_decoder(DECODE, implementation)(**problem))
    np.testing.assert_allclose(out, _decode_by_hand(problem), rtol=1e-5, atol=1e-5)


def test_decode_gives_zeros_for_a_pad_row():
    out = np.asarray(_decoder(DECODE, "xla")(**_decode_problem(DECODE)))
    assert not out[0].any()


def test_decode_ignores_nan_in_entries_after_the_count():
    problem = _decode_problem(DECODE)
    poison = DECODE.pages * DECODE.page_size - 1
    entries = np.where(problem["entries"] == poison, 1, problem["entries"])
    live = np.arange(DECODE.topk) < problem["count"][:, None]
    clean_entries = np.where(live, entries, 1).astype(np.int32)
    dirty_entries = np.where(live, entries, poison).astype(np.int32)
    problem["pool"][1, -1, -1] = np.nan
    clean = np.asarray(_decoder(DECODE, "xla")(**{**problem, "entries": clean_entries}))
    dirty = np.asarray(_decoder(DECODE, "xla")(**{**problem, "entries": dirty_entries}))
    np.testing.assert_array_equal(dirty, clean)


def test_decode_gives_a_row_the_same_bits_wherever_it_stands():
    problem = _decode_problem(DECODE)
    turned = {
        name: np.roll(array, 2, axis=0) if name != "pool" else array
        for name, array in problem.items()
    }
    out = np.asarray(_decoder(DECODE, "xla")(**problem))
    moved = np.asarray(_decoder(DECODE, "xla")(**turned))
    np.testing.assert_array_equal(np.roll(out, 2, axis=0), moved)


@functools.cache
def _prefiller(implementation: str):
    def call(queries, selection, tiles, pool, up):
        plane = PagedPool(pool, 1, "float32")
        return api.sparse_mla_prefill(
            queries, selection, tiles, plane, up, scale=SCALE, implementation=implementation
        )

    return jax.jit(call)


def _tiles(chunks, tables) -> Tiles:
    """Chunks one after another, each cut into tiles, then one tile of pads."""
    tiles, start = [], 0
    for number, (first, length) in enumerate(chunks):
        for begin in range(0, length, TILE_ROWS):
            place = begin + np.arange(TILE_ROWS)
            live = place < length
            tiles.append(
                (
                    np.where(live, start + place, PREFILL.rows),
                    np.where(live, first + place, -1),
                    tables[number],
                    first,
                    first + length - 1,
                )
            )
        start += length
    nothing = np.full(TILE_ROWS, PREFILL.rows)
    tiles.append((nothing, np.full(TILE_ROWS, -1), tables[0], 0, -1))
    return Tiles(*(np.asarray(part, np.int32) for part in zip(*tiles, strict=True)))


def _prefill_problem(chunks):
    """Rows after the chunks are pads; each row selects itself and a random part of its past."""
    case, rng = PREFILL, np.random.default_rng(5)
    tables = 1 + rng.permutation(len(chunks) * case.pages).reshape(len(chunks), case.pages)
    positions = np.zeros((case.rows, case.topk), np.int64)
    count = np.zeros(case.rows, np.int64)
    owner = np.zeros(case.rows, np.int64)
    row = 0
    for number, (first, length) in enumerate(chunks):
        for position in range(first, first + length):
            past = rng.permutation(position)[: case.topk - 1]
            count[row] = len(past) + 1
            positions[row, : count[row]] = np.sort(np.append(past, position))
            owner[row] = number
            row += 1
    page = tables[owner[:, None], positions // case.page_size]
    entries = page * case.page_size + positions % case.page_size
    meant = np.arange(case.topk) < count[:, None]
    total = len(chunks) * case.pages + 1
    return {
        "queries": Queries(
            _normal(rng, case.rows, case.heads, case.nope),
            _normal(rng, case.rows, case.heads, case.rope),
        ),
        "selection": Selection(
            *(array.astype(np.int32) for array in (positions, np.where(meant, entries, 0), count))
        ),
        "tiles": _tiles(chunks, tables),
        "pool": _normal(rng, 2, total, case.page_size, case.latent + case.rope),
        "up": UpProjections(
            _normal(rng, case.heads, case.nope, case.latent),
            _normal(rng, case.heads, case.latent, case.value),
        ),
    }


def _prefill_by_hand(problem) -> np.ndarray:
    queries, selection, up = problem["queries"], problem["selection"], problem["up"]
    plane = problem["pool"][1].reshape(-1, problem["pool"].shape[-1]).astype(np.float64)
    out = np.zeros((PREFILL.rows, PREFILL.heads, PREFILL.value))
    for n, h in np.ndindex(PREFILL.rows, PREFILL.heads):
        entries = selection.entries[n, : selection.count[n]]
        if len(entries):
            query = np.concatenate([queries.nope[n, h] @ up.key[h], queries.rope[n, h]])
            out[n, h] = _attend_by_hand(query, plane[entries], PREFILL.latent) @ up.value[h]
    return out


@pytest.mark.parametrize("chunks", [EXPANDED, ABSORBED, (*EXPANDED[:1], *ABSORBED)], ids=str)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_prefill_equals_a_float64_loop(chunks, implementation):
    problem = _prefill_problem(chunks)
    out = np.asarray(_prefiller(implementation)(**problem))
    np.testing.assert_allclose(out, _prefill_by_hand(problem), rtol=2e-5, atol=2e-5)


def test_the_chunks_of_these_tests_lie_on_both_sides_of_the_crossover():
    sizes = Sizes(PREFILL.nope, PREFILL.rope, PREFILL.latent, PREFILL.value, PREFILL.topk)
    for chunks, expected in ((EXPANDED, True), (ABSORBED, False)):
        for first, length in chunks:
            assert expanded_pays(sizes, first, first + length - 1) == expected


def test_prefill_ignores_nan_behind_the_last_row_of_a_chunk():
    problem = _prefill_problem(EXPANDED)
    clean = np.asarray(_prefiller("xla")(**problem))
    for tile in range(len(problem["tiles"].rows) - 1):  # the last one holds pads only
        last, table = problem["tiles"].chunk_last[tile], problem["tiles"].page_table[tile]
        flat = problem["pool"][1, table].reshape(-1, problem["pool"].shape[-1])
        flat[last + 1 :] = np.nan
        problem["pool"][1, table] = flat.reshape(len(table), PREFILL.page_size, -1)
    np.testing.assert_array_equal(np.asarray(_prefiller("xla")(**problem)), clean)


def test_prefill_gives_zeros_for_rows_that_no_tile_names():
    problem = _prefill_problem(EXPANDED)
    out = np.asarray(_prefiller("xla")(**problem))
    assert not out[sum(length for _, length in EXPANDED) :].any()


def test_crossover_of_the_full_size_model_lies_near_8k_tokens_for_long_chunks():
    sizes = Sizes(nope=192, rope=64, latent=512, value=256, topk=2048)
    assert expanded_pays(sizes, 0, 8191)
    assert not expanded_pays(sizes, 8192, 16383)
    assert not expanded_pays(sizes, 8128, 8191)  # a short chunk makes the context for few rows


def test_expanded_context_of_many_heads_stays_small():
    sizes = Sizes(nope=192, rope=64, latent=512, value=256, topk=2048)
    assert most_expanded_keys(sizes, heads=64, rows=8192, step=128) * 64 * 512 * 4 <= 16 << 20


def test_layers_share_the_memory_of_the_expanded_context():
    problem = _prefill_problem(EXPANDED)

    def layers(number, queries, selection, tiles, pool, up):
        for _ in range(number):
            plane = PagedPool(pool, 1, "float32")
            values = api.sparse_mla_prefill(
                queries, selection, tiles, plane, up, scale=SCALE, implementation="xla"
            )
            queries = Queries(queries.nope + values, queries.rope + values)
        return queries.nope

    def temporaries(number):
        program = jax.jit(functools.partial(layers, number)).lower(**problem).compile()
        return program.memory_analysis().temp_size_in_bytes

    sizes = Sizes(PREFILL.nope, PREFILL.rope, PREFILL.latent, PREFILL.value, PREFILL.topk)
    keys = most_expanded_keys(sizes, PREFILL.heads, PREFILL.rows, step=128)
    context = 4 * PREFILL.heads * keys * (PREFILL.nope + PREFILL.rope + PREFILL.value)
    assert context > 0
    assert temporaries(6) < temporaries(1) + 2 * context
