"""expert_matmul for Hopper: two grouped matrix products over rows sorted by expert.

XLA gathers the rows so that each expert's stand together (``placement``). One kernel computes
``silu(x G) * (x U)`` with gate and up tiles side by side, a second multiplies by the
down-projection, and XLA sums each row's choices. Thread blocks stay and take tiles in turn; the
experts' weights are read where they lie, by expert and layer number, and an expert without rows
costs nothing. Products are bfloat16 with float32 sums, results of the experts bfloat16. Weights in
block FP8 go through kernels of their own (``fp8_product``), which read half the bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.expert_matmul.config import (
    BY_RULE,
    DEPTH,
    ROW_GROUP,
    TILE_ROWS,
    Cut,
    Tile,
    fp8_tile_size,
    tile_for,
)
from pallas_kernels.expert_matmul.placement import Placement, place_rows
from pallas_kernels.expert_matmul.weights import ExpertWeights
from pallas_kernels.fp8 import BLOCK, BlockScaled
from pallas_kernels.mosaic import bridge
from pallas_kernels.mosaic.e4m3_weights import permute_columns
from pallas_kernels.mosaic.fp8_product import Product, Tiles, fp8_product, plain_product
from pallas_kernels.mosaic.hopper import MULTIPROCESSORS

_SWIZZLED = (plgpu.TilingTransform((ROW_GROUP, DEPTH)), plgpu.SwizzleTransform(128))


def expert_matmul(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    gates: Float[Array, "N X"],
    weights: ExpertWeights,
    *,
    cut: Cut = BY_RULE,
    interpret: bool = False,
) -> Float[Array, "N D"]:
    """Route rows through their experts and combine (see ``api``).

    Args:
        x: input rows, rounded to bfloat16.
        experts: chosen experts per row, E = dropped.
        gates: combination weights.
        weights: bfloat16 or block FP8, of one layer or of all of them; read in place.
        cut: how the kernels cut their work.
        interpret: run in Mosaic's interpreter, on the CPU.

    Raises:
        ValueError: for weights of another type, or widths that no tile divides.
    """
    if isinstance(weights.gate_up, BlockScaled):
        results, placement = _through_fp8(x, experts, weights, cut, interpret=interpret)
    else:
        results, placement = _through_bfloat16(x, experts, weights, cut, interpret=interpret)
    return _combined(results, placement.place, experts < weights.experts, gates)


def _through_bfloat16(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    weights: ExpertWeights,
    cut: Cut,
    *,
    interpret: bool,
) -> tuple[BFloat16[Array, "P D"], Placement]:
    gate_up, down = _bfloat16_matrices(x, weights)
    width, first = weights.width, jnp.asarray(weights.first, jnp.int32).reshape(1)
    placement = place_rows(experts, weights.experts, TILE_ROWS)
    sorted_rows = x.astype(jnp.bfloat16)[placement.row]
    hidden = _grouped_matmul(
        _Product("expert_gate_up", (0, width), width, _swiglu, tile_for(width, 2, cut), interpret),
        (first, placement, sorted_rows, gate_up),
    )
    results = _grouped_matmul(
        _Product("expert_down", (0,), x.shape[1], _same, tile_for(x.shape[1], 1, cut), interpret),
        (first, placement, hidden, down),
    )
    return results, placement


def _through_fp8(
    x: Float[Array, "N D"],
    experts: Int[Array, "N X"],
    weights: ExpertWeights,
    cut: Cut,
    *,
    interpret: bool,
) -> tuple[BFloat16[Array, "P D"], Placement]:
    gate_up, down = _fp8_matrices(x, weights)
    width, first = weights.width, jnp.asarray(weights.first, jnp.int32).reshape(1)
    size = fp8_tile_size(experts.size, weights.experts, cut)
    placement = place_rows(experts, weights.experts, size)
    tiles = Tiles(placement.tile_expert, placement.tile_start, placement.tile_rows, placement.used)
    gated = Product(
        "expert_gate_up_fp8",
        blocks=(0, width),
        advance=BLOCK,
        across=width // BLOCK,
        size=size,
        join=_swiglu,
        ordered=True,
        interpret=interpret,
    )
    sorted_rows = permute_columns(x.astype(jnp.bfloat16))[placement.row]
    (hidden,) = fp8_product(gated, tiles, sorted_rows, (first, gate_up))
    back = plain_product("expert_down_fp8", x.shape[1], size, interpret=interpret)
    (results,) = fp8_product(back, tiles, hidden, (first, down))
    return results[:, : x.shape[1]], placement


def _bfloat16_matrices(x: Array, weights: ExpertWeights) -> tuple[Array, Array]:
    gate_up, down = weights.flat
    if isinstance(gate_up, BlockScaled) or isinstance(down, BlockScaled):
        raise _unlike(gate_up, down)
    if gate_up.dtype != jnp.bfloat16 or down.dtype != jnp.bfloat16:
        raise _unlike(gate_up, down)
    for name, depth in (("model", x.shape[1]), ("expert", weights.width)):
        if depth % DEPTH:
            raise ValueError(
                f"expert_matmul's GPU kernel got {name} width {depth}; it must be a multiple of "
                f'{DEPTH}. Use implementation="xla".'
            )
    return gate_up, down


def _fp8_matrices(x: Array, weights: ExpertWeights) -> tuple[BlockScaled, BlockScaled]:
    gate_up, down = weights.flat
    if not isinstance(gate_up, BlockScaled) or not isinstance(down, BlockScaled):
        raise _unlike(gate_up, down)
    # The copy engine's unit, and no block of scales may hold both gate and up.
    for name, width, unit in (("model", x.shape[1], 16), ("expert", weights.width, BLOCK)):
        if width % unit:
            raise ValueError(
                f"expert_matmul's GPU kernel got {name} width {width} with block-FP8 weights; it "
                f'must be a multiple of {unit}. Load the model with weight_dtype="bfloat16" or '
                'use implementation="xla".'
            )
    return gate_up, down


def _unlike(gate_up: Array | BlockScaled, down: Array | BlockScaled) -> ValueError:
    names = [
        "block FP8" if isinstance(matrix, BlockScaled) else str(matrix.dtype)
        for matrix in (gate_up, down)
    ]
    return ValueError(
        f"expert_matmul's GPU kernel got weights of {names[0]} and {names[1]}; it multiplies "
        'bfloat16 or block FP8, not both in one layer. Load the model with weight_dtype="bfloat16" '
        'or "fp8", or use implementation="xla".'
    )


def _combined(
    results: BFloat16[Array, "P D"],
    place: Int[Array, "N X"],
    kept: Array,
    gates: Float[Array, "N X"],
) -> Float[Array, "N D"]:
    """Sum over the choices in float32, in their order; a dropped choice's gate may be NaN."""
    total = jnp.zeros((place.shape[0], results.shape[1]), jnp.float32)
    for choice in range(place.shape[1]):
        chosen = results.at[place[:, choice]].get(mode="clip").astype(jnp.float32)
        weighted = chosen * gates[:, choice, None]
        total += jnp.where(kept[:, choice, None], weighted, 0.0)
    return total


