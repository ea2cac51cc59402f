"""What each step of a log counts, as curves of a timeline."""

from collections.abc import Iterator, Sequence

from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.timeline_event import Event, TimelineClock, counter_event

TOKENS = "rows of a step"
REQUESTS = "requests"
PAGES = "pages without owner"
DRAFTS = "drafts of a step"


def counter_events(
    records: Sequence[StepRecord], clock: TimelineClock, process: int
) -> Iterator[Event]:
    """Yield the curves; each value holds from the beginning of its step to that of the next.

    Args:
        records: The steps, in order.
        clock: Of the timeline.
        process: Where they stand.
    """
    last: dict[str, dict[str, int]] = {}
    for record in records:
        time = clock.at(record.started)
        for name, values in _values(record).items():
            # The rows of every step are told, so that they add up; of the others only changes.
            if name in (TOKENS, DRAFTS) or last.get(name) != values:
                yield counter_event(process, name, time, values)
        last |= _values(record)
    if records:
        end = clock.at(records[-1].started + records[-1].wall_time)
        for name in (TOKENS, DRAFTS):
            if name in last:
                yield counter_event(process, name, end, dict.fromkeys(last[name], 0))


def prefill_rows(record: StepRecord) -> int:
    """Return the rows of prompts in a step, wherever they sat."""
    return sum(rows.known for rows in record.rows if rows.prefill)


def decode_rows(record: StepRecord) -> int:
    """Return the rows of decoding requests in a step, drafts included; of a loop, of all steps."""
    useful = record.prefill_rows + (record.loop_rows or record.decode_rows)
    return useful - prefill_rows(record)


def _values(record: StepRecord) -> dict[str, dict[str, int]]:
    values = {}
    if record.cell is not None:
        # The rows of a fault are lost; they are computed again, and counted then.
        kept = record.fault is None
        values[TOKENS] = {
            "prefill": prefill_rows(record) * kept,
            "decode": decode_rows(record) * kept,
        }
        occupancy = record.occupancy
        values[REQUESTS] = {"running": occupancy.running, "waiting": occupancy.waiting}
        values[PAGES] = {
            "cached": occupancy.cached_pages,
            "empty": occupancy.free_pages - occupancy.cached_pages,
        }
    if record.drafts:
        accepted = record.accepted_tokens
        values[DRAFTS] = {"accepted": accepted, "refused": record.draft_tokens - accepted}
    return values
