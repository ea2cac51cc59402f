import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import format_of
from pallas_kernels.index_topk import mosaic_gpu, mosaic_gpu_scores, reference
from pallas_kernels.mosaic import e4m3_operand, largest
from pallas_kernels.mosaic.ordered_bits import NO_SCORE, ordered_bits
from pallas_kernels.pool import PagedPool

# Mosaic's interpreter runs all but the inline PTX (compaction, conversion of e4m3) and the tensor
# core's products.
interpreted = pytest.mark.usefixtures("mosaic_interpreter")

PAGE_SIZE = 64


def _best(scores: np.ndarray, entries: int, topk: int) -> list[int]:
    """Positions of the largest, the lower position first among equals, in ascending order."""
    order = np.argsort(-(scores[:entries] + 0.0), kind="stable")
    return sorted(order[:topk].tolist())


def _pool(rng: np.random.Generator, storage_format: str, pages: int, width: int) -> PagedPool:
    """Two planes of random keys; nothing but the format's own values in them."""
    stored = format_of(storage_format)
    if storage_format == "float32":
        bits = rng.standard_normal((2, pages, PAGE_SIZE, width), np.float32)
    elif storage_format == "bfloat16":
        values = rng.standard_normal((2, pages, PAGE_SIZE, width), np.float32)
        bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    else:
        keys = rng.standard_normal((2, pages, PAGE_SIZE * width), np.float32)
        scales = rng.uniform(0.5, 2.0, (2, pages, PAGE_SIZE)).astype(np.float32)
        flat = [keys.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scales.view(np.uint8)]
        bits = np.concatenate(flat, axis=-1).reshape(2, pages, PAGE_SIZE, stored.entry_size(width))
    return PagedPool(jnp.asarray(bits), 1, storage_format)


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_ordered_bits_order_scores_as_floats_do():
    infinity = np.inf
    scores = np.array([-infinity, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, infinity], np.float32)
    bits = np.asarray(jax.jit(ordered_bits)(scores))
    assert bits[3] == bits[4]
    assert (np.diff(np.delete(bits, 3).astype(np.int64)) > 0).all()
    assert bits[0] > NO_SCORE


def test_ordered_bits_of_nan_have_a_place():
    scores = np.array([np.inf, np.nan, *[0.0] * 6], np.float32)
    bits = np.asarray(jax.jit(ordered_bits)(scores))
    assert bits[1] == bits[0] + 1


@interpreted
def test_largest_of_rows_takes_what_a_stable_sort_takes():
    topk, length = 100, 2048
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((4, length)).astype(np.float32)
    scores[1] = np.round(scores[1], 1)  # ties at the threshold
    scores[2] = np.maximum(scores[2] - 2.0, 0.0)  # fewer than topk above a plateau of zeros
    scores[2, ::3] *= -1.0  # some of them -0.0
    entries = np.array([length, 1500, 700, topk + 1], np.int32)
    bits = np.asarray(ordered_bits(jnp.asarray(scores))).copy()
    for row, count in enumerate(entries):
        bits[row, count:] = np.iinfo(np.int32).max  # must not be looked at
    found = largest.largest_of_rows(
        jnp.asarray(bits), jnp.asarray(entries), topk=topk, interpret=True
    )
    want = [_best(scores[row], entries[row], topk) for row in range(4)]
    assert np.asarray(found).tolist() == want


@interpreted
def test_largest_of_rows_takes_all_of_a_short_row():
    bits = jnp.asarray(np.random.default_rng(1).integers(-9, 9, (3, 2048)), jnp.int32)
    found = largest.largest_of_rows(bits, jnp.asarray([4, 3, 0], jnp.int32), topk=4, interpret=True)
    assert np.asarray(found).tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 0, 0, 0]]


@interpreted
def test_largest_of_rows_searches_a_long_row_chunk_by_chunk(monkeypatch):
    # 50 is no multiple of four: each chunk leaves two places of its candidates empty.
    monkeypatch.setattr(largest, "MAX_CHUNK", 2048)
    topk, length = 50, 6144
    scores = np.round(np.random.default_rng(2).standard_normal((2, length)), 1).astype(np.float32)
    entries = np.array([5000, 60], np.int32)
    bits = ordered_bits(jnp.asarray(scores))
    found = largest.largest_of_rows(bits, jnp.asarray(entries), topk=topk, interpret=True)
    want = [_best(scores[row], entries[row], topk) for row in range(2)]
    assert np.asarray(found).tolist() == want


