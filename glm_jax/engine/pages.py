"""The page pool of one attention rank: who owns its cache pages, and what unowned ones still hold.

A page is free (nothing worth keeping), owned (by one request or several), or cached: nobody owns
it, but its content is published under a key and may be taken up again until the page is needed.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class _Published(NamedTuple):
    """A page whose content can be found; ``complete`` as in `PagePool.publish`."""

    page: int
    complete: bool


class PagePool:
    """Counts references to the pages of one rank's cache, and finds published ones by key.

    Page 0 is reserved: pad rows read it, nobody writes it, it is never handed out.

    Attributes:
        num_pages: Pages of the cache arrays, page 0 included.
        page_size: Tokens per page.
        evictions: Cached pages that were handed out for something else.
        losses: How often a page could be found no more: evicted, replaced, or all at once.
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
        self.evictions = 0
        self.losses = 0
        self.clear()

    def clear(self) -> None:
        """Forget all owners and contents: the cache itself was lost and made anew."""
        self.losses += 1
        # Popped from the end, so that low pages go first and a page just freed is reused soon.
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._references = [0] * self.num_pages
        self._published: dict[bytes, _Published] = {}
        self._keys: dict[int, bytes] = {}
        # Cached pages, the next to be evicted first.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Pages that can be handed out at all."""
        return self.num_pages - 1

    @property
    def free(self) -> int:
        """Pages that can be handed out now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody owns and whose content can be found."""
        return len(self._cached)

    @property
    def published(self) -> tuple[int, ...]:
        """Pages whose content can be found, owned or not."""
        return tuple(self._keys)

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages, all or none, each with one reference.

        Free pages go first, then the cached ones that were left longest ago.

        Raises:
            OutOfPagesError: Fewer are free; nothing was handed out.
        """
        if count > self.free:
            raise OutOfPagesError(
                f"{count} pages were asked for, {self.free} of {self.capacity} are free. "
                "Preempt a request, or raise num_pages."
            )
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
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

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page; a cached one is no longer up for eviction."""
        for page in pages:
            if self._references[page] == 0:
                # Who shares a page that is free shares garbage.
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page; one without references is cached, or free.

        Cached pages are evicted in the order in which they are released.

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
            if self._references[page]:
                continue
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def references(self, page: int) -> int:
        """Return how many owners a page has."""
        return self._references[page]

    def publish(self, page: int, key: bytes, *, complete: bool = True) -> None:
        """Let the content of an owned page be found from now on; it is never written again.

        The first page of a key stays, unless it is incomplete and this one is not.

        Args:
            page: It.
            key: Names its content and all before it.
            complete: Whether it also holds what the drafter needs.
        """
        before = self._published.get(key)
        if before is not None:
            if before.complete or not complete:
                return
            self._hide(before.page)
        self._published[key] = _Published(page, complete)
        self._keys[page] = key

    def find(self, key: bytes, *, complete: bool = False) -> int | None:
        """Return the page published under a key, if it is as complete as asked."""
        found = self._published.get(key)
        if found is None or (complete and not found.complete):
            return None
        return found.page

    def is_complete(self, page: int) -> bool:
        """Return whether a published page also holds what the drafter needs."""
        return self._published[self._keys[page]].complete

    def _hide(self, page: int) -> None:
        """Let a page's content be found no more."""
        self.losses += 1
        del self._published[self._keys.pop(page)]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def _evict(self) -> int:
        """Give up the cached page that was left longest ago."""
        page, _ = self._cached.popitem(last=False)
        del self._published[self._keys.pop(page)]
        self.evictions += 1
        self.losses += 1
        return page
