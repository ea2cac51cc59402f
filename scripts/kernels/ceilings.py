"""What the device can do, measured: one large matrix product, one large copy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Num

from scripts.kernels.timing import measure, repeat


class _Sizes(NamedTuple):
    """Of a device: rows and columns of a square matrix, its dtype, 32-bit words of a copy."""

    matrix: int
    dtype: str
    words: int


# A copy beyond every cache; a product whose operands are read once for thousands of operations.
_SIZES = {
    "gpu": _Sizes(8192, "bfloat16", 1 << 29),
    "cpu": _Sizes(1024, "float32", 1 << 25),
}
# Of either per program; what a program does once, a copy of its first input, is a small part.
_TURNS = 16


class Ceilings(NamedTuple):
    """Floating-point operations and bytes, read or written, per second."""

    flops: float
    bytes: float


def measure_ceilings(platform: str, rounds: int) -> Ceilings:
    """The faster rounds of several: what slows a device down does not lower its ceiling."""
    size = _SIZES[platform]
    # Random: a GPU multiplies equal numbers with less power, so at a higher clock.
    square = jax.random.normal(jax.random.key(0), (size.matrix, size.matrix), size.dtype)
    words = jnp.zeros(size.words, jnp.int32)
    multiplied = _fast(_multiply, (square, square), rounds)
    copied = _fast(_copy, (words,), rounds)
    return Ceilings(2 * size.matrix**3 / multiplied, 2 * words.nbytes / copied)


def _fast(call: Callable[..., Any], inputs: tuple[Any, ...], rounds: int) -> float:
    """Seconds of a call in the faster rounds."""
    return measure({"": repeat(call, inputs, _TURNS)}, inputs, rounds)[""].low


def _multiply(left: Num[Array, "n n"], right: Num[Array, "n n"]) -> Num[Array, "n n"]:
    return left @ right


def _copy(words: Num[Array, " n"]) -> Num[Array, " n"]:
    """With an addition: XLA would leave out a copy."""
    return words + 1
