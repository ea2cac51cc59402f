"""Which prefill rows a step computes: the second and third pass of the scheduler.

Pass 2 serves running prefills in the order they were admitted, pass 3 admits waiting requests in
the order they came. Nothing is changed here: the scheduler applies the pieces.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bucketing.grid import Grid
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import Request


class Piece(NamedTuple):
    """The prefill rows that a request gets in a step, wherever they will sit."""

    request: Request
    rows: int

    @property
    def final(self) -> bool:
        """Whether the prefill ends with these rows."""
        return self.request.computed + self.rows == self.request.prefill_end


def choose_pieces(
    config: EngineConfig,
    grid: Grid,
    pool: PagePool,
    running: Sequence[Request],
    waiting: Sequence[Request],
) -> list[Piece]:
    """Return the prefill rows of a step, oldest request first; the first always gets some.

    The total is cut to fit a bucket (`Grid.fit_prefill`), and to as many requests as that bucket
    has chunks for, so that many short prompts do not open a larger bucket. A chunk may end inside
    a page: cutting it at a page boundary would leave pads in the bucket.

    Args:
        config: The engine's options.
        grid: Gives the budget and the cut.
        pool: The pages left after the decodes took theirs.
        running: Running requests, oldest first.
        waiting: Requests that may be admitted, first come first; empty to admit none.
    """
    prefilling = [request for request in running if not request.decoding]
    cap = _rows_per_request(config, grid, prefilling, running, waiting)
    wanted = _want_running(grid, pool, prefilling, cap)
    if waiting:
        wanted += _want_waiting(config, grid, pool, running, waiting, cap, wanted)
    partial_left = config.max_num_partial_prefills - len(prefilling)
    return _fit(grid, wanted, partial_left)


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
            wanted.append(Piece(request, rows))
            budget -= rows
            free -= max(0, pool.pages_for(request.computed + rows) - held)
    return wanted


def _want_waiting(
    config: EngineConfig,
    grid: Grid,
    pool: PagePool,
    running: Sequence[Request],
    waiting: Iterable[Request],
    cap: int,
    wanted: Sequence[Piece],
) -> list[Piece]:
    """Return the waiting requests to admit: all their pages must be free now, the next step's too.

    Pages that running prefills still need are spoken for, so two half-admitted prompts can never
    block each other. The first request that does not fit ends the pass: nobody overtakes it.
    """
    budget = grid.prefill.largest - sum(piece.rows for piece in wanted)
    slots = grid.max_num_seqs - len(running)
    free = pool.free - reserved_pages(pool, running)
    watermark = int(config.watermark * pool.capacity) if running else 0
    admitted: list[Piece] = []
    for request in waiting:
        need = pool.pages_for(request.admission_rows)
        if slots == 0 or budget == 0 or need > free - watermark:
            break
        rows = min(request.length, cap, budget)
        admitted.append(Piece(request, rows))
        budget -= rows
        slots -= 1
        free -= need
        watermark = int(config.watermark * pool.capacity)
    return admitted


def reserved_pages(pool: PagePool, running: Iterable[Request]) -> int:
    """Return how many free pages running prefills were promised when they were admitted."""
    return sum(
        max(0, pool.pages_for(request.admission_rows) - len(request.pages))
        for request in running
        if not request.decoding
    )


def _fit(grid: Grid, wanted: Sequence[Piece], partial_left: int) -> list[Piece]:
    """Cut the wanted rows to a bucket, to its chunks, and to the allowed partial prefills."""
    left = grid.fit_prefill(sum(piece.rows for piece in wanted))
    chunks = grid.chunks(grid.prefill.ceiling(left))
    pieces: list[Piece] = []
    for request, rows in wanted[:chunks]:
        if left == 0:
            break
        piece = Piece(request, min(rows, left))
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
