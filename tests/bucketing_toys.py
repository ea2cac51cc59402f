"""Toy step programs, and the folder of stored ones that a fake compile worker hands out."""

import jax
import jax.numpy as jnp
import numpy as np

from bucketing.cell import Cell
from bucketing.programs import compile_program

CELL = Cell(4, 0, 1)
OTHER = Cell(3, 0, 1)
FINGERPRINT = "ab" * 32


def toy_step(weights, cache, rows):
    """Updates a donated cache in place, as a step does."""
    cache = cache.at[1].add(jnp.tanh(rows @ weights).sum(0))
    return cache, jnp.sin(cache[:2]) + rows.sum()


def lower(key):
    """The toy step with one row per prefill row of the cell."""
    cache = jax.ShapeDtypeStruct((3, 5), np.float32)
    shapes = [jax.ShapeDtypeStruct((7, 5), np.float32), cache]
    rows = jax.ShapeDtypeStruct((key[0] if isinstance(key, Cell) else key.rows, 7), np.float32)
    return jax.jit(toy_step, donate_argnums=(1,)).lower(*shapes, rows)


def run(program, rows=CELL.prefill):
    """The outputs' bytes, and whether the cache stayed where it was."""
    rng = np.random.default_rng(0)
    weights, cache = (rng.standard_normal(shape, dtype=np.float32) for shape in ((7, 5), (3, 5)))
    inputs = rng.standard_normal((rows, 7), dtype=np.float32)
    # The second step's cache is the device's own; one that came from NumPy may be NumPy's memory.
    cache, _ = program(weights, jax.device_put(cache), inputs)
    before = cache.unsafe_buffer_pointer()
    updated, out = program(weights, cache, inputs)
    in_place = cache.is_deleted() and updated.unsafe_buffer_pointer() == before
    return np.asarray(updated).tobytes() + np.asarray(out).tobytes(), in_place


_COMPILED = {}


def compiled(key=CELL):
    """A program and its report, compiled once for all tests."""
    if key not in _COMPILED:
        _COMPILED[key] = compile_program(lower, key)
    return _COMPILED[key]


def forget(key):
    """Compile it again when it is asked for next."""
    _COMPILED.pop(key, None)
