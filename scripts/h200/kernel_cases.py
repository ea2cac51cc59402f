"""Calls of the GPU kernels at the shapes of GLM-5.3 and of the embedded model."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import BLOCK, BlockScaled
from scripts.kernels.cases import problems_of
from scripts.kernels.expert_matmul import ExpertMatmul
from scripts.kernels.problem import Problem, shapes_of

# Of the stack of expert weights: more than a device has room for, so that no copy goes unseen.
LAYERS = 6

_EXPERTS = (
    *(
        ExpertMatmul(rows, 256, 8, 6144, 2048, weights, LAYERS)
        for weights in ("bfloat16", "fp8")
        for rows in (192, 704)
    ),
    *(ExpertMatmul(192, 8, 2, 192, 128, weights, LAYERS) for weights in ("bfloat16", "fp8")),
    # A prompt's rows: full tiles.
    ExpertMatmul(8192, 256, 8, 6144, 2048, "fp8", LAYERS),
)
# Rows, outputs, inputs: GLM-5.3's key and value latents, its largest projection for decoded and
# for prompt rows, one row by it, and the embedded model's queries: partial blocks.
_LINEARS = (
    *((192, 576, 6144), (192, 6144, 16384), (704, 6144, 16384), (1, 6144, 16384)),
    *((192, 96, 192), (192, 768, 96)),
)

# Makes a ``jax.ShapeDtypeStruct`` that stands for an array.
Shape = Callable[[tuple[int, ...], Any], Any]


class KernelCase(NamedTuple):
    """One call.

    Attributes:
        operator: folder in ``pallas_kernels``.
        name: what tells it from the operator's other cases.
        function: name of the function in the operator's ``mosaic_gpu``.
        arguments: shapes of the positional arguments, made by ``Shape``.
        settings: keyword arguments.
        flops: multiplications and additions of the matrix products.
    """

    operator: str
    name: str
    function: str
    arguments: Callable[[Shape], tuple[Any, ...]]
    settings: dict[str, Any]
    flops: int

    def lower(self, sharding: jax.sharding.Sharding) -> jax.stages.Lowered:
        """Trace and lower for the device of ``sharding``."""
        module = importlib.import_module(f"pallas_kernels.{self.operator}.mosaic_gpu")
        function = getattr(module, self.function)

        def shape(dimensions: tuple[int, ...], dtype: Any) -> Any:
            return jax.ShapeDtypeStruct(dimensions, dtype, sharding=sharding)

        def call(*arguments: Any) -> Any:
            return function(*arguments, **self.settings)

        return jax.jit(call).lower(*self.arguments(shape))


def kernel_cases() -> list[KernelCase]:
    """All cases: what bench_kernels times, experts in a taller stack."""
    return [
        *(_timed(problem) for problem in problems_of("gpu") if problem.operator != "expert_matmul"),
        *map(_timed, _EXPERTS),
        *(_linear(*sizes) for sizes in _LINEARS),
    ]


def _timed(problem: Problem) -> KernelCase:
    """A problem of bench_kernels."""

    def arguments(shape: Shape) -> tuple[Any, ...]:
        return jax.tree.map(lambda leaf: shape(leaf.shape, leaf.dtype), shapes_of(problem))

    return KernelCase(
        operator=problem.operator,
        name=problem.name,
        function=problem.function,
        arguments=arguments,
        settings=problem.settings,
        flops=problem.flops,
    )


def _linear(rows: int, outputs: int, inputs: int) -> KernelCase:
    """fp8_linear with a matrix out of a stack."""

    def arguments(shape: Shape) -> tuple[Any, ...]:
        return (
            shape((rows, inputs), jnp.bfloat16),
            _block_scaled(shape, (LAYERS,), outputs, inputs),
            shape((), jnp.int32),
        )

    return KernelCase(
        operator="fp8_linear",
        name=f"{rows} rows, {inputs} x {outputs}",
        function="fp8_linear",
        arguments=arguments,
        settings={},
        flops=2 * rows * outputs * inputs,
    )


def _block_scaled(shape: Shape, stack: tuple[int, ...], outputs: int, inputs: int) -> BlockScaled:
    return BlockScaled(
        shape((*stack, outputs, inputs), jnp.float8_e4m3fn),
        shape((*stack, -(-outputs // BLOCK), -(-inputs // BLOCK)), jnp.float32),
    )
