"""Block FP8 against values worked out by hand and against a plain formula."""

import ml_dtypes
import numpy as np
import pytest

from glm_jax.weights.quant import dequantise_rows, quantise_blocks, scale_shape

FP8 = ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((128, 128), (1, 1)), ((129, 256), (2, 2)), ((576, 6144), (5, 48)), ((1, 1), (1, 1))],
)
def test_scale_shape_counts_partial_blocks(shape, expected):
    assert scale_shape(shape) == expected


def test_dequantise_multiplies_each_block_by_its_scale():
    values = np.full((130, 200), 2.0).astype(FP8)
    scales = np.array([[1, 10], [100, 1000]], np.float32)
    result = dequantise_rows(values, scales)
    assert result.dtype == np.float32
    expected = np.empty((130, 200), np.float32)
    expected[:128, :128], expected[:128, 128:] = 2, 20
    expected[128:, :128], expected[128:, 128:] = 200, 2000
    np.testing.assert_array_equal(result, expected)


def test_dequantise_finds_the_block_of_a_slab():
    values = np.ones((4, 3)).astype(FP8)
    scales = np.array([[1], [2], [3]], np.float32)
    result = dequantise_rows(values, scales, first_row=254)
    np.testing.assert_array_equal(result[:, 0], [2, 2, 3, 3])


def test_quantise_maps_the_largest_value_of_a_block_to_448():
    matrix = np.zeros((2, 129), np.float32)
    matrix[0, :3] = [0.5, -1.0, 0.25]
    matrix[1, 128] = 896.0
    values, scales = quantise_blocks(matrix)
    assert values.dtype == FP8
    np.testing.assert_allclose(scales, [[1 / 448, 2.0]], rtol=2e-7)
    np.testing.assert_array_equal(values[0, :3].astype(np.float32), [224, -448, 112])
    assert values[1, 128] == 448


def test_quantise_keeps_zero_blocks_zero():
    values, scales = quantise_blocks(np.zeros((3, 4), np.float32))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    np.testing.assert_array_equal(dequantise_rows(values, scales), np.zeros((3, 4)))


@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1.0, 1e38])
def test_quantise_is_within_half_a_step(magnitude):
    rng = np.random.default_rng(0)
    matrix = (rng.uniform(-1, 1, (200, 150)) * magnitude).astype(np.float32)
    values, scales = quantise_blocks(matrix)
    error = np.abs(dequantise_rows(values, scales).astype(np.float64) - matrix)
    # Three mantissa bits: half a step is 2^-4 of the value, or of the smallest normal, 2^-6.
    step = np.kron(scales, np.ones((128, 128)))[:200, :150]
    assert (error <= np.maximum(np.abs(matrix.astype(np.float64)), step * 2**-6) * 2**-4).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_quantise_takes_other_floats(dtype):
    matrix = np.linspace(-1, 1, 12).reshape(3, 4).astype(dtype)
    from_dtype, from_float32 = quantise_blocks(matrix), quantise_blocks(matrix.astype(np.float32))
    assert from_dtype.values.tobytes() == from_float32.values.tobytes()
    assert from_dtype.scales.tobytes() == from_float32.scales.tobytes()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_quantise_refuses_values_that_are_not_finite(bad):
    matrix = np.zeros((300, 4), np.float32)
    matrix[140, 2] = bad
    with pytest.raises(ValueError, match="rows 128 to 255 hold a value that is not finite"):
        quantise_blocks(matrix)


def test_every_scale_survives_a_second_division():
    # Every mantissa: the largest value of a block is one of them times a power of two, which
    # changes no rounding.
    largest = (np.arange(2**23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    scales = largest / np.float32(448)
    assert (scales * np.float32(448) / np.float32(448) == scales).all()


@pytest.mark.parametrize("magnitude", [1e-42, 1e-6, 1.0, 1e30])
def test_quantising_dequantised_values_gives_the_same_bytes(magnitude):
    rng = np.random.default_rng(1)
    spread = np.exp(3 * rng.standard_normal((300, 260)))
    matrix = (rng.standard_normal((300, 260)) * spread * magnitude).astype(np.float32)
    first = quantise_blocks(matrix)
    again = quantise_blocks(dequantise_rows(*first))
    assert first.scales.tobytes() == again.scales.tobytes()
    assert first.values.tobytes() == again.values.tobytes()
