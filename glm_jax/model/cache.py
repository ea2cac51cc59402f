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


class Cache(NamedTuple):
    """Storage of one attention rank; page 0 is reserved and stays zero.

    The MTP layer's plane is the last of each array.
    """

    latent: Array  # [planes, pages, page_size, C + B]
    index_keys: Array  # [full planes, pages, page_size, I]


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored. float32 as they are; bfloat16 as uint16 bits.

    Bits, because XLA's CPU backend converts a whole bf16 array to float32 and back around a
    scatter (measured: 48-158 ms against 0.03 ms for a 38 MB plane).
    """

    name: str

    def __post_init__(self) -> None:
        """Refuse unknown formats."""
        if self.name not in ("float32", "bfloat16"):
            raise ValueError(f"cache format {self.name!r} is unknown; allowed: float32, bfloat16")

    @property
    def storage(self) -> jnp.dtype:
        """Type of the arrays."""
        return jnp.dtype(jnp.float32 if self.name == "float32" else jnp.uint16)

    def encode(self, rows: Float[Array, "N width"]) -> Array:
        """Rows to storage bits."""
        if self.name == "float32":
            return rows.astype(jnp.float32)
        return jax.lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, bits: Array) -> Float[Array, "*rows width"]:
        """Storage bits to float32 values."""
        if self.name == "float32":
            return bits
        return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


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
    planes, pages, page_size, width = array.shape
    size = pages * page_size
    if entries.shape[0] == 1:
        # XLA turns a scatter of one row into a select over the whole array: a copy of the pool
        # per layer. A second row that writes nowhere keeps it a scatter.
        entries = jnp.pad(entries, (0, 1), constant_values=size)
        bits = jnp.pad(bits, ((0, 1), (0, 0)))
    # Past the end of the whole array, or a dropped row would land in the next plane.
    places = jnp.where(entries < size, plane * size + entries, planes * size)
    flat = array.reshape(planes * size, width)
    return flat.at[places].set(bits, mode="drop").reshape(array.shape)


# Both readers reshape once, outside whatever loop they are called in: run operator by operator, a
# reshape copies the pool.


def entry_reader(
    array: Array, plane: int | Int[Array, ""]
) -> Callable[[Int[Array, "*rows"]], Array]:
    """A function from entries of one plane to their storage bits ``[*rows, width]``."""
    planes, pages, page_size, width = array.shape
    flat = array.reshape(planes * pages * page_size, width)
    first = plane * (pages * page_size)
    return lambda entries: flat[first + entries]


def page_reader(
    array: Array, plane: int | Int[Array, ""]
) -> Callable[[Int[Array, "*rows"]], Array]:
    """A function from pages of one plane to their storage bits ``[*rows, page_size, width]``."""
    planes, number, page_size, width = array.shape
    flat = array.reshape(planes * number, page_size, width)
    return lambda pages: flat[plane * number + pages]


def make_zeros(shapes: Cache) -> Callable[[], Cache]:
    """A compiled program that makes a zero cache on the device, where a host copy would not fit."""

    def zeros() -> Cache:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), shapes)

    return jax.jit(zeros).lower().compile()
