"""How cache entries are stored: values to the bits of a page, and back.

Arrays hold storage bits, not values of the narrow type: XLA's CPU backend converts a whole bf16 or
fp8 array to float32 and back around a scatter (measured: 48-158 ms against 0.03 ms for 38 MB).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt, UInt8

from pallas_kernels.fp8 import ENTRY_FLOOR, INDEX_KEY_FLOOR, TILE, ScaledTiles

# fp8_ds_mla (FlashMLA's layout of one token): 512 e4m3 values, 4 float32 scales (one per 128
# values), 64 bfloat16 values of the rotated key.
DS_LATENT = 512
DS_ROPE = 64
_DS_SCALES = DS_LATENT // TILE
# Planar index page (DeepGEMM's layout): all keys of the page, then one float32 scale per key.
INDEX_WIDTH = TILE


class Format(NamedTuple):
    """One storage format.

    Attributes:
        storage: dtype of the arrays.
        entry_size: storage elements per entry, given the entry's width in values.
        encode_entries: values ``[..., width]`` of any float type to bits ``[..., entry_size]``.
        parts: sizes of an entry's parts where a page holds the first part of all its entries,
            then the second part of all; empty where an entry is contiguous.
        decode_entries: bits ``[..., entry_size]`` to float32 ``[..., width]``; None where an entry
            is not contiguous and only whole pages can be read.
        decode_pages: bits ``[..., page_size, entry_size]`` to float32 ``[..., page_size, width]``.
    """

    storage: jnp.dtype
    entry_size: Callable[[int], int]
    encode_entries: Callable[[Array], Array]
    parts: tuple[int, ...]
    decode_entries: Callable[[Array], Array] | None
    decode_pages: Callable[[Array], Array]


def _to_float32(values: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return values.astype(jnp.float32)


def _same(bits: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return bits


def _to_bfloat16(values: Float[Array, "*rows width"]) -> UInt[Array, "*rows width"]:
    return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)


def _from_bfloat16(bits: UInt[Array, "*rows width"]) -> Float[Array, "*rows width"]:
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def _to_bytes(numbers: Float[Array, "*rows numbers"]) -> UInt8[Array, "*rows bytes"]:
    """Little-endian bytes of float32 or bfloat16 numbers.

    Shifted out, not cast to an array of bytes: XLA's GPU backend fuses that into whatever stores
    the bytes, while a cast makes a kernel of its own.
    """
    size = numbers.dtype.itemsize
    words = jax.lax.bitcast_convert_type(numbers, jnp.dtype(f"uint{8 * size}"))
    shifts = 8 * jnp.arange(size, dtype=words.dtype)
    return (words[..., None] >> shifts).astype(jnp.uint8).reshape(*numbers.shape[:-1], -1)


def _from_bytes(bits: UInt8[Array, "*rows bytes"], dtype: Any) -> Float[Array, "*rows numbers"]:
    """Consecutive bytes as little-endian numbers of ``dtype``."""
    size = jnp.dtype(dtype).itemsize
    grouped = bits.reshape(*bits.shape[:-1], bits.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(grouped, dtype)


def _to_ds_mla(values: Float[Array, "*rows 576"]) -> UInt8[Array, "*rows 656"]:
    latent = ScaledTiles.quantised(values[..., :DS_LATENT], floor=ENTRY_FLOOR)
    parts = (
        latent.bits.reshape(*values.shape[:-1], DS_LATENT),
        _to_bytes(latent.scales),
        _to_bytes(values[..., DS_LATENT:].astype(jnp.bfloat16)),
    )
    return jnp.concatenate(parts, axis=-1)


def _from_ds_mla(bits: UInt8[Array, "*rows 656"]) -> Float[Array, "*rows 576"]:
    scales_end = DS_LATENT + 4 * _DS_SCALES
    tiles = bits[..., :DS_LATENT].reshape(*bits.shape[:-1], _DS_SCALES, TILE)
    scales = _from_bytes(bits[..., DS_LATENT:scales_end], jnp.float32)
    latent = ScaledTiles(tiles, scales).dequantised()
    rope = _from_bytes(bits[..., scales_end:], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([latent, rope], axis=-1)


def _to_planar_index(values: Float[Array, "*rows 128"]) -> UInt8[Array, "*rows 132"]:
    key = ScaledTiles.quantised(values, floor=INDEX_KEY_FLOOR)
    return jnp.concatenate([key.bits[..., 0, :], _to_bytes(key.scales)], axis=-1)


def _from_planar_index(
    bits: UInt8[Array, "*pages page_size 132"],
) -> Float[Array, "*pages page_size 128"]:
    page_size = bits.shape[-2]
    flat = bits.reshape(*bits.shape[:-2], page_size * bits.shape[-1])
    keys_end = page_size * INDEX_WIDTH
    keys = flat[..., :keys_end].reshape(*bits.shape[:-1], 1, INDEX_WIDTH)
    scales = _from_bytes(flat[..., keys_end:], jnp.float32)
    return ScaledTiles(keys, scales[..., None]).dequantised()


def _fixed(name: str, width: int, size: int) -> Callable[[int], int]:
    def entry_size(values: int) -> int:
        if values != width:
            raise ValueError(f"format {name} stores entries of {width} values, not of {values}.")
        return size

    return entry_size


def _own_width(values: int) -> int:
    return values


FORMATS: Mapping[str, Format] = {
    "float32": Format(jnp.dtype(jnp.float32), _own_width, _to_float32, (), _same, _same),
    "bfloat16": Format(
        jnp.dtype(jnp.uint16), _own_width, _to_bfloat16, (), _from_bfloat16, _from_bfloat16
    ),
    "fp8_ds_mla": Format(
        jnp.dtype(jnp.uint8),
        _fixed("fp8_ds_mla", DS_LATENT + DS_ROPE, DS_LATENT + 4 * _DS_SCALES + 2 * DS_ROPE),
        _to_ds_mla,
        (),
        _from_ds_mla,
        _from_ds_mla,
    ),
    "fp8_planar": Format(
        jnp.dtype(jnp.uint8),
        _fixed("fp8_planar", INDEX_WIDTH, INDEX_WIDTH + 4),
        _to_planar_index,
        (INDEX_WIDTH, 4),
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
