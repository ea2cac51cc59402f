"""Which prefill rows a step computes: the second and third pass of the scheduler.

Pass 2 serves running prefills in the order they were admitted, pass 3 admits waiting requests in
the order they came. Nothing is changed here: the scheduler applies the pieces.
"""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from bucketing.grid import Grid
from bucketing.step_time import StepTime
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.declined import Declined, Reason, by_reason, declined
from glm_jax.engine.pages import PagePool
from glm_jax.engine.prefix import PrefixCache
from glm_jax.engine.request import Request


class Piece(NamedTuple):
    """The prefill rows that a request gets in a step, wherever they will sit.

    Attributes:
        request: Who.
        rows: How many.
        start: Position of the first.
        cached: Pages of the prefix cache that hold all rows before, for a request to be admitted.
    """

    request: Request
    rows: int
    start: int = 0
    cached: Sequence[int] = ()

    @property
    def final(self) -> bool:
        """Whether the prefill ends with these rows."""
        return self.start + self.rows == self.request.prefill_end


class Decodes(NamedTuple):
    """What decodes in a step, whatever its prefill rows.

    Attributes:
        requests: Who.
        width: Rows of the longest group; 1 without groups.
        pairs: Scored pairs of all of them.
    """

    requests: Sequence[Request] = ()
    width: int = 1
    pairs: int = 0


class Rules(NamedTuple):
    """What bounds the prefill rows of every step.

    Attributes:
        config: The engine's options.
        grid: Gives the budget and the cut.
        pool: The pages left after the decodes took theirs.
        step_time: Predicts what a cut costs.
        prefix: Finds cached pages.
        drafter: Whether admitted requests will draft, and so need the drafter's entries too.
    """

    config: EngineConfig
    grid: Grid
    pool: PagePool
    step_time: StepTime
    prefix: PrefixCache
    drafter: bool


class Choice(NamedTuple):
    """The prefill rows of a step.

    Attributes:
        pieces: They.
        held: Ids of prompts that could have ended in the step, but wait for a better fit.
        overtaken: Waiting requests that others passed, since no pages are free for them.
        prefix_waits: Waiting requests whose next page is being written by another.
        declined: Who got no rows, and why; held prompts too, though some of their rows may be here.
    """

    pieces: Sequence[Piece] = ()
    held: frozenset[str] = frozenset()
    overtaken: Sequence[Request] = ()
    prefix_waits: int = 0
    declined: tuple[Declined, ...] = ()

    def unmixed(self, requests: Sequence[Request]) -> "Choice":
        """Return the same for a step that these requests may not share."""
        if not requests:
            return self
        return self._replace(declined=(*self.declined, declined(Reason.POLICY, requests)))


class _Admission(NamedTuple):
    """What the third pass found.

    Attributes:
        pieces: Of the requests to admit, in order.
        skipped: Requests without pages, each with the number of pieces before it.
        writing: Requests whose next page is being written by another.
        rest: The requests that were not looked at, and why.
    """

    pieces: list[Piece]
    skipped: list[tuple[Request, int]]
    writing: list[Request]
    rest: Sequence[tuple[Reason, Sequence[Request]]] = ()


def scored_pairs(computed: int, rows: int) -> int:
    """Return the (row, key) pairs of rows after `computed` tokens: each scores itself and before.

    Example:
        Two rows after 5 tokens score 6 + 7 pairs.
    """
    return rows * computed + rows * (rows + 1) // 2


