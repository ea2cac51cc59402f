import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.mosaic import row_gather, swizzle
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import (
    Queries,
    Selection,
    UpProjections,
    config,
    mosaic_gpu,
    reference,
)
from pallas_kernels.tiles import Tiles

# Mosaic's interpreter runs all but the inline PTX of the gather and the tensor core's products.
interpreted = pytest.mark.usefixtures("mosaic_interpreter")

SCALE = 0.05
PLANES, PAGES, PAGE_SIZE, PLACES = 2, 3, 64, 256
PLANE = 1
# No block, four blocks (both stages used twice) with a partial last one, exactly one block.
COUNTS = (0, 200, 64)


class Problem(NamedTuple):
    q_latent: np.ndarray
    q_rope: np.ndarray
    entries: np.ndarray
    count: np.ndarray
    bits: np.ndarray


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16)


def _bits(storage_format: str, values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Entries as the pool stores them; ``scales`` [..., 4] for the fp8 latents."""
    if storage_format == "float32":
        return values
    if storage_format == "bfloat16":
        return _bfloat16(values).view(np.uint16)
    tiles = values[..., :512].reshape(*scales.shape, 128) / scales[..., None]
    latent = tiles.astype(ml_dtypes.float8_e4m3fn).reshape(*values.shape[:-1], 512)
    parts = [latent, scales, _bfloat16(values[..., 512:])]
    return np.concatenate([part.view(np.uint8) for part in parts], axis=-1)


def _values(storage_format: str, bits: np.ndarray) -> np.ndarray:
    """What the kernel multiplies by: the stored values, rounded to bfloat16."""
    if storage_format == "float32":
        return _bfloat16(bits).astype(np.float64)
    if storage_format == "bfloat16":
        return bits.view(ml_dtypes.bfloat16).astype(np.float64)
    latent = bits[..., :512].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = bits[..., 512:528].copy().view(np.float32)
    scaled = latent.reshape(*scales.shape, 128) * scales[..., None]
    rope = bits[..., 528:].copy().view(ml_dtypes.bfloat16)
    latent = _bfloat16(scaled.reshape(latent.shape))
    return np.concatenate([latent, rope], axis=-1).astype(np.float64)


def _problem(storage_format: str) -> Problem:
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    rows, pool = len(COUNTS), (PLANES, PAGES, PAGE_SIZE)
    scales = rng.uniform(0.1, 4.0, (*pool, 4)).astype(np.float32)
    entries = [rng.integers(0, PAGES * PAGE_SIZE, PLACES) for _ in range(rows)]
    return Problem(
        _bfloat16(normal((rows, 8, 512))).astype(np.float32),
        _bfloat16(normal((rows, 8, 64))).astype(np.float32),
        np.array(entries, np.int32),
        np.array(COUNTS, np.int32),
        _bits(storage_format, normal((*pool, 576)), scales),
    )


def _by_hand(storage_format: str, problem: Problem) -> np.ndarray:
    """Float64, a row at a time."""
    out = np.zeros(problem.q_latent.shape)
    pool = _values(storage_format, problem.bits[PLANE]).reshape(PAGES * PAGE_SIZE, 576)
    for row, count in enumerate(problem.count):
        if not count:
            continue
        query = np.concatenate([problem.q_latent[row], problem.q_rope[row]], axis=-1)
        cached = pool[problem.entries[row, :count]]
        logits = query.astype(np.float64) @ cached.T * SCALE
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out[row] = weights / weights.sum(axis=-1, keepdims=True) @ cached[:, :512]
    return out


@functools.cache
def _compiled(storage_format: str, splits: int):
    def attend(problem: Problem, plane: jax.Array) -> jax.Array:
        return mosaic_gpu.attend_rows(
            problem.q_latent,
            problem.q_rope,
            problem.entries,
            problem.count,
            PagedPool(problem.bits, plane, storage_format),
            scale=SCALE,
            splits=splits,
            interpret=True,
        )

    return jax.jit(attend)


def _attended(storage_format: str, splits: int, problem: Problem) -> np.ndarray:
    return np.asarray(_compiled(storage_format, splits)(problem, np.int32(PLANE)))


@interpreted
@pytest.mark.parametrize(
    ("storage_format", "splits"),
    [("bfloat16", 1), ("bfloat16", 3), ("float32", 2), ("fp8_ds_mla", 1)],
)
def test_attend_rows_equals_a_float64_softmax(storage_format, splits):
    problem = _problem(storage_format)
    out = _attended(storage_format, splits, problem)
    # Probabilities are rounded to bfloat16: 2^-9 of values near 1.
    np.testing.assert_allclose(out, _by_hand(storage_format, problem), rtol=0, atol=4e-3)


@interpreted
@pytest.mark.parametrize("splits", [1, 3])
def test_attend_rows_gives_zeros_for_a_row_without_entries(splits):
    assert not _attended("bfloat16", splits, _problem("bfloat16"))[COUNTS.index(0)].any()


@interpreted
def test_attend_rows_never_sees_what_is_not_selected():
    problem = _problem("bfloat16")
    live = np.arange(PLACES) < problem.count[:, None]
    poison = np.ones(PLANES * PAGES * PAGE_SIZE, bool)
    poison[PLANE * PAGES * PAGE_SIZE + problem.entries[live]] = False
    bits = problem.bits.copy()
    bits[poison.reshape(PLANES, PAGES, PAGE_SIZE)] = 0x7FC0  # NaN
    entries = np.where(live, problem.entries, 2**31 - 1).astype(np.int32)
    dirty = _attended("bfloat16", 1, problem._replace(bits=bits, entries=entries))
    np.testing.assert_array_equal(dirty, _attended("bfloat16", 1, problem))


def test_sparse_mla_prefill_attends_to_named_rows_block_by_block(monkeypatch):
    problem = _problem("bfloat16")
    rng = np.random.default_rng(1)
    queries = Queries(rng.standard_normal((3, 8, 16), np.float32), problem.q_rope)
    selection = Selection(problem.entries, problem.entries, np.array([64, 7, 200], np.int32))
    rows = np.array([[0, 2, 3]], np.int32)  # row 1 in no tile, 3 a pad place
    one = np.zeros(1, np.int32)
    tiles = Tiles(rows, rows, np.zeros((1, 4), np.int32), one, one)
    key, value = rng.standard_normal((2, 8, 16, 512), np.float32)
    blocks = []

    def attend_rows(*operands, scale, splits):
        blocks.append((len(operands[0]), splits))
        return reference.sparse_mla_decode(*operands, scale=scale)

    def both(queries, selection, tiles, bits, up):
        operands = queries, selection, tiles, PagedPool(bits, PLANE, "bfloat16"), up
        return [op.sparse_mla_prefill(*operands, scale=SCALE) for op in (mosaic_gpu, reference)]

    monkeypatch.setattr(mosaic_gpu, "attend_rows", attend_rows)
    monkeypatch.setattr(mosaic_gpu, "ROWS_AT_ONCE", 2)
    up = UpProjections(key, np.swapaxes(value, 1, 2))
    out, expected = jax.jit(both)(queries, selection, tiles, problem.bits, up)
    assert blocks == [(2, 1), (1, 1)]
    assert not np.asarray(out)[1].any()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


def _refused(problem: Problem, storage_format: str = "bfloat16", splits: int = 1) -> None:
    def attend(problem: Problem) -> jax.Array:
        pool = PagedPool(problem.bits, PLANE, storage_format)
        return mosaic_gpu.attend_rows(*problem[:4], pool, scale=SCALE, splits=splits)

    specs = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in problem)
    jax.eval_shape(attend, Problem(*specs))


def test_attend_rows_refuses_what_it_is_not_laid_out_for():
    problem = _problem("bfloat16")
    with pytest.raises(ValueError, match="of 256 \\+ 64 values"):
        _refused(problem._replace(q_latent=problem.q_latent[..., :256]))
    wide = [np.repeat(query, 9, axis=1) for query in problem[:2]]
    with pytest.raises(ValueError, match="72 heads"):
        _refused(problem._replace(q_latent=wide[0], q_rope=wide[1]))
    with pytest.raises(ValueError, match="cannot read fp8_planar entries"):
        _refused(problem, "fp8_planar")
    with pytest.raises(ValueError, match="has 1152 bytes; fp8_ds_mla entries have 656"):
        _refused(problem, "fp8_ds_mla")
    with pytest.raises(ValueError, match="splits is 0"):
        _refused(problem, splits=0)


@pytest.mark.parametrize(
    ("rows", "topk", "splits"),
    [
        (8192, 2048, 1),
        (192, 2048, 2),  # three waves of 16 blocks instead of two of 32
        (132, 2048, 1),
        (6, 2048, 16),
        (1, 2048, 32),
        (1, 64, 1),
    ],
)
def test_splits_for_fills_the_device_without_shares_below_a_block(rows, topk, splits):
    assert config.splits_for(rows, topk) == splits


def test_gather_addresses_are_those_of_swizzled_tiles():
    for columns in (64, 256):
        matrix = np.arange(64 * columns).reshape(64, columns)
        tiles = matrix.reshape(8, 8, columns // 64, 8, 8).transpose(0, 2, 1, 3, 4)
        # The 128-byte swizzle: piece p of a tile's row r stands at place p ^ r.
        stored = np.empty_like(tiles)
        for row, piece in np.ndindex(8, 8):
            stored[:, :, row, piece ^ row] = tiles[:, :, row, piece]
        row, piece = np.divmod(np.arange(64 * columns // 8), columns // 8)
        element = swizzle.piece_offset(row, piece, columns) // 2
        np.testing.assert_array_equal(stored.reshape(-1)[element], matrix.reshape(-1)[::8])


def test_gather_threads_cover_every_piece_once():
    thread = np.arange(128)
    row, lane = thread // 8, thread % 8
    seen = []
    for step, tile in np.ndindex(4, 9):
        is_rope, offset = row_gather.column_tile_offset(tile)
        columns = 64 if is_rope else 256
        address = swizzle.piece_offset(row, lane, columns) + offset
        address = address + row_gather.step_offset(step, columns)
        half, piece = (0, lane) if is_rope else (tile // 4, tile % 4 * 8 + lane)
        matrix = 64 * 256 * 2 * half
        expected = matrix + swizzle.piece_offset(row + 16 * step, piece, columns)
        np.testing.assert_array_equal(address, expected)
        seen.extend(address + (2**20 if is_rope else 0))
    assert len(set(seen)) == len(seen) == 64 * 576 // 8


def test_gather_formats_have_the_sizes_of_the_storage_formats():
    for name, form in row_gather.ROW_FORMATS.items():
        storage = {"float32": 576, "bfloat16": 576, "fp8_ds_mla": 656}[name]
        assert form.row_bytes == storage * jnp.dtype(_problem(name).bits.dtype).itemsize
