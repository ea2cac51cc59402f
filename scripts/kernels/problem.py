"""One call of an operator: its arguments, its work, and how wrong an answer is."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import find
from pallas_kernels.expert_matmul import ExpertWeights
from pallas_kernels.pool import PagedPool


class Problem(Protocol):
    """A call.

    Attributes:
        operator: folder in ``pallas_kernels``.
    """

    operator: ClassVar[str]

    @property
    def function(self) -> str:
        """The operator's function."""
        ...

    @property
    def name(self) -> str:
        """What tells the problem from the operator's others."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the function."""
        ...

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products; a row counts what it may see."""
        ...

    @property
    def bytes(self) -> int:
        """What has to be read and written if everything is read once."""
        ...

    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments; the same at every call. Meant to be traced."""
        ...

    def error(self, inputs: tuple[Any, ...], outputs: Any) -> Float[Array, ""]:
        """How far outputs are from the reference's, relative to its largest; infinite if absurd.

        Meant to be traced.
        """
        ...


def implementation_of(problem: Problem, name: str) -> Callable[..., Any]:
    """The function that takes the problem's inputs."""
    run = find(problem.operator, problem.function, name)
    return functools.partial(run, **problem.settings)


def shapes_of(problem: Problem, sharding: jax.sharding.Sharding | None = None) -> tuple[Any, ...]:
    """``jax.ShapeDtypeStruct`` in place of the arrays of ``inputs``."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(problem.inputs),
    )


def of_layer(inputs: tuple[Any, ...], layer: Any) -> tuple[Any, ...]:
    """The same inputs with another plane of the cache and another layer's weights."""

    def chosen(argument: Any) -> Any:
        if isinstance(argument, PagedPool):
            return dataclasses.replace(argument, plane=layer % argument.array.shape[0])
        if isinstance(argument, ExpertWeights):
            return argument._replace(layer=layer % jax.tree.leaves(argument.down)[0].shape[0])
        return argument

    return tuple(map(chosen, inputs))


def relative_error(wanted: Float[Array, "*shape"], given: Float[Array, "*shape"]) -> Array:
    """The largest difference over the largest wanted value; infinite if any is not finite."""
    difference = jnp.abs(wanted - given.astype(jnp.float32))
    # Or NaN would be lost: XLA's maximum on a CPU ignores it.
    difference = jnp.where(jnp.isfinite(difference), difference, jnp.inf)
    return jnp.max(difference) / jnp.max(jnp.abs(wanted))
