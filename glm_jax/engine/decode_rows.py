"""Which requests decode in a step: the first pass of the scheduler, and pages for their rows."""

from collections.abc import Callable, Sequence

from glm_jax.engine.chunking import Decodes, scored_pairs
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import Request, RequestStatus


def choose_decodes(
    running: Sequence[Request], pages: PagePool, preempt: Callable[[Request], None]
) -> Decodes:
    """Return the decodes of a step; all of them have pages for their rows.

    Requests are served first to last and the last one is preempted first, so a victim was not
    served before.

    Args:
        running: All running requests, first served first; ``preempt`` takes its last one out.
        pages: The pool of the rank.
        preempt: Takes a request's pages.
    """
    decodes = []
    width, pairs, size = 1, 0, pages.page_size
    for request in tuple(running):
        if request.status is not RequestStatus.RUNNING or not request.decoding:
            continue
        end = request.computed + 1 + len(request.draft_token_ids)
        # Most steps stay within the last page.
        if end > len(request.pages) * size and not _make_room(running, pages, preempt, request):
            continue
        rows = 1 + len(request.draft_token_ids)
        decodes.append(request)
        width = max(width, rows)
        pairs += scored_pairs(request.computed, rows)
    return Decodes(decodes, width, pairs)


def _make_room(
    running: Sequence[Request],
    pages: PagePool,
    preempt: Callable[[Request], None],
    request: Request,
) -> bool:
    """Give a decode pages for its rows, by preemption if need be; False if it was the victim.

    Drafts that find no free page are dropped: nobody is preempted for them.
    """
    known = request.computed + 1
    fitting = (len(request.pages) + pages.free) * pages.page_size
    rows = max(known, min(known + len(request.draft_token_ids), fitting))
    request.draft_token_ids = request.draft_token_ids[: rows - known]
    missing = pages.pages_for(rows) - len(request.pages)
    while missing > pages.free:
        victim = running[-1]
        preempt(victim)
        if victim is request:
            return False
    pages.extend(request.pages, rows)
    return True
