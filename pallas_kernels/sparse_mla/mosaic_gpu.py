"""sparse_mla for Hopper: attention over gathered entries on the tensor cores.

A thread block takes one row and one share of its keys (``mosaic_gpu_block``); XLA merges the
shares. Scores, softmax and sums are float32; queries, keys and probabilities are rounded to
bfloat16, whatever the storage: float32 entries too, and fp8 entries after scaling in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic import bridge
from pallas_kernels.mosaic.row_gather import ROW_FORMATS
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import mosaic_gpu_block as block
from pallas_kernels.sparse_mla.config import ROWS_AT_ONCE, splits_for
from pallas_kernels.sparse_mla.queries import Queries
from pallas_kernels.sparse_mla.selection import Selection
from pallas_kernels.sparse_mla.up_projections import UpProjections
from pallas_kernels.tiles import Tiles


def sparse_mla_decode(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    pool: PagedPool,
    *,
    scale: float,
) -> Float[Array, "N H C"]:
    """Attend from every row, split so that the GPU is full (see ``api``).

    Raises:
        ValueError: for shapes or a storage format that the kernel does not take.
    """
    splits = splits_for(entries.shape[0], entries.shape[1])
    return attend_rows(q_latent, q_rope, entries, count, pool, scale=scale, splits=splits)


def sparse_mla_prefill(
    queries: Queries,
    selection: Selection,
    tiles: Tiles,
    pool: PagedPool,
    up: UpProjections,
    *,
    scale: float,
) -> Float[Array, "N H U"]:
    """Gather every row's entries, whatever its context (see ``api``).

    Raises:
        ValueError: for shapes or a storage format that the kernel does not take.
    """
    counts = jnp.where(tiles.names(selection.count.shape[0]), selection.count, 0)
    parts = []
    for first in range(0, queries.nope.shape[0], ROWS_AT_ONCE):
        nope, rope, entries, count = (
            array[first : first + ROWS_AT_ONCE]
            for array in (queries.nope, queries.rope, selection.entries, counts)
        )
        latent = up.absorb(nope)
        mixed = attend_rows(latent, rope, entries, count, pool, scale=scale, splits=1)
        parts.append(up.expand(mixed))
    return jnp.concatenate(parts)


def attend_rows(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    pool: PagedPool,
    *,
    scale: float,
    splits: int,
    interpret: bool = False,
) -> Float[Array, "N H C"]:
    """Attend from every row with ``splits`` thread blocks a row.

    Places after ``count`` may hold anything, and so may the entries that are not selected. A row's
    keys are dealt out evenly, whole blocks of 64; a share without keys gives zeros of weight 0.

    Args:
        q_latent: queries in latent space, C = 512, H <= 64.
        q_rope: rotated queries, B = 64.
        entries: ``page * page_size + offset`` in the pool's plane.
        count: valid places per row; 0 gives zeros.
        pool: float32, bfloat16 or fp8_ds_mla entries.
        scale: softmax scale.
        splits: thread blocks per row.
        interpret: run in Mosaic's interpreter, on the CPU; the gather, which is inline PTX, and
            the matrix products are replaced by plain code.

    Raises:
        ValueError: for shapes or a storage format that the kernel does not take.
    """
    _refuse_unsupported(q_latent, q_rope, entries, pool, splits)
    rows, heads, _ = q_latent.shape
    call = block.Call(splits, scale, pool.storage_format, interpret)
    missing = ((0, 0), (0, block.HEADS - heads), (0, 0))
    parts, log_sums = _kernel(call, rows)(
        jnp.pad(q_latent.astype(jnp.bfloat16), missing),
        jnp.pad(q_rope.astype(jnp.bfloat16), missing),
        entries,
        count,
        jnp.asarray(pool.plane, jnp.int32).reshape(1),
        pool.array,
    )
    return _merged(parts[:, :, :heads], log_sums[:, :, :heads])


def _refuse_unsupported(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    pool: PagedPool,
    splits: int,
) -> None:
    _, heads, latent = q_latent.shape
    if (latent, q_rope.shape[-1]) != (block.LATENT, block.ROPE):
        raise ValueError(
            f"sparse_mla's GPU kernel got entries of {latent} + {q_rope.shape[-1]} values; it is "
            f'laid out for {block.LATENT} + {block.ROPE}. Use implementation="xla".'
        )
    if heads > block.HEADS:
        raise ValueError(
            f"sparse_mla's GPU kernel got {heads} heads; at most {block.HEADS} fit one thread "
            "block. Shard the heads over devices."
        )
    if pool.storage_format not in ROW_FORMATS:
        raise ValueError(
            f"sparse_mla's GPU kernel cannot read {pool.storage_format} entries; allowed: "
            f"{', '.join(ROW_FORMATS)}."
        )
    row_bytes = pool.array.shape[-1] * pool.array.dtype.itemsize
    if row_bytes != ROW_FORMATS[pool.storage_format].row_bytes:
        raise ValueError(
            f"an entry of the pool has {row_bytes} bytes; {pool.storage_format} entries have "
            f"{ROW_FORMATS[pool.storage_format].row_bytes}. Make the pool with that format's size."
        )
    if entries.size >= 2**31:
        raise ValueError(
            f"entries has {entries.size} places; sparse_mla's GPU kernel counts below 2**31. "
            "Pass fewer rows."
        )
    if splits < 1:
        raise ValueError(f"splits is {splits}; it must be at least 1.")


def _kernel(call: block.Call, rows: int) -> Any:
    """The kernel for that many rows."""
    shape = (rows, call.splits, block.HEADS)

    def body(*operands: Any, **scratch: Any) -> None:
        block.attend(call, block.Operands(*operands), block.Scratch(**scratch))

    return bridge.kernel(
        body,
        name=f"sparse_mla_{call.storage_format}",
        out_type=(
            jax.ShapeDtypeStruct((*shape, block.LATENT), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ),
        grid=(rows, call.splits),
        grid_names=("row", "split"),
        num_threads=block.WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=block.scratch_types(),
        compiler_options={"approx_math": True},
        interpret=call.interpret,
    )


def _merged(
    parts: Float[Array, "N splits H C"], log_sums: Float[Array, "N splits H"]
) -> Float[Array, "N H C"]:
    """Exact merge of softmax shares.

    In XLA, where it is one fused pass that also drops the padding heads. A sum written out, not an
    einsum: that would become a matrix product of the float32 parts, with its rounding.
    """
    if parts.shape[1] == 1:
        return parts[:, 0]
    shares = jnp.exp2(log_sums - jnp.max(log_sums, axis=1, keepdims=True))
    shares = shares / jnp.sum(shares, axis=1, keepdims=True)
    return jnp.sum(parts * shares[..., None], axis=1)
