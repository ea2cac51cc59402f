"""Exact top-k of the lightning indexer over paged keys; called by the model's full layers.

Maths (DeepSeek-V3.2 report, "lightning indexer"), for row t of a request at position p:

    I[t, s] = sum_m w[t, m] * relu(q[t, m] . k[s])        s = 0 .. p
    selected = the K largest I[t, 0..p], the lower position first among equals

The factors index_heads^-0.5 and index_dim^-0.5 are the caller's (folded in ``weights``).

Layout contract: ``page_table[t, j]`` names the page of tile t that holds positions
``j * page_size ..``; ``read`` gathers and decodes pages, int indices ``[T, b]`` to float32
``[T, b, page_size, I]`` (the storage format is the caller's). Rows of one tile belong to one
request. A row with position < 0 is a pad: its count is 0. Anything, NaN included, may stand in
entries that no row may see.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.index_topk import reference, xla

IMPLEMENTATIONS: dict[str, tuple[Callable, Callable]] = {
    "reference": (reference.index_topk, reference.index_topk),
    "xla": (xla.index_topk_decode, xla.index_topk_prefill),
}


def index_topk_decode(
    queries: Float[Array, "G Q M I"],
    weights: Float[Array, "G Q M"],
    positions: Int[Array, "G Q"],
    page_table: Int[Array, "G W"],
    read: Callable[[Array], Array],
    *,
    page_size: int,
    topk: int,
    implementation: str = "xla",
) -> tuple[Int[Array, "G Q K"], Int[Array, "G Q"]]:
    """Select for decode groups, all at once; the Q rows of a group share one read of the keys.

    Returns:
        Positions in the request (valid in the first ``count`` places, anything after), and the
        count ``min(position + 1, K)``, 0 for a pad row.
    """
    decode, _ = _pick(implementation)
    return decode(queries, weights, positions, page_table, read, page_size=page_size, topk=topk)


def index_topk_prefill(
    queries: Float[Array, "T R M I"],
    weights: Float[Array, "T R M"],
    positions: Int[Array, "T R"],
    page_table: Int[Array, "T W"],
    read: Callable[[Array], Array],
    *,
    page_size: int,
    topk: int,
    implementation: str = "xla",
) -> tuple[Int[Array, "T R K"], Int[Array, "T R"]]:
    """Select positions for tiles of R consecutive prompt rows, one tile after another.

    A tile costs what its own context costs; a tile of pads costs nothing.
    """
    _, prefill = _pick(implementation)
    return prefill(queries, weights, positions, page_table, read, page_size=page_size, topk=topk)


def _pick(implementation: str) -> tuple[Callable, Callable]:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r} of index_topk; "
            f"allowed: {', '.join(sorted(IMPLEMENTATIONS))}"
        )
    return IMPLEMENTATIONS[implementation]
