"""Shapes that matter for sparse_mla, shared by tests and benchmarks."""

from typing import NamedTuple


class SparseMlaCase(NamedTuple):
    """One problem size."""

    name: str
    rows: int
    heads: int
    latent: int
    rope: int
    topk: int
    pool: int


CASES = (
    SparseMlaCase("decode", rows=5, heads=4, latent=24, rope=8, topk=16, pool=160),
    # More rows than one block, and no multiple of it.
    SparseMlaCase("prefill", rows=21, heads=3, latent=40, rope=16, topk=32, pool=256),
)
