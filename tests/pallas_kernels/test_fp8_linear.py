"""Products with block-FP8 matrices, and e4m3 bits as numbers; all of it is one XLA program."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8 import BlockScaled, e4m3_to_float32
from pallas_kernels.fp8.product import STRIP_VALUES
from pallas_kernels.fp8_linear import fp8_linear

FP8 = ml_dtypes.float8_e4m3fn
LAYERS, LAYER, ROWS = 3, 1, 5
# Outputs and inputs: partial blocks; one whole block; two strips and a rest of the outputs.
SHAPES = {"partial": (200, 96), "whole": (128, 128), "strips": (700, 2048)}
IMPLEMENTATIONS = ("reference", "xla")


class Problem:
    def __init__(self, outputs, inputs):
        rng = np.random.default_rng(outputs)
        stack = LAYERS, outputs, inputs
        blocks = LAYERS, -(-outputs // 128), -(-inputs // 128)
        values = rng.uniform(-448, 448, stack).astype(FP8)
        # Any float32 is a scale: negative, zero, far from one, no power of two.
        scales = rng.standard_normal(blocks, np.float32) * 10.0 ** rng.integers(-9, 9, blocks)
        scales[:, 0, -1] = 0.0
        self.weight = BlockScaled(values, scales.astype(np.float32))
        self.x = rng.standard_normal((ROWS, inputs), np.float32)

    def one(self):
        return jax.tree.map(lambda array: array[LAYER], self.weight)

    def product(self):
        """In float64, and the size of what was added up."""
        values, scales = self.one()
        outputs, inputs = values.shape
        spread = np.kron(scales.astype(np.float64), np.ones((128, 128)))[:outputs, :inputs]
        matrix = values.astype(np.float64) * spread
        return self.x @ matrix.T, np.abs(self.x) @ np.abs(matrix.T)


PROBLEMS = {name: Problem(*shape) for name, shape in SHAPES.items()}
BITS = np.arange(256, dtype=np.uint8)


@functools.cache
def results():
    def program(problems, bits):
        products = {}
        for name, (x, stack, one, layer) in problems.items():
            for implementation in IMPLEMENTATIONS:
                run = functools.partial(fp8_linear, implementation=implementation)
                products[name, implementation] = {
                    "one": run(x, one),
                    "stack": run(x, stack, LAYER),
                    "traced": run(x, stack, layer),
                    "bfloat16": run(x.astype("bfloat16"), one),
                }
        return products, e4m3_to_float32(bits)

    arguments = {name: (p.x, p.weight, p.one(), LAYER) for name, p in PROBLEMS.items()}
    return jax.device_get(jax.jit(program)(arguments, BITS))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_fp8_linear_equals_a_float64_product(name, implementation):
    product, size = PROBLEMS[name].product()
    found = results()[0][name, implementation]["one"]
    assert found.dtype == np.float32
    assert (np.abs(found - product) <= 1e-5 * size).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_fp8_linear_reads_a_layer_of_a_stack(name, implementation):
    found = results()[0][name, implementation]
    np.testing.assert_array_equal(found["stack"], found["one"])
    np.testing.assert_array_equal(found["traced"], found["one"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_fp8_linear_gives_bfloat16_rows_their_dtype(implementation):
    found = results()[0]["partial", implementation]["bfloat16"]
    assert found.dtype == ml_dtypes.bfloat16
    product, size = PROBLEMS["partial"].product()
    assert (np.abs(found.astype(np.float64) - product) <= 0.01 * size).all()


def test_the_largest_case_is_cut_into_strips_and_a_rest():
    outputs, inputs = SHAPES["strips"]
    assert outputs * inputs > 2 * STRIP_VALUES
    assert outputs % (STRIP_VALUES // inputs) > 0


def test_e4m3_bits_are_the_numbers_that_the_type_has():
    wanted = BITS.view(FP8).astype(np.float32)
    found = results()[1]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(wanted))


def test_fp8_linear_copies_no_stack():
    values = jax.ShapeDtypeStruct((64, 512, 2048), FP8)
    weight = BlockScaled(values, jax.ShapeDtypeStruct((64, 4, 16), np.float32))
    x = jax.ShapeDtypeStruct((2, 2048), np.float32)
    run = functools.partial(fp8_linear, implementation="xla")
    lowered = jax.jit(run).lower(x, weight, jax.ShapeDtypeStruct((), np.int32))
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    # One strip in float32, and not the 64 MB of the stack.
    assert temporaries < 2 * 4 * STRIP_VALUES
