"""The prefix cache: finds the pages that hold the beginning of a request, and publishes them.

Pages are published when the step that wrote them is committed, never before: a fault or an abort
takes nothing back. A request whose next page is just being written by another waits for it.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm_jax.engine.page_keys import PageKeys
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import Request


class PrefixCounts(NamedTuple):
    """Tokens of admitted requests: known at admission, and those of them found in the cache."""

    queried_tokens: int = 0
    hit_tokens: int = 0


class PrefixCache:
    """Looks up and publishes the pages of requests in one pool.

    Attributes:
        enabled: Whether pages are shared at all.
        counts: What was asked for and found, over all admissions.
    """

    def __init__(self, pool: PagePool, *, enabled: bool, drafts: bool) -> None:
        """Share the pages of a pool.

        Args:
            pool: Of the rank.
            enabled: Off, nothing is found and nothing published.
            drafts: Whether a drafter keeps entries in the pages.
        """
        self.enabled = enabled
        self.counts = PrefixCounts()
        self._pool = pool
        self._drafts = drafts

    def keys(self, request: Request) -> Sequence[bytes]:
        """Return the keys of a request's full pages, but for one that its last token ends."""
        if request.page_keys is None:
            request.page_keys = PageKeys(request.cache_salt, with_next=self._drafts)
        return request.page_keys.upto(request.tokens, self._pool.page_size)

    def hit(self, request: Request, *, complete: bool) -> list[int]:
        """Return the cached pages that a request begins with; nothing is taken yet.

        Args:
            request: It waits.
            complete: Take only pages that hold what the drafter needs.
        """
        pages: list[int] = []
        if not (self.enabled and request.reads_prefix):
            return pages
        for key in self.keys(request):
            page = self._pool.find(key, complete=complete and self._drafts)
            if page is None:
                break
            pages.append(page)
        return pages

    def next_key(self, request: Request, hit: int) -> bytes | None:
        """Return the key of the first page that was not found, if another request may write it."""
        if not (self.enabled and request.reads_prefix):
            return None
        keys = self.keys(request)
        return keys[hit] if hit < len(keys) else None

    def being_written(self, request: Request, start: int) -> Iterable[bytes]:
        """Return the keys of the pages that a prefill still writes, from position ``start`` on."""
        return self.keys(request)[start // self._pool.page_size :] if self.enabled else ()

    def take(self, request: Request, pages: Sequence[int]) -> None:
        """Give cached pages to a request that is being admitted: their rows count as computed."""
        self._pool.share(pages)
        request.pages = list(pages)
        request.published = len(pages)
        request.computed = found = len(pages) * self._pool.page_size
        if request.num_cached_tokens is None:
            request.num_cached_tokens = found
        if self.enabled:
            queried, hits = self.counts
            self.counts = PrefixCounts(queried + request.length, hits + found)
        if request.speculates and self._drafts:
            # Without the drafter's entries of all rows its drafts would be guesses.
            request.speculates = all(map(self._pool.is_complete, pages))

    def publish(self, request: Request) -> None:
        """Publish the pages of a request that were filled by a committed step.

        Rows after `computed` - those of refused drafts - are in none of them.
        """
        # Of a request that ended, drafts behind its last token may have been accepted.
        known = min(request.computed, request.length - 1)
        filled = known // self._pool.page_size
        if not self.enabled or filled <= request.published:
            return
        keys = self.keys(request)
        for index in range(request.published, filled):
            complete = request.speculates or not self._drafts
            self._pool.publish(request.pages[index], keys[index], complete=complete)
        request.published = filled
