"""expert_matmul with rows that choose their experts independently of each other."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.expert_matmul import ExpertWeights, reference
from pallas_kernels.fp8 import BLOCK, BlockScaled
from scripts.kernels.problem import relative_error

_EXPERTS_AT_ONCE = 32


@dataclass(frozen=True)
class ExpertMatmul:
    """One call.

    Attributes:
        rows: of the step.
        experts: of a layer.
        choices: experts per row.
        model: width of a row.
        width: of an expert.
        weights: dtype of weights and rows; "fp8" is block FP8, with rows in bfloat16.
        layers: in the stack; the inputs' layer is the last, the furthest in memory.
    """

    rows: int
    experts: int
    choices: int
    model: int
    width: int
    weights: str
    layers: int

    operator: ClassVar[str] = "expert_matmul"

    @property
    def function(self) -> str:
        """Called like the operator."""
        return self.operator

    @property
    def name(self) -> str:
        """Sizes."""
        size = f"{self.model} x {self.width} {self.weights}"
        return f"{self.rows} rows, {self.choices} of {self.experts} experts, {size}"

    @property
    def settings(self) -> dict[str, Any]:
        """None."""
        return {}

    @property
    def flops(self) -> int:
        """Three matrices of an expert per choice."""
        return 2 * self.rows * self.choices * 3 * self.model * self.width

    @property
    def bytes(self) -> int:
        """Weights of the experts that got a row, rows, choices, gates, results."""
        used = np.unique(self.chosen()).size
        matrices = self._matrix_bytes(2 * self.width, self.model)
        matrices += self._matrix_bytes(self.model, self.width)
        rows = self.rows * (self.model * (self._rows_dtype.itemsize + 4) + self.choices * 8)
        return used * matrices + rows

    def chosen(self) -> Int[np.ndarray, "N X"]:
        """Experts of each row: all sets equally likely, loads as uneven as chance makes them."""
        scores = np.random.default_rng(0).random((self.rows, self.experts))
        return np.argsort(scores, axis=1)[:, : self.choices].astype(np.int32)

    def inputs(self) -> tuple[Any, ...]:
        """Rows, experts, gates, weights (see ``Problem``)."""
        keys = jax.random.split(jax.random.key(0), 4)
        weights = ExpertWeights(
            self._stack(keys[0], 2 * self.width, self.model),
            self._stack(keys[1], self.model, self.width),
            jnp.int32(self.layers - 1),
        )
        gates = jax.random.uniform(keys[2], (self.rows, self.choices))
        rows = jax.random.normal(keys[3], (self.rows, self.model), self._rows_dtype)
        return rows, jnp.asarray(self.chosen()), gates, weights

    def error(self, inputs: tuple[Any, ...], outputs: Any) -> Float[Array, ""]:
        """Against the reference with the same weights, a few experts at a time.

        It dequantises all the experts that it gets, and multiplies every row by each.
        """
        rows, experts, gates, weights = inputs
        few = math.gcd(self.experts, _EXPERTS_AT_ONCE)

        def part(first: Int[Array, ""]) -> Float[Array, "N D"]:
            def cut(stack: Array) -> Array:
                start = weights.layer, first, *(0,) * (stack.ndim - 2)
                return jax.lax.dynamic_slice(stack, start, (1, few, *stack.shape[2:]))[0]

            place = experts - first
            own = jnp.where((place >= 0) & (place < few), place, few)
            matrices = jax.tree.map(cut, (weights.gate_up, weights.down))
            return reference.expert_matmul(rows, own, gates, ExpertWeights(*matrices))

        wanted = jnp.sum(jax.lax.map(part, jnp.arange(0, self.experts, few)), axis=0)
        return relative_error(wanted, outputs)

    @property
    def _rows_dtype(self) -> np.dtype:
        return jnp.dtype("bfloat16" if self.weights == "fp8" else self.weights)

    def _matrix_bytes(self, outputs: int, inputs: int) -> int:
        if self.weights != "fp8":
            return outputs * inputs * self._rows_dtype.itemsize
        return outputs * inputs + 4 * -(-outputs // BLOCK) * -(-inputs // BLOCK)

    def _stack(self, key: Array, outputs: int, inputs: int) -> Array | BlockScaled:
        """Matrices of all layers' experts, that keep the size of a row's values."""
        size = inputs**-0.5

        def layer(key: Array) -> Array | BlockScaled:
            if self.weights != "fp8":
                return size * jax.random.normal(key, (self.experts, inputs, outputs), self.weights)
            numbers, spread = jax.random.split(key)
            values = jax.random.normal(numbers, (self.experts, outputs, inputs), jnp.bfloat16)
            blocks = self.experts, -(-outputs // BLOCK), -(-inputs // BLOCK)
            scales = size * jax.random.uniform(spread, blocks, minval=0.5, maxval=2.0)
            return BlockScaled(values.astype(jnp.float8_e4m3fn), scales)

        return jax.lax.map(layer, jax.random.split(key, self.layers))
