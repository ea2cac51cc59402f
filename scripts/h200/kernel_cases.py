"""Calls of the GPU kernels at the shapes of GLM-5.3 and of the embedded model."""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.expert_matmul import ExpertWeights
from pallas_kernels.formats import format_of
from pallas_kernels.pool import PagedPool

# Of the pool and its pages: enough that 32-bit arithmetic on bytes would overflow.
PLANES, PAGES, PAGE_SIZE = 20, 4097, 64
# Of the stack of expert weights, for the same reason.
LAYERS = 6

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
        flops: multiplications and additions of the matrix products, with every row at its longest.
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
    """All cases."""
    formats = ("bfloat16", "fp8_planar", "float32")
    return [
        *(_index("decode", 32, 6, 32, 512, 2048, keys) for keys in formats),
        _index("decode", 1, 1, 32, 2048, 2048, "fp8_planar"),
        _index("decode", 8, 1, 16, 64, 256, "bfloat16"),
        _index("decode", 8, 6, 16, 64, 256, "bfloat16"),
        # Prompt rows are tiles of 64: 1024 rows, and 8192 rows against 128K keys.
        _index("decode", 16, 64, 32, 512, 2048, "bfloat16"),
        _index("decode", 128, 64, 32, 2048, 2048, "bfloat16"),
        *(_attend(192, 64, 2048, entry) for entry in ("bfloat16", "fp8_ds_mla", "float32")),
        _attend(6, 64, 2048, "bfloat16"),
        _attend(8, 8, 256, "bfloat16"),
        _experts(192, 256, 8, 6144, 2048),
        _experts(704, 256, 8, 6144, 2048),
        _experts(192, 8, 2, 192, 128),
    ]


def _index(
    segment: str, tiles: int, rows: int, heads: int, pages: int, topk: int, keys: str
) -> KernelCase:
    """index_topk of either segment, over ``pages`` pages a request; 128 values a key."""

    def arguments(shape: Shape) -> tuple[Any, ...]:
        return (
            shape((tiles, rows, heads, 128), jnp.float32),
            shape((tiles, rows, heads), jnp.float32),
            shape((tiles, rows), jnp.int32),
            shape((tiles, pages), jnp.int32),
            _pool(shape, keys, 128),
        )

    return KernelCase(
        operator="index_topk",
        name=f"{segment} {tiles}x{rows} rows, {heads} heads, {pages * PAGE_SIZE} keys {keys}",
        function=f"index_topk_{segment}",
        arguments=arguments,
        settings={"topk": topk},
        flops=2 * tiles * rows * heads * 128 * pages * PAGE_SIZE,
    )


def _attend(rows: int, heads: int, topk: int, entry: str) -> KernelCase:
    """sparse_mla over ``topk`` entries of 512 + 64 values."""

    def arguments(shape: Shape) -> tuple[Any, ...]:
        return (
            shape((rows, heads, 512), jnp.float32),
            shape((rows, heads, 64), jnp.float32),
            shape((rows, topk), jnp.int32),
            shape((rows,), jnp.int32),
            _pool(shape, entry, 576),
        )

    return KernelCase(
        operator="sparse_mla",
        name=f"decode {rows} rows, {heads} heads, {topk} entries {entry}",
        function="sparse_mla_decode",
        arguments=arguments,
        settings={"scale": 256**-0.5},
        flops=2 * rows * heads * topk * (576 + 512),
    )


def _experts(rows: int, experts: int, choices: int, model: int, width: int) -> KernelCase:
    """expert_matmul in bfloat16."""

    def arguments(shape: Shape) -> tuple[Any, ...]:
        return (
            shape((rows, model), jnp.bfloat16),
            shape((rows, choices), jnp.int32),
            shape((rows, choices), jnp.float32),
            ExpertWeights(
                shape((LAYERS, experts, model, 2 * width), jnp.bfloat16),
                shape((LAYERS, experts, width, model), jnp.bfloat16),
                shape((), jnp.int32),
            ),
        )

    return KernelCase(
        operator="expert_matmul",
        name=f"{rows} rows, {choices} of {experts} experts, {model} x {width}",
        function="expert_matmul",
        arguments=arguments,
        settings={},
        flops=2 * rows * choices * 3 * model * width,
    )


def _pool(shape: Shape, storage_format: str, width: int) -> PagedPool:
    stored = format_of(storage_format)
    dimensions = (PLANES, PAGES, PAGE_SIZE, stored.entry_size(width))
    return PagedPool(shape(dimensions, stored.storage), shape((), jnp.int32), storage_format)
