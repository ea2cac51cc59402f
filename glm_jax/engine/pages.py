"""The page pool of one attention rank: which cache pages are free, and who counts as an owner."""

from collections.abc import Iterable


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PagePool:
    """Counts references to the pages of one rank's cache.

    Page 0 is reserved: pad rows read it, nobody writes it, it is never handed out.

    Attributes:
        num_pages: Pages of the cache arrays, page 0 included.
        page_size: Tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Start with every page but page 0 free."""
        if num_pages < 2 or page_size < 1:
            raise ValueError(
                f"a pool of {num_pages} pages of {page_size} tokens holds nothing: page 0 is "
                "reserved. Use num_pages >= 2 and page_size >= 1."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        """Forget all owners: the cache itself was lost and made anew."""
        # Popped from the end, so that low pages go first and a page just freed is reused soon.
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._references = [0] * self.num_pages

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages that can be handed out now."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages, all or none, each with one reference.

        Raises:
            OutOfPagesError: Fewer are free; nothing was handed out.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages were asked for, {len(self._free)} of {self.capacity} are free. "
                "Preempt a request, or raise num_pages."
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def extend(self, table: list[int], tokens: int) -> None:
        """Hand out what a page table lacks to hold `tokens` tokens.

        Raises:
            OutOfPagesError: Fewer pages are free; the table is as before.
        """
        missing = self.pages_for(tokens) - len(table)
        if missing > 0:
            table += self.allocate(missing)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page; a page without references is free.

        Raises:
            ValueError: A page is reserved, not of this pool, or already free. The pages before it
                in `pages` were released.
        """
        for page in pages:
            if not 0 < page < self.num_pages or self._references[page] == 0:
                raise ValueError(
                    f"page {page} is not handed out (pages 1 to {self.num_pages - 1} can be). "
                    "Release each reference once."
                )
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def references(self, page: int) -> int:
        """Return how many owners a page has."""
        return self._references[page]
