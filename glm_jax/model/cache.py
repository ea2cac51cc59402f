"""The paged cache: latent entries of every layer and index keys of every full layer.

Two arrays for the whole model, donated to each step and updated in place. They hold storage bits;
``CacheFormat`` names the formats that turn rows into bits and back, so nothing else knows them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from glm_jax.model.config import GlmConfig
from pallas_kernels.formats import DS_LATENT, DS_ROPE, INDEX_WIDTH, format_of
from pallas_kernels.pool import PagedPool


class Cache(NamedTuple):
    """Storage of one attention rank; page 0 is reserved and stays zero.

    The MTP layer's plane is the last of each array.
    """

    latent: Array  # [planes, pages, page_size, elements of an entry of C + B values]
    index_keys: Array  # [full planes, pages, page_size, elements of a key of I values]


@dataclass(frozen=True)
class CacheFormat:
    """How each array stores its rows: names of ``pallas_kernels.formats``."""

    latent: str
    index_keys: str

    def latent_pool(self, cache: Cache, plane: int | Int[Array, ""]) -> PagedPool:
        """The latent entries of one layer."""
        return PagedPool(cache.latent, plane, self.latent)

    def index_pool(self, cache: Cache, plane: int | Int[Array, ""]) -> PagedPool:
        """The index keys of one full layer."""
        return PagedPool(cache.index_keys, plane, self.index_keys)


CACHE_FORMATS: Mapping[str, CacheFormat] = {
    "float32": CacheFormat("float32", "float32"),
    "bfloat16": CacheFormat("bfloat16", "bfloat16"),
    "fp8_ds_mla": CacheFormat("fp8_ds_mla", "fp8_planar"),
}


def cache_format_of(config: GlmConfig, kv_cache_dtype: str) -> CacheFormat:
    """The formats behind an engine's ``kv_cache_dtype``.

    Raises:
        ValueError: it is unknown, or lays out entries of other widths than this model's.
    """
    if kv_cache_dtype not in CACHE_FORMATS:
        raise ValueError(
            f"kv_cache_dtype {kv_cache_dtype!r} is unknown; allowed: {', '.join(CACHE_FORMATS)}."
        )
    widths = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim
    laid_out = DS_LATENT, DS_ROPE, INDEX_WIDTH
    if kv_cache_dtype == "fp8_ds_mla" and widths != laid_out:
        names = "kv_lora_rank", "qk_rope_head_dim", "index_head_dim"
        wanted, found = (
            ", ".join(f"{name} {width}" for name, width in zip(names, sizes, strict=True))
            for sizes in (laid_out, widths)
        )
        raise ValueError(
            f"kv_cache_dtype fp8_ds_mla is a layout for {wanted}; this model has {found}. Use "
            "kv_cache_dtype float32 or bfloat16."
        )
    return CACHE_FORMATS[kv_cache_dtype]


def cache_shapes(
    config: GlmConfig, cache_format: CacheFormat, *, num_pages: int, page_size: int
) -> Cache:
    """Shapes and types of one rank's cache with ``num_pages`` pages (page 0 included)."""
    mtp = config.num_nextn_predict_layers
    full_planes = config.indexer_types.count("full") + mtp

    def array(storage_format: str, planes: int, width: int) -> Any:
        stored = format_of(storage_format)
        shape = (planes, num_pages, page_size, stored.entry_size(width))
        return jax.ShapeDtypeStruct(shape, stored.storage)

    entry = config.kv_lora_rank + config.qk_rope_head_dim
    return Cache(
        array(cache_format.latent, config.num_hidden_layers + mtp, entry),
        array(cache_format.index_keys, full_planes, config.index_head_dim),
    )


def entry_bytes(config: GlmConfig, cache_format: CacheFormat) -> int:
    """Bytes one token takes in all planes."""
    shapes = cache_shapes(config, cache_format, num_pages=1, page_size=1)
    return sum(spec.size * spec.dtype.itemsize for spec in shapes)


@lru_cache(maxsize=8)
def make_zeros(shapes: Cache) -> Callable[[], Cache]:
    """A compiled program that makes a zero cache on the device, where a host copy would not fit.

    Engines of one process whose caches are alike share it.
    """

    def zeros() -> Cache:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), shapes)

    return jax.jit(zeros).lower().compile()
