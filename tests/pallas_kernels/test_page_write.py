"""Bytes that page_write stores, against the encoders of ``fp8_bytes``; all from one program."""

import functools

import fp8_bytes
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import FORMATS, format_of
from pallas_kernels.page_write import page_write
from pallas_kernels.pool import PagedPool

WIDTHS = {"float32": 64, "bfloat16": 64, "fp8_ds_mla": 576, "fp8_planar": 128}
PLANES, PAGES, PAGE_SIZE, ROWS = 3, 64, 16, 24
END = PAGES * PAGE_SIZE
# Where all rows go, and where one alone goes.
PLANE, LONE_PLANE = 1, 2
FORMS = ("reference", "xla")
FORMATS_AND_FORMS = [(name, form) for name in WIDTHS for form in FORMS]


def _write_all(pools, plane, entries, rows, implementation):
    written = {}
    for name, array in pools.items():
        pool = PagedPool(array, plane, name)
        array = page_write(pool, entries, rows[name], implementation=implementation)
        lone = PagedPool(array, LONE_PLANE, name)
        written[name] = page_write(lone, entries[:1], rows[name][:1], implementation=implementation)
    return written


def _program(pools, page, plane, entries, rows):
    """What each implementation makes of its pools; the values of a page."""
    written = {form: _write_all(pools[form], plane, entries, rows, form) for form in pools}
    first = jnp.zeros(1, jnp.int32)
    read = {name: PagedPool(bits, 0, name).read_pages(first)[0] for name, bits in page.items()}
    return written, read


@functools.cache
def _compiled():
    shape = jax.ShapeDtypeStruct
    pools = {name: shape(pool.shape, pool.dtype) for name, pool in _pools().items()}
    page = {name: shape((1, 1, *pool.shape[2:]), pool.dtype) for name, pool in pools.items()}
    rows = {name: shape((ROWS, width), np.float32) for name, width in WIDTHS.items()}
    both = dict.fromkeys(FORMS, pools)
    arguments = both, page, shape((), np.int32), shape((ROWS,), np.int32), rows
    return jax.jit(_program, donate_argnums=0).lower(*arguments).compile()


def _pools():
    """Random bits, all of them finite numbers."""
    rng = np.random.default_rng(0)
    pools = {}
    for name, width in WIDTHS.items():
        stored = format_of(name)
        shape = (PLANES, PAGES, PAGE_SIZE, stored.entry_size(width))
        if name == "float32":
            pools[name] = rng.standard_normal(shape, np.float32)
        else:
            pools[name] = rng.integers(0, 0x3F, shape).astype(stored.storage)
    return pools


def _rows():
    """Rows of very different size, and those where a rule of the layouts bites."""
    rng = np.random.default_rng(1)
    rows = {}
    for name, width in WIDTHS.items():
        values = rng.standard_normal((ROWS, width)).astype(np.float32)
        values *= 10.0 ** rng.integers(-6, 7, (ROWS, 1)).astype(np.float32)
        values[0] = 0.0
        values[1] = -0.0
        values[2, :8] = 1e-40  # subnormal
        values[2, 8:] = 0.0
        # Largest magnitudes just at and beyond 448 times a power of two.
        for row, size in enumerate((448.0, 3.5, 1.75 * 2**-20, 1e-4, 448e-4), start=3):
            values[row] = np.clip(values[row], -1, 1) * np.float32(size)
            values[row, ::64] = size
            values[row + 5] = values[row]
            values[row + 5, ::64] = np.nextafter(np.float32(size), np.float32(np.inf))
        values[13] = np.repeat(fp8_bytes.MAGNITUDES[7:9].mean(), width)  # ties
        values[13, ::2] = fp8_bytes.MAGNITUDES[60:62].mean()
        values[13, 0] = 448.0
        rows[name] = values
    return rows


def _entries():
    """Scattered over the plane, its last entry among them; the first row goes somewhere."""
    entries = np.random.default_rng(2).permutation(np.arange(PAGE_SIZE, END - 1))[:ROWS]
    entries[4] = END - 1
    return entries.astype(np.int32)


def _run(pools, entries, rows):
    given = {form: jax.tree.map(jax.device_put, pools) for form in FORMS}
    page = {name: pool[:1, :1] for name, pool in pools.items()}
    return _compiled()(given, page, np.int32(PLANE), entries, rows)


def _by_hand(name, pool, entries, rows):
    pool = pool.copy()
    for plane, number in [*((PLANE, n) for n in range(ROWS)), (LONE_PLANE, 0)]:
        if entries[number] >= END:
            continue
        page, offset = divmod(entries[number], PAGE_SIZE)
        row = rows[number : number + 1]
        if name == "float32":
            pool[plane, page, offset] = row
        elif name == "bfloat16":
            pool[plane, page, offset] = row.astype(ml_dtypes.bfloat16).view(np.uint16)
        elif name == "fp8_ds_mla":
            pool[plane, page, offset] = fp8_bytes.entry_bytes(row)
        else:
            fp8_bytes.put_index_key(pool[plane, page], offset, row[0])
    return pool


