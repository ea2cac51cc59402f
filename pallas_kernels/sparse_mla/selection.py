"""Which cached entries each row attends to."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Selection(NamedTuple):
    """The first ``count`` places of a row are meant; later ones point to entry 0."""

    positions: Int[Array, "N K"]  # in the row's request
    entries: Int[Array, "N K"]  # page * page_size + offset, inside one plane
    count: Int[Array, " N"]  # 0 for a pad row