@pytest.mark.parametrize("length", [1, 2048, 4096, 16384, 16385, 131072, 1 << 20])
def test_padded_length_splits_into_whole_chunks(length):
    padded = largest.padded_length(length)
    chunks = math.ceil(padded / largest.MAX_CHUNK)
    assert padded >= length
    assert padded % (chunks * largest.UNIT) == 0


def _compacted(bits: np.ndarray, entries: int, topk: int) -> list[int]:
    """What the 16 warps of ``compaction`` write, step by step as its inline code goes."""
    kth = np.sort(bits[:entries])[::-1][topk - 1]
    room = topk - int((bits[:entries] > kth).sum())
    run = (entries + 2047) // 2048 * 128
    places = np.full(topk, -1)

    def load(start: int) -> np.ndarray:
        """128 entries of a turn, [lane, 4]: 1 for one above, 65536 for a tied one."""
        index = start + np.arange(128)
        value, counts = bits[index], index < entries
        return np.where(counts & (value > kth), 1, np.where(counts & (value == kth), 65536, 0))

    turns = range(0, run, 128)
    warp_counts = [sum(load(warp * run + turn).sum() for turn in turns) for warp in range(16)]
    for warp in range(16):
        before_turn = sum(warp_counts[:warp])
        for turn in turns:
            kinds = load(warp * run + turn).reshape(32, 4)
            upto = np.cumsum(kinds.sum(axis=1))
            for lane in range(32):
                before = before_turn + upto[lane] - kinds[lane].sum()
                above, tied = before % 65536, before // 65536
                for entry in range(4):
                    if kinds[lane, entry] == 1 or (kinds[lane, entry] and tied < room):
                        places[above + min(tied, room)] = warp * run + turn + 4 * lane + entry
                    above += kinds[lane, entry] == 1
                    tied += kinds[lane, entry] == 65536
            before_turn += upto[-1]
    return places.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_compaction_scheme_writes_the_stable_choice(seed):
    # A model in NumPy: the inline code itself runs on a GPU only.
    rng = np.random.default_rng(seed)
    length = 2048 * int(rng.integers(1, 3))
    entries = int(rng.integers(300, length + 1))
    topk = int(rng.integers(1, 300))
    bits = rng.integers(0, 4 if seed % 2 else 1000, length)
    assert _compacted(bits, entries, topk) == _best(bits, entries, topk)


def test_e4m3_operand_meets_the_columns_that_wgmma_reads():
    # A operand of wgmma: lane c of a row holds columns 2c, 2c + 1, 2c + 8, 2c + 9 of each 16; the
    # kernel fills them from four bytes of the 16 that the lane loads of either half of the row.
    operand = np.empty(128, np.int64)
    for half in range(2):
        for lane in range(4):
            for word in range(4):
                columns = 16 * (4 * half + word) + 2 * lane + np.array([0, 1, 8, 9])
                operand[columns] = 64 * half + 16 * lane + 4 * word + np.arange(4)
    permuted = jax.jit(e4m3_operand.permute_columns)(np.arange(128, dtype=np.float32))
    assert np.asarray(permuted).tolist() == operand.tolist()


# float32 keys are multiplied as two bfloat16 terms, the product of the two low ones left out.
@interpreted
@pytest.mark.parametrize(
    ("storage_format", "width", "error"),
    [("bfloat16", 64, 1e-5), ("fp8_planar", 128, 1e-5), ("float32", 64, 1e-4)],
)
def test_score_tiles_scores_every_visible_key(storage_format, width, error):
    rows, heads, context = 2, 8, 100
    rng = np.random.default_rng(3)
    pool = _pool(rng, storage_format, 4, width)
    queries = _rounded(rng.standard_normal((1, rows, heads, width), np.float32))
    weights = rng.standard_normal((1, rows, heads), np.float32)
    table = jnp.asarray([[3, 1, 0]], jnp.int32)
    bits = mosaic_gpu_scores.score_tiles(
        jnp.asarray(queries),
        jnp.asarray(weights),
        jnp.asarray([context], jnp.int32),
        jnp.zeros(1, jnp.int32),
        table,
        pool,
        length=3 * PAGE_SIZE,
        interpret=True,
    )
    keys = np.asarray(pool.read_pages(table[0])).reshape(-1, width)[:context]
    dots = np.maximum(np.einsum("rmi,si->rms", queries[0], keys), 0.0)
    want = np.einsum("rms,rm->rs", dots, weights[0])
    seen = np.asarray(bits)[0, :, :context]
    scores = np.where(seen < 0, seen ^ 0x7FFFFFFF, seen).view(np.float32)
    assert np.abs(scores - want).max() <= error * np.abs(want).max()


