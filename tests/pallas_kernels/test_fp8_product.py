import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8 import BlockScaled
from pallas_kernels.fp8_linear import mosaic_gpu
from pallas_kernels.fp8_linear.config import split_count
from pallas_kernels.mosaic import e4m3_weights
from pallas_kernels.mosaic.fp8_product import plain_product, tile_size
from pallas_kernels.mosaic.fp8_product_block import item_of

# Partial blocks of outputs and, at a depth in steps of 64, of inputs; two row tiles.
ROWS, OUTPUTS, DEPTH, LAYERS = 70, 72, 208, 2
LAYER = 1


def _matrices(rng, outputs, depth):
    values = rng.standard_normal((LAYERS, outputs, depth), np.float32)
    blocks = -(-outputs // 128), -(-depth // 128)
    # No powers of two, and far apart.
    scales = rng.uniform(0.1, 40.0, (LAYERS, *blocks)).astype(np.float32)
    return BlockScaled(values.astype(ml_dtypes.float8_e4m3fn), scales)


def _spread(scales, shape) -> np.ndarray:
    rows, columns = (np.arange(size) // 128 for size in shape)
    return scales[..., rows[:, None], columns]


def _by_hand(x, matrices) -> np.ndarray:
    values = matrices.values[LAYER].astype(np.float64)
    return x.astype(np.float64) @ (values * _spread(matrices.scales[LAYER], values.shape)).T


@functools.cache
def _compiled():
    return jax.jit(functools.partial(mosaic_gpu.fp8_linear, interpret=True))


@pytest.mark.usefixtures("mosaic_interpreter")
def test_fp8_linear_on_tiles_equals_float64_where_blocks_are_partial():
    rng = np.random.default_rng(3)
    matrices = _matrices(rng, OUTPUTS, DEPTH)
    x = rng.standard_normal((ROWS, DEPTH), np.float32).astype(ml_dtypes.bfloat16)
    x = x.astype(np.float32)  # the operator keeps it
    product = np.asarray(_compiled()(x, matrices, np.int32(LAYER)))
    expected = _by_hand(x, matrices)
    # Values are exact in bfloat16 and sums are float32: only their order differs.
    np.testing.assert_allclose(product, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_fp8_linear_on_tiles_refuses_what_the_copy_engine_cannot_address():
    rng = np.random.default_rng(4)
    x = np.zeros((3, 40), np.float32)
    with pytest.raises(ValueError, match="got a matrix of 72 outputs and 40 inputs"):
        jax.eval_shape(mosaic_gpu.fp8_linear, x, _matrices(rng, 72, 40), 0)


@pytest.mark.parametrize(("items", "steps", "parts"), [(24, 48, 3), (72, 128, 1), (1, 5, 5)])
def test_split_count_gives_half_of_the_multiprocessors_work(items, steps, parts):
    assert split_count(items, steps) == parts


def test_item_of_meets_every_tile_with_every_column_and_part_once():
    product = plain_product("product", 384, 16, splits=2)
    used = 11  # a group of 8 tiles and a smaller one
    numbers = np.arange(used * 3 * 2, dtype=np.int32)
    items = jax.jit(jax.vmap(functools.partial(item_of, product), (None, 0)))(
        np.int32(used), numbers
    )
    met = sorted(zip(*(part.tolist() for part in items), strict=True))
    assert met == list(np.ndindex(used, 3, 2))


@pytest.mark.parametrize(("rows", "size"), [(1, 16), (16.5, 32), (33, 64), (700, 64)])
def test_tile_size_is_the_smallest_that_holds_the_rows(rows, size):
    assert tile_size(rows) == size


def _column_order(width: int) -> np.ndarray:
    """The column that stands at each place of a block's operand.

    Of the columns that a lane loads, two at a time go to every second pair of places.
    """
    lane_columns = np.arange(width).reshape(4, -1, 2)
    return lane_columns.transpose(1, 0, 2).reshape(-1)


def _block_in_shared_memory(block: np.ndarray) -> np.ndarray:
    """Bytes of a block of 128 rows as the copy engine leaves them, after NVIDIA's description.

    A swizzle of 128 bytes flips bits 4 to 6 of an address by its bits 7 to 9.
    """
    address = np.arange(block.size)
    if block.shape[1] == 128:
        address ^= (address >> 7 & 7) << 4
    memory = np.empty(block.size, block.dtype)
    memory[address] = block.reshape(-1)
    return memory


@pytest.mark.parametrize(("width", "ordered"), [(128, False), (128, True), (64, False)])
def test_loaded_bytes_make_wgmmas_operand_up_to_the_order_of_columns(width, ordered):
    block = np.random.default_rng(1).integers(0, 256, (128, width), np.uint8)
    memory = _block_in_shared_memory(block)
    order = _column_order(width)
    rows = _column_order(128) if ordered else np.arange(128)
    for share, thread, lower in np.ndindex(2, 128, 2):
        row = e4m3_weights.loaded_row(thread, lower, share, ordered=ordered)
        loads = [
            memory[start : start + 16]
            for part in range(width // 64)
            for start in [e4m3_weights.piece_address(thread, row, part, width)]
        ]
        # Of every 16 columns of operand A a thread has 2c, 2c + 1, 2c + 8, 2c + 9 (PTX's manual).
        first = 2 * (thread % 4) + np.array([0, 1, 8, 9])
        places = (np.arange(0, width, 16)[:, None] + first).reshape(-1)
        operand_row = thread // 32 * 16 + thread % 32 // 4 + 8 * lower
        expected = block[rows[share * 64 + operand_row], order[places]]
        np.testing.assert_array_equal(np.concatenate(loads), expected)


def test_loads_of_two_rows_meet_in_no_bank_of_shared_memory():
    for width, ordered in ((128, False), (128, True), (64, False)):
        for part in range(width // 64):
            for first in range(0, 128, 8):  # eight threads' 16 bytes are one access
                starts = [
                    e4m3_weights.piece_address(
                        thread,
                        e4m3_weights.loaded_row(thread, 0, 0, ordered=ordered),
                        part,
                        width,
                    )
                    for thread in range(first, first + 8)
                ]
                assert len({start % 128 for start in starts}) == 8


def test_permuted_columns_stand_as_the_operand_has_them_and_end_in_zeros():
    values = np.arange(1, 3 * 208 + 1, dtype=np.float32).reshape(3, 208)
    permuted = np.asarray(jax.jit(e4m3_weights.permute_columns)(values))
    padded = np.pad(values, ((0, 0), (0, 48))).reshape(3, 4, 64)
    expected = padded[:, :, _column_order(64)].reshape(3, 256)
    np.testing.assert_array_equal(permuted, expected)