def choose_pieces(
    rules: Rules,
    decodes: Decodes,
    running: Sequence[Request],
    waiting: Sequence[Request],
    held: Container[str] = (),
    *,
    admit: bool = True,
) -> Choice:
    """Return the prefill rows of a step, oldest request first; the first always gets some.

    The total is cut to the predicted time of a step, to fit a bucket (`Grid.fit_prefill`), and to
    as many requests as that bucket has chunks for, so that many short prompts do not open a larger
    bucket. A chunk may end inside a page: cutting it at a page boundary would leave pads in the
    bucket.

    Args:
        rules: What bounds the rows.
        decodes: What decodes in the same step.
        running: Running requests, oldest first.
        waiting: Requests that may be admitted, first come first.
        held: Ids of prompts whose end waited in the last step; it does not wait again.
        admit: Whether any of them is admitted.
    """
    config, grid, pool = rules[:3]
    prefilling = [request for request in running if not request.decoding]
    if not prefilling and not waiting:
        return Choice()
    admission = _Admission([], [], [], () if admit else [(Reason.PREEMPTION, waiting)])
    if not admit:
        waiting = ()
    cap = _rows_per_request(config, grid, prefilling, running, waiting)
    wanted = _want_running(grid, pool, prefilling, cap)
    if waiting:
        admission = _want_waiting(rules, running, waiting, cap, wanted)
        wanted += admission.pieces
    partial_left = config.max_num_partial_prefills - len(prefilling)
    left, cut = _cut(rules, decodes, wanted, held)
    chunks = grid.chunks(grid.prefill.ceiling(left))
    pieces = _take(wanted[:chunks], left, partial_left)
    served = {piece.request.request_id for piece in pieces if piece.final}
    waits = [p for p in wanted if p.final and p.request.request_id not in served]
    admitted = sum(piece.request.slot is None for piece in pieces)
    if sum(piece.rows for piece in pieces) < left:
        cut = Reason.CHUNKS if len(pieces) == chunks else Reason.PARTIAL
    notes = [
        *_unwanted(grid, prefilling, wanted),
        *_untaken(wanted, waits, len(pieces), cut),
        (Reason.NO_PAGES, [request for request, _ in admission.skipped]),
        (Reason.WRITING, admission.writing),
        *admission.rest,
    ]
    return Choice(
        pieces,
        frozenset(piece.request.request_id for piece in waits),
        [request for request, before in admission.skipped if before < admitted],
        len(admission.writing),
        by_reason(notes),
    )


def _unwanted(
    grid: Grid, prefilling: Sequence[Request], wanted: Sequence[Piece]
) -> list[tuple[Reason, Sequence[Request]]]:
    """Return the running prefills that could use no rows."""
    asking = {piece.request.request_id for piece in wanted}
    left_out = [request for request in prefilling if request.request_id not in asking]
    full = sum(piece.rows for piece in wanted) == grid.prefill.largest
    return [(Reason.BUDGET if full else Reason.NO_PAGES, left_out)]


def _untaken(
    wanted: Sequence[Piece], waits: Sequence[Piece], taken: int, cut: Reason
) -> list[tuple[Reason, Sequence[Request]]]:
    """Return who wanted rows and got none, or, held back by the fit, not all."""
    held = waits if cut is Reason.FIT else ()
    names = {piece.request.request_id for piece in held}
    rest = [p.request for p in wanted[taken:] if p.request.request_id not in names]
    return [(Reason.HELD, [piece.request for piece in held]), (cut, rest)]


