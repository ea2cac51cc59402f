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

    def hit(self, request: Request, *, complete: bool) -> list[int]:
        """Return the cached pages that a request begins with; nothing is taken yet.

        What was found before stays found until the pool loses a page, so that a request that waits
        for long is not looked up from its beginning in every step. At least its last row is left.

        Args:
            request: It waits.
            complete: Take only pages that hold what the drafter needs.
        """
        if not (self.enabled and request.reads_prefix):
            return []
        complete = complete and self._drafts
        found = request.found
        if found is None or found[:2] != (self._pool.losses, complete):
            found = request.found = self._pool.losses, complete, []
        pages = found[2]
        while (key := self.next_key(request, len(pages))) is not None:
            page = self._pool.find(key, complete=complete)
            if page is None:
                break
            pages.append(page)
        return pages

    def next_key(self, request: Request, hit: int) -> bytes | None:
        """Return the key of the page after so many, if the request could begin with it."""
        if not (self.enabled and request.reads_prefix):
            return None
        if hit >= (request.length - 1) // self._pool.page_size:
            return None
        return self._keys(request, hit + 1)[hit]

    def being_written(self, request: Request, start: int) -> Iterable[bytes]:
        """Return the keys of the pages that a prefill still writes, from position ``start`` on."""
        return self._keys(request)[start // self._pool.page_size :] if self.enabled else ()

    def _keys(self, request: Request, most: int | None = None) -> Sequence[bytes]:
        """Return the keys of a request's full pages; of ``most`` pages at least, if there are."""
        if request.page_keys is None:
            request.page_keys = PageKeys(request.cache_salt, with_next=self._drafts)
        return request.page_keys.upto(request.tokens, self._pool.page_size, most)

    def take(self, request: Request, pages: Sequence[int]) -> None:
        """Give cached pages to a request that is being admitted: their rows count as computed."""
        self._pool.share(pages)
        request.pages = list(pages)
        request.found = None
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
        keys = self._keys(request)
        for index in range(request.published, filled):
            complete = request.speculates or not self._drafts
            self._pool.publish(request.pages[index], keys[index], complete=complete)
        request.published = filled
