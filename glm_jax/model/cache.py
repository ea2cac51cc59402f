"""The paged cache: latent entries of every layer and index keys of every full layer.

Two arrays for the whole model, donated to each step and updated in place. They hold storage bits;
one ``CacheFormat`` turns rows into bits and back, so nothing else knows the storage type.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_jax.model.config import GlmConfig
from pallas_kernels.formats import format_of


class Cache(NamedTuple):
    """Storage of one attention rank; page 0 is reserved and stays zero.

    The MTP layer's plane is the last of each array.
    """

    latent: Array  # [planes, pages, page_size, C + B]
    index_keys: Array  # [full planes, pages, page_size, I]


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored. float32 as they are; bfloat16 as uint16 bits.

    See ``pallas_kernels.formats``.
    """

    name: str

    def __post_init__(self) -> None:
        """Refuse unknown formats."""
        if self.name not in ("float32", "bfloat16"):
            raise ValueError(f"cache format {self.name!r} is unknown; allowed: float32, bfloat16")

    @property
    def storage(self) -> jnp.dtype:
        """Type of the arrays."""
        return format_of(self.name).storage

    def encode(self, rows: Float[Array, "N width"]) -> Array:
        """Rows to storage bits."""
        if self.name == "float32":
            return rows.astype(jnp.float32)
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)


def cache_shapes(
    config: GlmConfig, cache_format: CacheFormat, *, num_pages: int, page_size: int
) -> Cache:
    """Shapes and types of one rank's cache with ``num_pages`` pages (page 0 included)."""
    mtp = config.num_nextn_predict_layers
    planes = config.num_hidden_layers + mtp
    full_planes = config.indexer_types.count("full") + mtp
    entry = config.kv_lora_rank + config.qk_rope_head_dim

    def plane(number: int, width: int) -> Any:
        shape = (number, num_pages, page_size, width)
        return jax.ShapeDtypeStruct(shape, cache_format.storage)

    return Cache(plane(planes, entry), plane(full_planes, config.index_head_dim))


def entry_bytes(config: GlmConfig, cache_format: CacheFormat) -> int:
    """Bytes one token takes in all planes."""
    shapes = cache_shapes(config, cache_format, num_pages=1, page_size=1)
    return sum(spec.size * spec.dtype.itemsize for spec in shapes)


def write_plane(
    array: Array, plane: int | Int[Array, ""], entries: Int[Array, " N"], bits: Array
) -> Array:
    """Store one row per entry of a plane, in place when donated.

    ``entries`` are page * page_size + offset; an entry at or past the plane's end writes nowhere.
    """
    _, pages, page_size, _ = array.shape
    size = pages * page_size
    if entries.shape[0] == 1:
        # XLA turns a scatter of one row into a select over the whole array: a copy of the pool
        # per layer. A second row that writes nowhere keeps it a scatter.
        entries = jnp.pad(entries, (0, 1), constant_values=size)
        bits = jnp.pad(bits, ((0, 1), (0, 0)))
    # An offset past the page's end drops the row. Three coordinates, not one into a flat view: run
    # operator by operator, a reshape copies the pool.
    offset = jnp.where(entries < size, entries % page_size, page_size)
    return array.at[plane, jnp.minimum(entries // page_size, pages - 1), offset].set(
        bits, mode="drop"
    )


def make_zeros(shapes: Cache) -> Callable[[], Cache]:
    """A compiled program that makes a zero cache on the device, where a host copy would not fit."""

    def zeros() -> Cache:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), shapes)

    return jax.jit(zeros).lower().compile()
