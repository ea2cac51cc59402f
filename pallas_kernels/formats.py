"""How cache entries are stored: the bits of one page, and how they become float32 values again.

Arrays hold storage bits, not values of the narrow type: XLA's CPU backend converts a whole bf16 or
fp8 array to float32 and back around a scatter (measured: 48-158 ms against 0.03 ms for 38 MB).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt

# fp8_ds_mla (FlashMLA's layout of one token): 512 e4m3 values, 4 float32 scales (one per 128
# values), 64 bfloat16 values of the rotated key.
_DS_LATENT = 512
_DS_ROPE = 64
_DS_TILE = 128
_DS_SCALES = _DS_LATENT // _DS_TILE
# Planar index page (DeepGEMM's layout): all keys of the page, then one float32 scale per key.
_INDEX_WIDTH = 128


class Format(NamedTuple):
    """One storage format.

    Attributes:
        storage: dtype of the arrays.
        entry_size: storage elements per entry, given the entry's width in values.
        decode_entries: bits ``[..., entry_size]`` to float32 ``[..., width]``; None where an entry
            is not contiguous and only whole pages can be read.
        decode_pages: bits ``[..., page_size, entry_size]`` to float32 ``[..., page_size, width]``.
    """

    storage: jnp.dtype
    entry_size: Callable[[int], int]
    decode_entries: Callable[[Array], Array] | None
    decode_pages: Callable[[Array], Array]


def _same(bits: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return bits


def _from_bfloat16(bits: UInt[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _from_e4m3(bits: UInt[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)


def _words(bits: UInt[Array, "*rows bytes"], dtype: Any) -> Array:
    """Consecutive bytes as little-endian numbers of ``dtype``."""
    size = jnp.dtype(dtype).itemsize
    grouped = bits.reshape(*bits.shape[:-1], bits.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(grouped, dtype)


def _from_ds_mla(bits: UInt[Array, "*rows 656"]) -> Float[Array, "*rows 576"]:
    scales_end = _DS_LATENT + 4 * _DS_SCALES
    tiles = _from_e4m3(bits[..., :_DS_LATENT])
    tiles = tiles.reshape(*bits.shape[:-1], _DS_SCALES, _DS_TILE)
    scales = _words(bits[..., _DS_LATENT:scales_end], jnp.float32)
    latent = (tiles * scales[..., None]).reshape(*bits.shape[:-1], _DS_LATENT)
    rope = _words(bits[..., scales_end:], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([latent, rope], axis=-1)


def _from_planar_index(
    bits: UInt[Array, "*pages page_size 132"],
) -> Float[Array, "*pages page_size 128"]:
    page_size = bits.shape[-2]
    flat = bits.reshape(*bits.shape[:-2], page_size * bits.shape[-1])
    keys_end = page_size * _INDEX_WIDTH
    keys = _from_e4m3(flat[..., :keys_end]).reshape(*bits.shape[:-1], _INDEX_WIDTH)
    return keys * _words(flat[..., keys_end:], jnp.float32)[..., None]


def _fixed(name: str, width: int, size: int) -> Callable[[int], int]:
    def entry_size(values: int) -> int:
        if values != width:
            raise ValueError(f"format {name} stores entries of {width} values, not of {values}.")
        return size

    return entry_size


def _own_width(values: int) -> int:
    return values


FORMATS: Mapping[str, Format] = {
    "float32": Format(jnp.dtype(jnp.float32), _own_width, _same, _same),
    "bfloat16": Format(jnp.dtype(jnp.uint16), _own_width, _from_bfloat16, _from_bfloat16),
    "fp8_ds_mla": Format(
        jnp.dtype(jnp.uint8),
        _fixed("fp8_ds_mla", _DS_LATENT + _DS_ROPE, _DS_LATENT + 4 * _DS_SCALES + 2 * _DS_ROPE),
        _from_ds_mla,
        _from_ds_mla,
    ),
    "fp8_planar": Format(
        jnp.dtype(jnp.uint8),
        _fixed("fp8_planar", _INDEX_WIDTH, _INDEX_WIDTH + 4),
        None,
        _from_planar_index,
    ),
}


def format_of(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in FORMATS:
        raise ValueError(f"storage format {name!r} is unknown; allowed: {', '.join(FORMATS)}.")
    return FORMATS[name]
