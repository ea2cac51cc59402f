"""One plane of a paged cache, as the operators see it: storage bits, and how to read them."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import Format, format_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedPool:
    """Plane ``plane`` of an array of pages.

    Attributes:
        array: storage bits ``[planes, pages, page_size, entry_size]``; whole, so that a kernel can
            take it without a slice, which would be a copy.
        plane: which plane; a traced number in programs that serve several layers.
        storage_format: a name of ``pallas_kernels.formats``.
    """

    array: Array
    plane: int | Int[Array, ""]
    storage_format: str = field(metadata={"static": True})

    @property
    def stored(self) -> Format:
        """How its bits are read and written."""
        return format_of(self.storage_format)

    @property
    def page_size(self) -> int:
        """Entries per page."""
        return self.array.shape[2]

    def read_entries(self, entries: Int[Array, "*rows"]) -> Float[Array, "*rows width"]:
        """Values of entries ``page * page_size + offset``; out of the plane is the caller's error.

        Three coordinates, not one into a flat view: run operator by operator, a reshape copies the
        pool.
        """
        decode = self.stored.decode_entries
        if decode is None:
            raise ValueError(f"format {self.storage_format} stores pages, not single entries.")
        page, offset = entries // self.page_size, entries % self.page_size
        return decode(self.array[self.plane, page, offset])

    def read_pages(self, pages: Int[Array, "*rows"]) -> Float[Array, "*rows page_size width"]:
        """Values of whole pages."""
        return self.stored.decode_pages(self.array[self.plane, pages])
