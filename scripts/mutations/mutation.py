"""One broken variant of the product, as a replacement in one of its files."""

from typing import NamedTuple


class Mutation(NamedTuple):
    """A bug of the catalogue, put into the product.

    Attributes:
        entry: number of the bug in the catalogue.
        why: what the replacement does, in one line.
        path: file, from the repository's root.
        old: text that stands in it exactly once.
        new: what takes its place.
        test: id of the test that must fail then.
    """

    entry: int
    why: str
    path: str
    old: str
    new: str
    test: str