@interpreted
def test_index_topk_selects_what_the_reference_selects(monkeypatch):
    # Rows around the first that leaves a key out, a pad row, a plateau tile, NaN that nobody may
    # see, random pages; two blocks of tiles, one after the other.
    monkeypatch.setattr(mosaic_gpu, "SCORES", 3 * largest.UNIT)
    topk, heads, width = 32, 8, 64
    rng = np.random.default_rng(4)
    positions = np.array([[topk - 1, topk], [topk - 2, -1], [120, 150]], np.int32)
    tiles, rows = positions.shape
    table = 1 + rng.permutation(tiles * 3).reshape(tiles, 3).astype(np.int32)
    pool = _pool(rng, "bfloat16", 1 + tiles * 3, width)
    bits = np.asarray(pool.array).copy()
    queries = _rounded(rng.standard_normal((tiles, rows, heads, width), np.float32))
    queries[2] = np.abs(queries[2])  # the last tile's keys get negative dots, but for a few
    negative = np.uint16(0x8000)
    bits[1, table[2]] |= negative
    bits[1, table[2, 1], ::7] &= ~negative
    for tile, last in enumerate(positions.max(axis=1)):
        for place in range(last + 1, 3 * PAGE_SIZE):
            bits[1, table[tile, place // PAGE_SIZE], place % PAGE_SIZE] = 0x7FC0
    pool = PagedPool(jnp.asarray(bits), 1, "bfloat16")
    operands = (
        jnp.asarray(queries),
        jnp.asarray(rng.standard_normal((tiles, rows, heads), np.float32)),
        jnp.asarray(positions),
        jnp.asarray(table),
        pool,
    )
    chosen, count = mosaic_gpu.index_topk_decode(*operands, topk=topk, interpret=True)
    want, want_count = jax.jit(functools.partial(reference.index_topk_decode, topk=topk))(*operands)
    assert np.asarray(count).tolist() == np.asarray(want_count).tolist()
    for place in np.ndindex(positions.shape):
        kept = int(count[place])
        row = np.asarray(chosen)[place]
        assert row[:kept].tolist() == sorted(np.asarray(want)[place][:kept].tolist())
        assert ((row >= 0) & (row < 3 * PAGE_SIZE)).all()


def _trace(
    *,
    tiles: int = 2,
    rows: int = 1,
    heads: int = 32,
    pages: int = 2048,
    topk: int = 2048,
    pool: tuple[int, ...] = (2, 4097, PAGE_SIZE, 128),
    storage_format: str = "bfloat16",
) -> Any:
    """Jaxpr of a call; nothing is compiled."""
    shape, width = jax.ShapeDtypeStruct, 128

    def call(queries, weights, positions, table, bits):
        keys = PagedPool(bits, 1, storage_format)
        return mosaic_gpu.index_topk_decode(queries, weights, positions, table, keys, topk=topk)

    return jax.make_jaxpr(call)(
        shape((tiles, rows, heads, width), jnp.bfloat16),
        shape((tiles, rows, heads), jnp.float32),
        shape((tiles, rows), jnp.int32),
        shape((tiles, pages), jnp.int32),
        shape(pool, format_of(storage_format).storage),
    ).jaxpr


def _inner(equation: Any) -> list[Any]:
    """The jaxprs in an equation's parameters."""
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns"))
    found = [getattr(leaf, "jaxpr", leaf) for leaf in leaves]
    return [leaf for leaf in found if hasattr(leaf, "eqns")]


def _is_kernel(equation: Any) -> bool:
    """Whether it works on references, which a program of XLA does not have."""
    return any(hasattr(var.aval, "inner_aval") for body in _inner(equation) for var in body.invars)


def _equations(jaxpr: Any, loops: int = 0, kernels: bool = True) -> Iterator[tuple[Any, int]]:
    """All equations and the number of loops around each."""
    for equation in jaxpr.eqns:
        yield equation, loops
        if kernels or not _is_kernel(equation):
            inside = loops + (equation.primitive.name in ("while", "scan"))
            for body in _inner(equation):
                yield from _equations(body, inside, kernels)


_local_blocks = jax.jit(mosaic_gpu_scores.local_blocks, static_argnums=2)


def _key_bytes(rows: int, contexts: list[int]) -> int:
    """Bytes of keys that a call copies to shared memory for these contexts, ``rows`` rows each."""
    pages = 256
    planes, pool_pages = 2, 999
    pool = planes, pool_pages, PAGE_SIZE, 128
    jaxpr = _trace(tiles=len(contexts), rows=rows, pages=pages, pool=pool)
    copies = [
        (equation, loops)
        for equation, loops in _equations(jaxpr)
        if equation.primitive.name == "copy_gmem_to_smem"
        and equation.invars[0].aval.shape[0] == planes * pool_pages
    ]
    splits = mosaic_gpu_scores.split_count(len(contexts), pages * PAGE_SIZE)
    programs = np.array(contexts)[:, None], np.arange(splits)[None, :]
    trips = int(_local_blocks(*programs, splits).sum())
    total = 0
    for equation, loops in copies:
        assert loops == 1  # the loop over a program's blocks
        _stages, *block = equation.invars[1].aval.shape
        total += trips * math.prod(block) * equation.invars[1].aval.dtype.itemsize
    return total


def test_rows_of_a_group_share_one_read_of_the_keys():
    contexts = [16384, 4097, 2049]
    whole_blocks = sum(-(-context // PAGE_SIZE) * PAGE_SIZE for context in contexts)
    assert _key_bytes(6, contexts) == whole_blocks * 128 * 2
    assert _key_bytes(6, contexts) / _key_bytes(1, contexts) <= 1.1


def test_index_topk_keeps_its_arrays_below_a_sixteenth_of_the_scores():
    # What the compiled program allocates is measured by scripts/compile_h200.py.
    tiles, rows, pages = 128, 64, 2048
    jaxpr = _trace(tiles=tiles, rows=rows, pages=pages)
    score_matrix = tiles * rows * pages * PAGE_SIZE * 4
    sizes = [
        math.prod(var.aval.shape) * var.aval.dtype.itemsize
        for equation, _ in _equations(jaxpr, kernels=False)
        for var in equation.outvars
    ]
    assert max(sizes) <= score_matrix / 16


def test_index_topk_is_straight_line_code_without_a_sort():
    jaxpr = _trace(tiles=32, rows=6)
    outside = {equation.primitive.name for equation, _ in _equations(jaxpr, kernels=False)}
    assert not outside & {"while", "scan", "cond"}
    everywhere = {equation.primitive.name for equation, _ in _equations(jaxpr)}
    assert not everywhere & {"sort", "top_k", "approx_top_k"}


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        ({"pool": (2, 9, 16, 128)}, "pages of a multiple of 64 keys, not of 16"),
        (
            {"pool": (2, 9, 64, 656), "storage_format": "fp8_ds_mla"},
            "does not read keys of format fp8_ds_mla",
        ),
        ({"pool": (2, 9, 64, 96)}, "keys of width 64 or 128, not 96"),
        ({"heads": 200, "storage_format": "float32"}, "at most 192 index heads"),
        ({"topk": 9000}, "at most 8192 positions, not 9000"),
    ],
    ids=["page size", "format", "width", "heads", "topk"],
)
def test_index_topk_refuses(call, refusal):
    with pytest.raises(ValueError, match=refusal):
        _trace(**call)


def test_index_topk_searches_nothing_where_everything_fits():
    jaxpr = _trace(pages=32)
    assert not any(_is_kernel(equation) for equation, _ in _equations(jaxpr))