class _Product(NamedTuple):
    """Static facts of one grouped product.

    Attributes:
        name: of the kernel.
        parts: first columns of the weights that make one column of the result.
        columns: of the result.
        finish: the parts' float32 tiles to the result's.
        tile: its size.
        interpret: run in the interpreter.
    """

    name: str
    parts: tuple[int, ...]
    columns: int
    finish: Callable[..., Array]
    tile: Tile
    interpret: bool


class _Work(NamedTuple):
    """References in global memory, and one piece of shared memory."""

    first: Any  # [1] int32, the layer's first expert
    used: Any  # [1] int32
    tile_expert: Any  # [tiles] int32
    tile_start: Any  # [tiles] int32
    tile_rows: Any  # [tiles] int32
    rows: Any  # [P, depth] bfloat16
    weights: Any  # [L * E, depth, len(parts) * columns] bfloat16
    results: Any  # [P, columns] bfloat16
    staged: Any  # [TILE_ROWS, tile.columns] bfloat16, shared memory


def _grouped_matmul(
    product: _Product, operands: tuple[Array, Placement, Array, Array]
) -> BFloat16[Array, "P columns"]:
    first, placement, rows, weights = operands

    def body(*references: Any) -> None:
        _take_tiles(product, _Work(*references))

    kernel = bridge.kernel(
        body,
        name=product.name,
        out_type=jax.ShapeDtypeStruct((rows.shape[0], product.columns), jnp.bfloat16),
        # Few in the interpreter, so that each takes several tiles.
        grid=(2 if product.interpret else MULTIPROCESSORS,),
        grid_names=("multiprocessor",),
        scratch_types=[
            plgpu.SMEM((TILE_ROWS, product.tile.columns), jnp.bfloat16, transforms=_SWIZZLED)
        ],
        interpret=product.interpret,
    )
    return kernel(
        first,
        placement.used,
        placement.tile_expert,
        placement.tile_start,
        placement.tile_rows,
        rows,
        weights,
    )


