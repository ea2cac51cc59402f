"""Products of rows with block-FP8 matrices on Hopper; every matrix is read where it lies.

Rows come in tiles, each of which has its own matrix out of a stack. The product is computed
transposed, ``W X^T``: wgmma takes the weights from registers, where e4m3 becomes bfloat16 without
rounding. The sums over 128 columns of a block are float32 and meet their scale when they are added
up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Int

from pallas_kernels.fp8 import BLOCK, BlockScaled
from pallas_kernels.mosaic import bridge, e4m3_weights
from pallas_kernels.mosaic.e4m3_weights import ROWS
from pallas_kernels.mosaic.fp8_product_block import (
    CONSUMERS,
    WARPGROUPS,
    Kernel,
    Loop,
    Operands,
    Product,
    Scratch,
    take_items,
)
from pallas_kernels.mosaic.hopper import MULTIPROCESSORS

# Rows of a tile, the narrow side of wgmma. The sums' registers have room for no more.
TILE_SIZES = (16, 32, 64)
# Shared memory for what is under way; a thread block may have 227 KiB, results aside. 36 KiB per
# multiprocessor is what 4.8 TB/s times a latency of a microsecond come to.
_SHARED_BYTES = 192 * 1024
_MAX_STAGES = 8


class Tiles(NamedTuple):
    """Which rows meet which matrix.

    Attributes:
        matrix: each tile's, counted from the stack's ``first``.
        start: first row of each tile, a multiple of 8.
        rows: of the result that are the tile's own; what follows them is another tile's.
        used: tiles before this one exist.
    """

    matrix: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    rows: Int[Array, " tiles"]
    used: Int[Array, "1"]


def tile_size(rows: int | float) -> int:
    """The smallest size of a tile that holds so many rows, or else the largest.

    Each row of a tile, needed or not, costs tensor time and as much bandwidth from L2 as two rows
    of weights.
    """
    return next((size for size in TILE_SIZES if size >= rows), TILE_SIZES[-1])


def plain_product(name: str, outputs: int, size: int, **settings: Any) -> Product:
    """The product by whole matrices.

    Two blocks an item where they divide the result: the rows are then copied half as often.
    The last item may reach beyond the matrix; its columns there are to be ignored.
    """
    count = 2 if outputs % (2 * BLOCK) == 0 else 1
    blocks = tuple(range(0, count * BLOCK, BLOCK))
    across = -(-outputs // (count * BLOCK))
    return Product(name, blocks, count * BLOCK, across, size, **settings)


def fp8_product(
    product: Product,
    tiles: Tiles,
    rows: BFloat16[Array, "P depth"],
    weights: tuple[Int[Array, "1"], BlockScaled],
) -> Float[Array, "splits P columns"]:
    """Multiply every tile by its matrix; the results of other rows are left undefined.

    Args:
        product: what to compute.
        tiles: of rows.
        rows: after ``e4m3_weights.permute_columns``; a tile may be read in full wherever it starts.
        weights: number of the first matrix in a stack of them, and the stack. Depths are multiples
            of 16, outputs of 8.
    """
    first, stack = weights
    loop = _loop(product, stack.values.shape[-1])

    def body(*references: Any, **scratch: Any) -> None:
        take_items(Kernel(product, loop, Operands(*references), Scratch(**scratch)))

    shape = (product.splits, rows.shape[0], product.columns)
    launch = bridge.kernel(
        body,
        name=product.name,
        out_type=jax.ShapeDtypeStruct(shape, product.result_type),
        # Few in the interpreter, so that each takes several items.
        grid=(2 if product.interpret else MULTIPROCESSORS,),
        grid_names=("multiprocessor",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=_scratch(product, loop),
        interpret=product.interpret,
    )
    values = _filled_up(product, stack.values) if product.interpret else stack.values
    return launch(
        first, tiles.matrix, tiles.start, tiles.rows, tiles.used, rows, values, stack.scales
    )


def steps_of(depth: int) -> int:
    """Steps of the loop over a matrix's depth; ``splits`` divides them."""
    return -(-depth // e4m3_weights.block_width(depth))


def _loop(product: Product, depth: int) -> Loop:
    width = e4m3_weights.block_width(depth)
    steps, rest = divmod(steps_of(depth), product.splits)
    assert not rest, f"{depth=} has {steps_of(depth)} steps, {product.splits=}"
    stage = width * (len(product.blocks) * BLOCK + 2 * product.size)
    return Loop(width, steps, min(_MAX_STAGES, _SHARED_BYTES // stage))


def _filled_up(product: Product, values: Array) -> Array:
    """Zeros beyond the matrix, as the copy engine brings them; the interpreter reads none there."""
    outputs, depth = values.shape[-2:]
    reached = product.advance * (product.across - 1) + product.blocks[-1] + BLOCK
    missing = max(0, reached - outputs), -depth % e4m3_weights.block_width(depth)
    return jnp.pad(values, [(0, 0), *((0, number) for number in missing)])


def _scratch(product: Product, loop: Loop) -> dict[str, Any]:
    def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
        columns = 128 // jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    values = (loop.stages, len(product.blocks), BLOCK, loop.width)
    staged = (CONSUMERS, product.size, ROWS)
    return {
        "values": plgpu.SMEM(
            values, jnp.float8_e4m3fn, transforms=e4m3_weights.transforms(loop.width)
        ),
        "rows": swizzled((loop.stages, product.size, loop.width), jnp.bfloat16),
        "staged": swizzled(staged, product.result_type),
        "full": plgpu.Barrier(num_arrivals=len(product.blocks) + 1, num_barriers=loop.stages),
        "empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=loop.stages),
    }
