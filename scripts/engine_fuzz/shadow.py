"""What every page holds, kept beside the engine's own books, by tokens instead of hashes."""

from collections.abc import Sequence
from typing import NamedTuple

from glm_jax.engine.pages import PagePool
from glm_jax.engine.plan import StepPlan
from glm_jax.engine.request import Request
from scripts.engine_fuzz.invariants import check


class _Content(NamedTuple):
    """What a full page was computed from.

    Attributes:
        salt: Of the request that wrote it.
        tokens: All up to the page's end, and the next one: the drafter's last entry is made of it.
        complete: Whether the drafter's layer ran over all of its rows.
    """

    salt: str | None
    tokens: bytes
    complete: bool


class Shadow:
    """Checks that a request begins with pages of its own salt, its own tokens, and its drafter."""

    def __init__(self, pool: PagePool) -> None:
        """Know nothing: every page is free."""
        self._pool = pool
        self._contents: dict[int, _Content] = {}
        self._without_drafter: set[int] = set()
        # How many pages of a request are known, by its id and how often it lost its pages.
        self._known: dict[tuple[str, int], int] = {}
        # Who is in the step, and its page table: one that ends has none any more.
        self._served: list[tuple[Request, tuple[str, int], list[int]]] = []

    def forget(self) -> None:
        """The pool was lost."""
        self._contents.clear()
        self._without_drafter.clear()
        self._known.clear()
        self._served.clear()

    def before(self, plan: StepPlan) -> None:
        """Check the pages that the requests of a plan begin with.

        Raises:
            BrokenError: One holds something else.
        """
        self._served.clear()
        for entry in plan.entries:
            request = entry.request
            full, inside = divmod(request.computed, self._pool.page_size)
            turn = request.request_id, request.preemptions
            if turn not in self._known:
                for index in range(full):
                    self._check(request, index)
                self._known[turn] = full
            self._served.append((request, turn, list(request.pages)))
            written = request.pages[full:]
            # A page that is begun anew forgets who had it before.
            self._without_drafter.difference_update(written[1:] if inside else written)
            if not plan.drafter:
                self._without_drafter.update(written)

    def after(self) -> None:
        """Note the pages that the step filled."""
        for request, turn, pages in self._served:
            full = request.computed // self._pool.page_size
            for index in range(self._known[turn], full):
                self._contents[pages[index]] = self._content(request, pages, index)
            self._known[turn] = full
        self._served.clear()

    def _content(self, request: Request, pages: Sequence[int], index: int) -> _Content:
        end = (index + 1) * self._pool.page_size
        # Those behind a stop string too: they were computed.
        tokens = request._tokens[: end + 1].tobytes()
        return _Content(request.cache_salt, tokens, pages[index] not in self._without_drafter)

    def _check(self, request: Request, index: int) -> None:
        page = request.pages[index]
        found, wanted = self._contents.get(page), self._content(request, request.pages, index)
        check(found is not None, f"{request} begins with page {page}, which nobody filled")
        assert found is not None
        check(found.salt == wanted.salt, f"{request} reads salt {found.salt!r}")
        check(found.tokens == wanted.tokens, f"{request} reads page {page} of other tokens")
        drafts = request.speculates
        check(found.complete or not drafts, f"{request} drafts from page {page} without entries")
