"""Absorbed multi-head latent attention over each row's own selected cache entries.

Maths (DeepSeek-V2 report, absorbed form), for row n and head h over its entries e_0 .. e_(count-1):

    s_j    = (q_latent[n, h] . latent(e_j) + q_rope[n, h] . rope(e_j)) * scale
    out[n, h] = sum_j softmax(s)_j * latent(e_j)

An entry is one cached vector ``[latent C | rope B]``. ``scale`` is (nope + rope)^-0.5 of the
*original* head, not of the 576-wide entry. A row with count 0 yields zeros. Places after ``count``
may hold any index inside the pool; they get probability exactly 0.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.sparse_mla import reference, xla

IMPLEMENTATIONS: dict[str, Callable] = {
    "reference": reference.sparse_mla,
    "xla": xla.sparse_mla,
}


def sparse_mla(
    q_latent: Float[Array, "N H C"],
    q_rope: Float[Array, "N H B"],
    entries: Int[Array, "N K"],
    count: Int[Array, " N"],
    read: Callable[[Array], Array],
    *,
    scale: float,
    implementation: str = "xla",
) -> Float[Array, "N H C"]:
    """Attend from every row to its ``count`` first entries.

    Args:
        q_latent: queries in latent space (q_nope absorbed through the key up-projection).
        q_rope: rotated queries.
        entries: indices into the flat entry pool.
        count: valid entries per row, 0 for a pad row.
        read: gathers and decodes entries: int indices ``[...]`` to float32 ``[..., C + B]``. The
            storage format is the caller's.
        scale: softmax scale.
        implementation: "xla" (default) or "reference".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r} of sparse_mla; "
            f"allowed: {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    return IMPLEMENTATIONS[implementation](q_latent, q_rope, entries, count, read, scale=scale)
