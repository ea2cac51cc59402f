"""Weights of a layer's experts, read where they lie."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class ExpertWeights(NamedTuple):
    """Two stacks of matrices, of one layer or of all layers and which of them is meant.

    A layer's part of a stack of layers is 9.7 GB at GLM-5.3's size: cut out, it would be copied.

    Attributes:
        gate_up: gate columns first, then up columns (F = 2 Y).
        down: projection back to the model width.
        layer: which of the layers; None where the weights are one layer's.
    """

    gate_up: Float[Array, "*layers E D F"]
    down: Float[Array, "*layers E Y D"]
    layer: int | Int[Array, ""] | None = None

    @property
    def experts(self) -> int:
        """Experts of the layer."""
        return self.gate_up.shape[-3]

    @property
    def width(self) -> int:
        """Width Y of one expert."""
        return self.down.shape[-2]

    @property
    def first(self) -> int | Int[Array, ""]:
        """The layer's first expert in ``flat``."""
        return 0 if self.layer is None else self.layer * self.experts

    @property
    def flat(self) -> tuple[Float[Array, "LE D F"], Float[Array, "LE Y D"]]:
        """Both stacks with one axis for experts of all layers."""
        gate_up, down = self.gate_up, self.down
        return gate_up.reshape(-1, *gate_up.shape[-2:]), down.reshape(-1, *down.shape[-2:])