def _take_tiles(product: _Product, work: _Work) -> None:
    """One thread block: every so manyth tile of the result, columns fastest.

    Neighbours then share the rows' tile and, where an expert has several, its weights, in L2.
    """
    blocks = lax.axis_size("multiprocessor")
    mine = lax.axis_index("multiprocessor")
    across = product.columns // product.tile.columns
    items = work.used[0] * across
    turns = lax.div(items - mine + (blocks - 1), jnp.int32(blocks))

    def take(turn: Int[Array, ""], carry: tuple[()]) -> tuple[()]:
        item = mine + turn * blocks
        _compute_tile(product, work, lax.div(item, across), lax.rem(item, across))
        return carry

    lax.fori_loop(0, turns, take, ())
    plgpu.wait_smem_to_gmem(0)


def _compute_tile(
    product: _Product, work: _Work, tile: Int[Array, ""], column: Int[Array, ""]
) -> None:
    size = product.tile.columns
    start, live = pl.multiple_of(work.tile_start[tile], ROW_GROUP), work.tile_rows[tile]
    weights = work.weights.at[work.first[0] + work.tile_expert[tile]]
    depth = work.rows.shape[1] // DEPTH

    def multiply(accumulators: Sequence[Any]) -> Array:
        def step(_indices: Any, rows: Any, *parts: Any) -> None:
            for accumulator, part in zip(accumulators, parts, strict=True):
                plgpu.wgmma(accumulator, rows, part)
            # All but this step's: the pipeline may overwrite what the step before read.
            plgpu.wgmma_wait(len(parts))

        plgpu.emit_pipeline(
            step,
            grid=(depth,),
            in_specs=[
                plgpu.BlockSpec(
                    (TILE_ROWS, DEPTH), lambda k: (0, k), transforms=_SWIZZLED, delay_release=1
                ),
                *(
                    plgpu.BlockSpec(
                        (DEPTH, size),
                        lambda k, first=first: (k, first // size + column),
                        transforms=_SWIZZLED,
                        delay_release=1,
                    )
                    for first in product.parts
                ),
            ],
            max_concurrent_steps=product.tile.stages,
        )(work.rows.at[pl.ds(start, TILE_ROWS)], *(weights for _ in product.parts))
        return product.finish(*(accumulator[...] for accumulator in accumulators))

    shape = plgpu.ACC((TILE_ROWS, size), jnp.float32)
    result = pl.run_scoped(multiply, [shape] * len(product.parts))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    work.staged[...] = result.astype(jnp.bfloat16)
    plgpu.commit_smem()
    columns = pl.ds(column * size, size)
    for group in range(0, TILE_ROWS, ROW_GROUP):
        # Not one copy: what follows the expert's rows in the tile is another expert's.
        @pl.when(group < live)
        def _(group: int = group) -> None:
            plgpu.copy_smem_to_gmem(
                work.staged.at[pl.ds(group, ROW_GROUP)],
                work.results.at[pl.ds(start + group, ROW_GROUP), columns],
            )


def _swiglu(gate: Float[Array, "R F"], up: Float[Array, "R F"]) -> Float[Array, "R F"]:
    return gate / (1.0 + jnp.exp(-gate)) * up


def _same(result: Float[Array, "R D"]) -> Float[Array, "R D"]:
    return result
