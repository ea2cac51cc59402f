"""Shapes that matter for index_topk, shared by tests and benchmarks."""

from typing import NamedTuple


class IndexTopkCase(NamedTuple):
    """One problem size; contexts are drawn up to ``pages * page_size``."""

    name: str
    tiles: int
    rows: int
    heads: int
    width: int
    pages: int
    page_size: int
    topk: int


CASES = (
    # Several blocks of 512 keys, so that the running merge is exercised.
    IndexTopkCase("blocks", tiles=3, rows=4, heads=4, width=16, pages=80, page_size=16, topk=64),
    # A page table that is no multiple of a block, top-k wider than a page.
    IndexTopkCase("ragged", tiles=5, rows=1, heads=2, width=8, pages=13, page_size=8, topk=24),
)
