"""What must hold of every step's plan, and of the engine's books between two steps."""

from collections import Counter
from collections.abc import Iterable, Sequence

from bucketing.cell import Cell
from bucketing.program_key import ProgramKey
from glm_jax.engine.engine import Engine
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RequestStatus, RowClass


class BrokenError(AssertionError):
    """An invariant does not hold."""


def check(holds: bool, message: str) -> None:
    """Raise unless it holds.

    Raises:
        BrokenError: It does not.
    """
    if not holds:
        raise BrokenError(message)


def check_plan(engine: Engine, plan: StepPlan, decoding: Sequence[Request]) -> None:
    """Check a step that was planned and has not run.

    Args:
        engine: It planned the step.
        plan: The step.
        decoding: Who decoded before it was planned.

    Raises:
        BrokenError: See the message.
    """
    grid, config, cell = engine.scheduler.grid, engine.config, plan.cell
    rows, groups = plan.prefill_rows, len(plan.group_entries)
    check(rows <= min(grid.prefill.largest, cell.prefill), f"{rows} prefill rows in {cell}")
    check(groups <= min(grid.groups.largest, cell.groups), f"{groups} groups in {cell}")
    check(all(e.rows <= cell.width for e in plan.group_entries), f"a group is too wide for {cell}")
    ids = plan.request_ids
    check(len(set(ids)) == len(ids), f"a request is served twice: {ids}")
    for entry in plan.entries:
        _check_entry(engine, entry)
    served = set(ids)
    missed = [
        request
        for request in decoding
        if request.request_id not in served and request.status is RequestStatus.RUNNING
    ]
    if config.step_policy == "mixed":
        check(not missed, f"decodes are not served: {missed}")
    elif plan.kind != "prefill":
        check(not missed and plan.kind != "mixed", f"decodes are not served: {missed}, {plan.kind}")


def _check_entry(engine: Engine, entry: PlanEntry) -> None:
    request, pool = entry.request, engine.scheduler.pages
    check(request.status is RequestStatus.RUNNING, f"{request} is planned")
    decodes = request.computed == request.length - 1 >= request.prefill_end
    expected = RowClass.DECODE if decodes else RowClass.PREFILL
    check(entry.row_class is expected, f"{request} is planned as {entry.row_class}")
    known_end = request.computed + entry.known
    check(known_end <= request.length, f"{request} computes {entry.known} tokens")
    check(entry.sampled == (known_end == request.length), f"{request}: sampled {entry.sampled}")
    check(not entry.drafts or decodes, f"{request} verifies drafts in its prefill")
    # Never more rows than it can have, drafts included.
    check(request.computed + entry.rows <= request.most_rows, f"{request} has {entry.rows} rows")
    pages = request.pages
    check(entry.end <= len(pages) * pool.page_size, f"{request} writes behind its pages")
    published = set(pool.published)
    # A loop may write all pages it has ahead.
    for page in pages[request.computed // pool.page_size :]:
        check(pool.references(page) == 1, f"{request} writes page {page}, which others have too")
        check(page not in published, f"{request} writes page {page}, which is published")


def check_books(engine: Engine) -> None:
    """Check queues, pages and slots while no step is in flight.

    Raises:
        BrokenError: See the message.
    """
    scheduler = engine.scheduler
    pool, running = scheduler.pages, scheduler.running
    held = Counter(page for request in running for page in request.pages)
    counted = {page: pool.references(page) for page in range(pool.num_pages)}
    owned = {page: count for page, count in counted.items() if count}
    check(owned == dict(held), f"pages have {owned} owners; tables say {dict(held)}")
    check(0 not in held, "page 0 is in a table")
    check(pool.free + len(held) == pool.capacity, "pages are lost, or free twice")
    shared = {page for page, count in held.items() if count > 1}
    check(shared <= set(pool.published), f"unpublished pages are shared: {shared}")
    slots = Counter([request.slot for request in running])
    slots.update(scheduler._residents.free_slots)
    check(slots == Counter(range(engine.config.max_num_seqs)), f"slots: {slots}")
    for request in running:
        _check_running(request, pool.page_size)
    for request in scheduler.waiting:
        nothing = request.computed, request.slot, request.pages, request.published
        check(nothing == (0, None, [], 0), f"{request} waits with {nothing}")


def _check_running(request: Request, page_size: int) -> None:
    check(len(set(request.pages)) == len(request.pages), f"{request} has a page twice")
    check(request.computed < request.length <= request.max_length, f"{request} is ahead of itself")
    check(request.computed <= len(request.pages) * page_size, f"{request} lacks pages")
    check(request.synced_pages <= len(request.pages), f"{request}: the device has more pages")
    check(
        request.published * page_size <= request.computed,
        f"{request} published {request.published} pages",
    )


def check_programs(cells: Iterable[Cell], compiled: Iterable[ProgramKey]) -> None:
    """Check that a step ran in compiled cells.

    Raises:
        BrokenError: It did not.
    """
    late = set(cells).difference(compiled)
    check(not late, f"no program was compiled for {late}")


def check_idle(engine: Engine) -> None:
    """Check that all pages and slots are back.

    Raises:
        BrokenError: Some are not.
    """
    check_books(engine)
    scheduler = engine.scheduler
    check(not scheduler.has_unfinished, "requests are unfinished")
    check(not scheduler.running and not len(scheduler.waiting), "requests are left in the queues")
    check(scheduler.pages.free == scheduler.pages.capacity, "pages were not returned")
    check(not engine._entries and not engine._head_users, "the engine remembers requests")
