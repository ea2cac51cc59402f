"""When a chunk of prompt rows attends to its whole context, not to gathered entries of each row.

In multiply-adds per head, for a chunk of n rows whose last row sees s keys (lengths of ``api``):

    expanded:  s C (A + U)  +  pairs (A + B + U),   pairs = n s - n (n - 1) / 2
    absorbed:  n K (2 C + B)

The first grows with the context, the second does not. At GLM-5.3's full size they meet at 7.5K to
8.7K tokens for long chunks.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Int

# Time per multiply-add of the absorbed form over the expanded one. Measured on two CPU cores
# (8 heads, K = 256, 512 rows in tiles of 128, contexts to 3584): expanded 0.20 ns, gathered 0.23.
GATHER_COST = 1.15
# The expanded context stays in the cores' caches and well below the 32 MB from which the allocator
# maps a step's temporaries anew at every step.
MOST_BYTES = 16 << 20


class Sizes(NamedTuple):
    """Lengths of the model's vectors; the letters of ``api``."""

    nope: int
    rope: int
    latent: int
    value: int
    topk: int


def expanded_pays(
    sizes: Sizes, first: int | Int[Array, "*tiles"], last: int | Int[Array, "*tiles"]
) -> bool | Bool[Array, "*tiles"]:
    """Whether a chunk of positions ``first`` to ``last`` is cheaper expanded."""
    rows, keys = last - first + 1, last + 1
    # Divided by the rows: products of both would overflow 32 bits.
    per_key = sizes.latent * (sizes.nope + sizes.value) * (keys / rows)
    pairs = (keys - (rows - 1) / 2) * (sizes.nope + sizes.rope + sizes.value)
    absorbed = sizes.topk * (2 * sizes.latent + sizes.rope)
    return per_key + pairs <= GATHER_COST * absorbed


def most_expanded_keys(sizes: Sizes, heads: int, rows: int, step: int) -> int:
    """Keys that the longest expanded context of a segment may have, a multiple of ``step``.

    Args:
        sizes: of the model.
        heads: of the model.
        rows: the most rows of a chunk.
        step: keys expanded at once.
    """
    key_bytes = 4 * heads * (sizes.nope + sizes.rope + sizes.value)
    keys = 0
    while (keys + step) * key_bytes <= MOST_BYTES:
        last = keys + step - 1
        if not expanded_pays(sizes, max(0, last + 1 - rows), last):
            break
        keys += step
    return keys