def _assert_same_bits(got, expected):
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("name", "form"), FORMATS_AND_FORMS)
def test_page_write_stores_the_bytes_of_an_independent_encoder(name, form):
    pools, entries, rows = _pools(), _entries(), _rows()
    written = _run(pools, entries, rows)[0][form][name]
    _assert_same_bits(written, _by_hand(name, pools[name], entries, rows[name]))


@pytest.mark.parametrize(("name", "form"), FORMATS_AND_FORMS)
def test_page_write_drops_rows_at_and_past_the_end(name, form):
    pools, entries, rows = _pools(), _entries(), _rows()
    # All but two rows, the lone one among the dropped; the last entry must not change.
    dropped = np.r_[0, 3:ROWS]
    entries[dropped] = np.resize([END, END + 1, END + PAGE_SIZE, 2**31 - 1], dropped.size)
    written = _run(pools, entries, rows)[0][form][name]
    expected = _by_hand(name, pools[name], entries, rows[name])
    assert (expected != pools[name]).any()
    _assert_same_bits(written, expected)


def test_page_write_writes_donated_pools_in_place():
    memory = _compiled().memory_analysis()
    pool_bytes = [pool.nbytes for pool in _pools().values()]
    assert memory.alias_size_in_bytes == 2 * sum(pool_bytes)
    assert memory.temp_size_in_bytes < min(pool_bytes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tile_with_a_number_that_is_not_finite_reads_back_as_nan(value):
    entries, rows = _entries(), _rows()
    for name in ("fp8_ds_mla", "fp8_planar"):
        rows[name][9, 100] = value
    written = _run(_pools(), entries, rows)[0]["xla"]
    page, offset = divmod(entries[9], PAGE_SIZE)
    entry = fp8_bytes.entry_values(np.asarray(written["fp8_ds_mla"])[PLANE, page, offset])
    assert np.isnan(entry[:128]).all()
    assert np.isfinite(entry[128:]).all()
    key = fp8_bytes.index_keys(np.asarray(written["fp8_planar"])[PLANE, page])[offset]
    assert np.isnan(key).all()


def test_entries_and_keys_come_back_within_4_percent_of_their_norm():
    rng = np.random.default_rng(3)
    rows = {}
    for name, width in WIDTHS.items():
        # Heavy tails: the largest of a tile may be hundreds of times its median.
        values = rng.standard_t(2, (ROWS, width)) * 10.0 ** rng.integers(-2, 3, (ROWS, 1))
        rows[name] = values.astype(np.float32)
    entries = _entries()
    written = _run(_pools(), entries, rows)[0]["xla"]
    page, offset = np.divmod(entries, PAGE_SIZE)
    read = {
        "fp8_ds_mla": fp8_bytes.entry_values(np.asarray(written["fp8_ds_mla"])[PLANE]),
        "fp8_planar": fp8_bytes.index_keys(np.asarray(written["fp8_planar"])[PLANE]),
    }
    for name, values in read.items():
        error = fp8_bytes.relative_error(values[page, offset], rows[name].astype(np.float64))
        assert error.max() < 0.04


def test_any_float32_scale_can_be_read():
    pools, scales = _pools(), np.array([0.3, 1e-20, 3e5, 7.0], np.float32)
    pools["fp8_ds_mla"][..., 512:528] = scales.view(np.uint8)
    planar = pools["fp8_planar"].reshape(PLANES, PAGES, -1)
    planar[..., PAGE_SIZE * 128 :] = np.tile(scales, PAGE_SIZE // 4).view(np.uint8)
    read = _run(pools, _entries(), _rows())[1]
    expected = {
        "fp8_ds_mla": fp8_bytes.entry_values(pools["fp8_ds_mla"][0, 0]),
        "fp8_planar": fp8_bytes.index_keys(pools["fp8_planar"][0, 0]),
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(read[name]), values.astype(np.float32))


def _refused(name, width, rows, **options):
    stored = format_of(name)
    shape = (PLANES, PAGES, PAGE_SIZE, stored.entry_size(width))
    array = jax.ShapeDtypeStruct(shape, stored.storage)
    given = jax.ShapeDtypeStruct((ROWS, rows), np.float32)
    entries = jax.ShapeDtypeStruct((ROWS,), np.int32)

    def call(array, entries, given):
        return page_write(PagedPool(array, 0, name), entries, given, **options)

    jax.eval_shape(call, array, entries, given)


def test_page_write_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="no implementation 'mosaic_gpu': XLA's scatter"):
        _refused("float32", 64, 64, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="unknown implementation 'cuda'"):
        _refused("float32", 64, 64, implementation="cuda")
    with pytest.raises(ValueError, match="entries of 576 values, not of 40"):
        _refused("fp8_ds_mla", 576, 40)
    with pytest.raises(ValueError, match="rows of 32 values for a float32 pool whose entries have"):
        _refused("float32", 64, 32)


def test_every_format_is_written_in_these_tests():
    assert WIDTHS.keys() == FORMATS.keys()


def test_fp8_layouts_have_the_sizes_that_other_engines_read():
    assert format_of("fp8_ds_mla").entry_size(576) == 656
    assert format_of("fp8_planar").entry_size(128) == 132
