"""Weights of a layer's experts, read where they lie."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import BlockScaled


class ExpertWeights(NamedTuple):
    """Two stacks of matrices, of one layer or of all layers and which of them is meant.

    A layer's part of a stack of layers is 9.7 GB at GLM-5.3's size: cut out, it would be copied.
    In block FP8 matrices are ``[outputs, inputs]``: ``[*layers, E, F, D]`` and
    ``[*layers, E, D, Y]``.

    Attributes:
        gate_up: gate columns first, then up columns (F = 2 Y); in block FP8 rows, and Y is a
            multiple of its block.
        down: projection back to the model width, in block FP8 where ``gate_up`` is.
        layer: which of the layers; None where the weights are one layer's.
    """

    gate_up: Float[Array, "*layers E D F"] | BlockScaled
    down: Float[Array, "*layers E Y D"] | BlockScaled
    layer: int | Int[Array, ""] | None = None

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return jax.tree.leaves(self.gate_up)[0].shape[-3]

    @property
    def width(self) -> int:
        """Width Y of one expert."""
        if isinstance(self.down, BlockScaled):
            return self.down.values.shape[-1]
        return self.down.shape[-2]

    @property
    def first(self) -> int | Int[Array, ""]:
        """The layer's first expert in ``flat``."""
        return 0 if self.layer is None else self.layer * self.experts

    @property
    def flat(
        self,
    ) -> tuple[Float[Array, "LE D F"] | BlockScaled, Float[Array, "LE Y D"] | BlockScaled]:
        """Both stacks with one axis for experts of all layers."""
        return jax.tree.map(
            lambda array: array.reshape(-1, *array.shape[-2:]), (self.gate_up, self.down)
        )
