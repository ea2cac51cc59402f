"""One matrix of a layer, plain or in block FP8, and how rows are multiplied by it."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.fp8 import BlockScaled
from pallas_kernels.fp8_linear import fp8_linear


class Linear(nnx.Module):
    """A matrix, or one of a stack of them.

    Attributes:
        weight: plain ``[in, out]``, cast to the rows' dtype on use; or ``BlockScaled``
            ``[out, in]``.
        layer: which of a block-FP8 stack with the layers in front; None where it is one matrix.
    """

    def __init__(self, weight: Any, layer: int | Int[Array, ""] | None = None) -> None:
        """Wrap a matrix, or its shapes."""
        self.weight = nnx.Param(weight)
        self.layer = layer

    def __call__(self, x: Float[Array, "N in"], kernels: str | None) -> Float[Array, "N out"]:
        """``x W`` in the rows' dtype; ``kernels`` is the implementation for block FP8."""
        weight = self.weight.get_value()
        if isinstance(weight, BlockScaled):
            return fp8_linear(x, weight, self.layer, implementation=kernels)
        return x @ weight.astype(x.dtype)

    def of_layer(self, index: int | Int[Array, ""]) -> "Linear":
        """One layer's matrix out of a stack; in block FP8 it stays there, to be read in place."""
        weight = self.weight.get_value()
        return Linear(weight, index) if isinstance(weight, BlockScaled) else Linear(weight[index])


def module_of_layer(stack: Any, index: int | Int[Array, ""]) -> Any:
    """One layer's module out of a module whose leaves have the layers in front."""

    def cut(node: Any) -> Any:
        return node.of_layer(index) if isinstance(node, Linear) else node[index]

    return jax.tree.map(cut, stack, is_leaf=lambda node: isinstance(node, Linear))
