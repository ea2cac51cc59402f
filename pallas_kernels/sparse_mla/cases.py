"""Shapes that matter for sparse_mla, shared by tests and benchmarks."""

from typing import NamedTuple


class SparseMlaCase(NamedTuple):
    """One problem size."""

    name: str
    rows: int
    heads: int
    nope: int
    rope: int
    latent: int
    value: int
    topk: int
    pages: int  # of each request
    page_size: int


CASES = (
    SparseMlaCase(
        "decode",
        rows=5,
        heads=4,
        nope=12,
        rope=8,
        latent=24,
        value=8,
        topk=16,
        pages=5,
        page_size=8,
    ),
    # More keys than a block, top-k wide enough for the expanded form to pay.
    SparseMlaCase(
        "prefill",
        rows=96,
        heads=3,
        nope=8,
        rope=8,
        latent=16,
        value=8,
        topk=64,
        pages=48,
        page_size=8,
    ),
)
