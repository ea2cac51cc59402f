"""The FP8 cache layouts once more, in NumPy, from their description: what the product must write.

An entry: 512 e4m3 values of the latent, 4 little-endian float32 scales, 64 bfloat16 values of the
rotated key. A page of index keys: 128 e4m3 values of each key, then the float32 scale of each.
"""

import numpy as np

TILE = 128
# Magnitudes of the e4m3 numbers 0x00 .. 0x7e: subnormals, then 1.m * 2^(e - 7). 0x7f is NaN.
MAGNITUDES = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
)[:127]
_POWERS = 2.0 ** np.arange(-60, 128)


def e4m3_codes(values):
    """The nearest numbers, ties to the even code; what is larger than 448 becomes 448."""
    size = np.abs(values)
    above = np.clip(np.searchsorted(MAGNITUDES, size), 1, 126)
    middle = (MAGNITUDES[above - 1] + MAGNITUDES[above]) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    return (np.where(up, above, above - 1) | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def e4m3_values(codes):
    size = np.append(MAGNITUDES, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -size, size)


def _quantised(values, *, scale_from, amax_from):
    """Codes and scales of tiles [..., 128]: the least power of two that holds the tile."""
    tiles = values.astype(np.float64)
    largest = np.maximum(np.abs(tiles).max(axis=-1), amax_from)
    fits = (largest[..., None] <= 448 * _POWERS) & (scale_from <= _POWERS)
    scales = _POWERS[fits.argmax(axis=-1)]
    return e4m3_codes(tiles / scales[..., None]), scales.astype("<f4")


def _bfloat16_bytes(values):
    bits = values.astype("<f4").view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8)


def entry_bytes(values):
    """[N, 576] to [N, 656]; a scale is at least 1e-4."""
    tiles = values[:, :512].reshape(-1, 4, TILE)
    codes, scales = _quantised(tiles, scale_from=1e-4, amax_from=0.0)
    parts = codes.reshape(-1, 512), scales.view(np.uint8), _bfloat16_bytes(values[:, 512:])
    return np.concatenate(parts, axis=1)


def entry_values(stored):
    """[..., 656] to [..., 576] in float64."""
    scales = np.ascontiguousarray(stored[..., 512:528]).view("<f4").astype(np.float64)
    latent = e4m3_values(stored[..., :512]).reshape(*scales.shape, TILE) * scales[..., None]
    words = np.ascontiguousarray(stored[..., 528:]).view("<u2").astype(np.uint32) << 16
    rope = words.view(np.float32).astype(np.float64)
    return np.concatenate([latent.reshape(*stored.shape[:-1], 512), rope], axis=-1)


def put_index_key(page, offset, key):
    """Write a key of 128 values into the bytes of a page [page_size, 132]; its amax is >= 1e-4."""
    flat = page.reshape(-1)
    codes, scale = _quantised(key, scale_from=0.0, amax_from=1e-4)
    flat[offset * TILE : (offset + 1) * TILE] = codes
    first_scale = page.shape[0] * TILE
    flat[first_scale + 4 * offset : first_scale + 4 * offset + 4] = scale[None].view(np.uint8)


def index_keys(pages):
    """Keys of whole pages: [..., page_size, 132] to [..., page_size, 128] in float64."""
    *front, page_size, _ = pages.shape
    flat = pages.reshape(*front, -1)
    codes = flat[..., : page_size * TILE].reshape(*front, page_size, TILE)
    scales = np.ascontiguousarray(flat[..., page_size * TILE :]).view("<f4").astype(np.float64)
    return e4m3_values(codes) * scales[..., None]


def relative_error(read, written):
    """Of each row: the norm of the difference over the norm of the row."""
    difference = np.linalg.norm(read - written, axis=-1)
    return difference / np.linalg.norm(written, axis=-1)
