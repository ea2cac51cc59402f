"""What the device's control lines hold, and what they must be told before a step; host-only."""

from collections.abc import Sequence

from bucketing.step_inputs import Limits
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request
from glm_jax.sampling.control_changes import ControlChanges, RowControl
from glm_jax.sampling.control_update import IN_PROMPT, NO_TOKEN, ControlUpdate
from glm_jax.sampling.request_controls import RequestControls
from glm_jax.sampling.thinking import ThinkingPart

_FREE = RowControl()


class _Line:
    """What the device knows of the request in a slot.

    Attributes:
        request: The request.
        told: How many of its tokens are in the line.
        part: Where its text stands, if it has a thinking budget.
        rows: The rows that the device has, without free ones at the end.
    """

    __slots__ = ("part", "request", "rows", "told")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.told = 0
        self.part = ThinkingPart()
        self.rows: list[RowControl] | None = None


class ControlBook:
    """Keeps the control lines of the device up to date.

    A line is told what the rows of a step will read before that step, and nothing while a prompt is
    still being computed. It stays as it is when its request leaves the slot, until another one
    samples there: a request that comes back to an untouched line only adds what is new.
    """

    def __init__(self, limits: Limits) -> None:
        """Start with lines that say nothing, as a new device has them."""
        self._limits = limits
        self._lines: dict[int, _Line] = {}

    def clear(self) -> None:
        """Forget all lines: the device lost its slots."""
        self._lines.clear()

    def updates(self, plan: StepPlan) -> Sequence[ControlUpdate]:
        """Return the updates to dispatch before a plan's step, and take them as told.

        Most steps have no request with controls, and then there are none.
        """
        lines = self._lines
        told = [
            entry
            for entry in plan.entries
            if entry.request.controls is not None or (lines and entry.request.slot in lines)
        ]
        if not told:
            return ()
        changes = ControlChanges(self._limits.max_num_seqs + 1, self._limits.num_drafts)
        for entry in told:
            if entry.sampled:
                self._tell(entry, changes)
        return tuple(changes.packed())

    def _tell(self, entry: PlanEntry, changes: ControlChanges) -> None:
        request, slot, controls = entry.request, entry.request.slot, entry.request.controls
        assert slot is not None, f"{request} was planned without a slot"
        if controls is None:
            # The slot's last owner had some.
            del self._lines[slot]
            changes.clear(slot)
            return
        line = self._lines.get(slot)
        if line is None or line.request is not request:
            line = self._lines[slot] = _Line(request)
            changes.start(slot, controls.fill, controls.biases, controls.penalties)
        prompt, told = request.prompt_length, line.told
        if controls.penalties is not None:
            if told < prompt:
                changes.count(slot, set(request.tokens[:prompt].tolist()), IN_PROMPT)
            changes.count(slot, request.tokens[max(told, prompt) :].tolist())
        if controls.thinking is not None:
            line.part = line.part.after(request.tokens[told:].tolist(), controls.thinking)
        line.told = request.length
        rows = _rows_of(entry, controls, line.part)
        if rows != line.rows:
            line.rows = rows
            changes.set_rows(slot, rows)


def _rows_of(entry: PlanEntry, controls: RequestControls, part: ThinkingPart) -> list[RowControl]:
    """Return what holds at the row behind each draft, without free rows at the end."""
    words, thinking = controls.words, controls.thinking
    if not words and thinking is None:
        return []
    request, drafts = entry.request, list(entry.draft_token_ids)
    forced = [False] * (len(drafts) + 1)
    if thinking is not None:
        forced = part.forced(drafts, thinking)
    # A word is matched within the output only.
    first = max(request.prompt_length, request.length - words.longest)
    tail = [*request.tokens[first:].tolist(), *drafts]
    rows = []
    for number, must_end in enumerate(forced):
        seen = tail[: len(tail) - len(drafts) + number]
        end = thinking.end if thinking is not None and must_end else NO_TOKEN
        rows.append(RowControl(words.banned_after(seen), end))
    while rows and rows[-1] == _FREE:
        rows.pop()
    return rows
