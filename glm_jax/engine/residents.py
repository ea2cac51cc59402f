"""The requests that hold a slot and pages, and when they give them back."""

from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush

from glm_jax.engine.pages import PagePool
from glm_jax.engine.prefix import PrefixCache
from glm_jax.engine.request import Request, RequestStatus


class Residents:
    """Running requests of one attention rank.

    Attributes:
        requests: Who is served first stands first: the oldest admission, or the lowest priority
            value and earliest arrival. The last one is the first to be preempted.
        free_slots: Slots that nobody holds, as a heap.
    """

    def __init__(
        self, pages: PagePool, prefix: PrefixCache, max_num_seqs: int, *, by_priority: bool
    ) -> None:
        """Start with every slot free.

        Args:
            pages: The pool of the rank.
            prefix: Its published pages.
            max_num_seqs: Slots.
            by_priority: Whether the priority decides who is served first.
        """
        self.requests: list[Request] = []
        self.free_slots = list(range(max_num_seqs))
        self._pages = pages
        self._prefix = prefix
        self._by_priority = by_priority
        self._leaving: list[Request] = []

    def admit(self, request: Request, cached: Sequence[int]) -> None:
        """Give a request a slot and the cached pages it begins with; the device must reset it."""
        request.status = RequestStatus.RUNNING
        request.slot = heappop(self.free_slots)
        request.needs_reset = True
        self._prefix.take(request, cached)
        if self._by_priority:
            insort(self.requests, request, key=lambda one: (one.priority, one.arrival))
        else:
            self.requests.append(request)

    def leave(self, request: Request, *, in_flight: bool) -> None:
        """Take a request out; while a step is in flight it keeps slot and pages until `land`."""
        self.requests.remove(request)
        if in_flight:
            self._leaving.append(request)
        else:
            self._release(request)

    def land(self) -> None:
        """The step in flight is over: release who left during it."""
        leaving, self._leaving = self._leaving, []
        for request in leaving:
            self._release(request)

    def clear(self) -> list[Request]:
        """Take everyone out and forget all pages, since the device lost them; return who it was."""
        self.land()
        everyone, self.requests = self.requests, []
        for request in everyone:
            self._release(request)
        self._pages.clear()
        return everyone

    def _release(self, request: Request) -> None:
        """Give back a request's pages and slot."""
        # The last page first: it is the first to be evicted, and of least use without the others.
        self._pages.release(reversed(request.pages))
        assert request.slot is not None, f"{request} holds pages without a slot"
        heappush(self.free_slots, request.slot)
        request.pages = []
        request.published = 0
        request.synced_pages = 0
        request.slot = None
