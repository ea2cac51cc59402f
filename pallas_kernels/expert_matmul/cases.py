"""Shapes that matter for expert_matmul, shared by tests and benchmarks."""

from typing import NamedTuple


class ExpertMatmulCase(NamedTuple):
    """One problem size."""

    name: str
    rows: int
    experts: int
    choices: int
    model: int
    width: int


CASES = (
    # Fewer assignments than experts: most experts get nothing.
    ExpertMatmulCase("sparse", rows=3, experts=16, choices=2, model=24, width=16),
    # Several blocks per expert.
    ExpertMatmulCase("blocks", rows=100, experts=4, choices=2, model=32, width=8),
)