def _rows_per_request(
    config: EngineConfig,
    grid: Grid,
    prefilling: Sequence[Request],
    running: Sequence[Request],
    waiting: Sequence[Request],
) -> int:
    """Return the most rows one prompt gets, so that a long one does not hold up the others.

    A request that is alone is never cut: nobody gains. The adaptive form shares the budget among
    the requests that want prefill; decodes need none of it, so they do not count.
    """
    budget = grid.prefill.largest
    threshold = config.long_prefill_token_threshold
    if threshold == 0 or len(running) + len(waiting) <= 1:
        return budget
    if not config.long_prefill_token_threshold_adaptive:
        return min(threshold, budget)
    slots = grid.max_num_seqs - len(running)
    eligible = len(prefilling) + min(len(waiting), slots)
    return min(max(threshold, budget // max(eligible, 1)), budget)


def _want_running(
    grid: Grid, pool: PagePool, prefilling: Iterable[Request], cap: int
) -> list[Piece]:
    """Return what running prefills could use of the budget and of the free pages.

    Where decodes grew into pages that admission had reserved, a prefill takes what is left or
    waits. It preempts nobody: those decodes advance in every step, and free their pages.
    """
    budget, free = grid.prefill.largest, pool.free
    wanted: list[Piece] = []
    for request in prefilling:
        held = len(request.pages)
        room = (held + free) * pool.page_size - request.computed
        rows = min(request.prefill_end - request.computed, cap, budget, room)
        if rows > 0:
            wanted.append(Piece(request, rows, request.computed))
            budget -= rows
            free -= max(0, pool.pages_for(request.computed + rows) - held)
    return wanted


def _want_waiting(
    rules: Rules,
    running: Sequence[Request],
    waiting: Sequence[Request],
    cap: int,
    wanted: Sequence[Piece],
) -> _Admission:
    """Return the waiting requests to admit: all their pages must be free now, the next step's too.

    Pages that running prefills still need are spoken for, so two half-admitted prompts can never
    block each other. The first request that does not fit ends the pass, unless it may be overtaken
    (`max_overtakes`). One whose next page is being written in this step waits in its place: in the
    next step it finds the page.
    """
    config, grid, pool, _, prefix, drafter = rules
    budget = grid.prefill.largest - sum(piece.rows for piece in wanted)
    slots = grid.max_num_seqs - len(running)
    free = pool.free - reserved_pages(pool, running)
    watermark = int(config.watermark * pool.capacity) if running else 0
    writing = {key for piece in wanted for key in prefix.being_written(piece.request, piece.start)}
    found = _Admission([], [], [])
    for index, request in enumerate(waiting):
        if slots == 0 or budget == 0:
            reason = Reason.BUDGET if slots else Reason.NO_SLOTS
            return found._replace(rest=[(reason, waiting[index:])])
        cached = prefix.hit(request, complete=drafter)
        if prefix.next_key(request, len(cached)) in writing:
            found.writing.append(request)
            continue
        need = pool.pages_for(request.admission_rows) - len(cached)
        if need <= free - watermark:
            # Cached pages that nobody owns count as free until they are taken.
            need += sum(pool.references(page) == 0 for page in cached)
        if need > free - watermark:
            if request.overtaken >= config.max_overtakes:
                behind = (Reason.OVERTAKEN, waiting[index + 1 :])
                return found._replace(rest=[(Reason.NO_PAGES, [request]), behind])
            found.skipped.append((request, len(found.pieces)))
            continue
        start = len(cached) * pool.page_size
        rows = min(request.length - start, cap, budget)
        found.pieces.append(Piece(request, rows, start, cached))
        writing.update(prefix.being_written(request, start))
        budget -= rows
        slots -= 1
        free -= need
        watermark = int(config.watermark * pool.capacity)
    return found


def reserved_pages(pool: PagePool, running: Iterable[Request]) -> int:
    """Return how many free pages running prefills were promised when they were admitted."""
    return sum(
        max(0, pool.pages_for(request.admission_rows) - len(request.pages))
        for request in running
        if not request.decoding
    )


def _cut(
    rules: Rules, decodes: Decodes, wanted: Sequence[Piece], held: Container[str]
) -> tuple[int, Reason]:
    """Return how many of the wanted rows to compute in this step, and what cuts the others."""
    total = at_least = 0
    for piece in wanted:
        total += piece.rows
        if piece.final and piece.request.request_id in held:
            at_least = total
    in_time = total
    if rules.config.max_step_ms is not None:
        in_time = _rows_in_time(rules, decodes, wanted, total, rules.config.max_step_ms / 1e3)
    groups = len(decodes.requests)
    rows = rules.grid.fit_prefill(
        in_time, rules.step_time, groups=groups, width=decodes.width, at_least=at_least
    )
    return rows, Reason.FIT if rows < in_time else Reason.STEP_TIME


def _rows_in_time(
    rules: Rules, decodes: Decodes, wanted: Sequence[Piece], total: int, seconds: float
) -> int:
    """Return how many rows a step of at most `seconds` computes, at least the smallest bucket.

    A row scores every key before it, so the count shrinks as the prefix of a long prompt grows. The
    floor keeps a prefill from starving behind decodes that take all the time themselves.
    """
    grid, groups = rules.grid, len(decodes.requests)
    floor = min(total, grid.prefill.smallest)
    for rows in (total, *reversed(grid.prefill.edges)):
        if not floor < rows <= total:
            continue
        cell = grid.cell_for(rows, 1, groups, decodes.width)
        pairs = decodes.pairs + _pairs_of(wanted, rows)
        if rules.step_time.predict(cell, pairs) <= seconds:
            return rows
    return floor


def _pairs_of(wanted: Iterable[Piece], rows: int) -> int:
    """Return the scored pairs of the first `rows` wanted rows."""
    pairs = 0
    for piece in wanted:
        taken = min(piece.rows, rows)
        pairs += scored_pairs(piece.start, taken)
        rows -= taken
    return pairs


def _take(wanted: Iterable[Piece], left: int, partial_left: int) -> list[Piece]:
    """Return the first `left` wanted rows, as far as partial prefills are allowed."""
    pieces: list[Piece] = []
    for one in wanted:
        if left == 0:
            break
        request = one.request
        piece = one._replace(rows=min(one.rows, left))
        admitted = request.slot is None
        if admitted and not piece.final:
            # Admitted and cut: one more prompt in the middle of its prefill.
            if partial_left <= 0:
                break
            partial_left -= 1
        elif piece.final and not admitted:
            partial_left += 1
        pieces.append(piece)
        left -= piece.rows
    return pieces
