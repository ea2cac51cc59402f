"""How many drafts the requests of a step make for the next one, and whether the drafter runs.

The scheduler asks in this order: `admit` when a request gets its slot, then per step `new_drafts`
once and `drafter` after it; `observe` per verified group and `observe_step` per step afterwards.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.step_time import StepTime
from glm_jax.engine.acceptance import Acceptance
from glm_jax.engine.draft_load import DraftLoad, Speculator
from glm_jax.engine.draft_times import DraftTimes


@runtime_checkable
class DraftPolicy(Protocol):
    """Decides draft lengths; learns from what was accepted and from step times.

    Attributes:
        acceptance: What was accepted.
        most_drafts: The most drafts of a request; with 0 it is never asked.
    """

    acceptance: Acceptance
    most_drafts: int

    def would_draft(self, groups: int) -> bool:
        """Return whether a request would speculate that decodes with so many groups.

        Then it begins with cached pages only where they hold what the drafter needs.
        """
        ...

    def admit(self, request: Speculator, groups: int) -> None:
        """Set `speculates` of a request none of whose rows is computed.

        Args:
            request: It; also after a preemption.
            groups: Groups that will decode together with it, itself included, as far as known.
        """
        ...

    def new_drafts(self, requests: Sequence[Speculator], rooms: Sequence[int]) -> list[int]:
        """Return how many drafts each request makes in this step; may end their speculation.

        Args:
            requests: Those that draw a token in this step: the groups of the next.
            rooms: Per request the most drafts that the next step can still verify, >= 0.
        """
        ...

    def drafter(self, requests: Iterable[Speculator]) -> bool:
        """Return whether the MTP layer runs over the rows of a step with these requests."""
        ...

    def observe(self, request: Speculator, drafts: int, accepted: int) -> None:
        """Learn from one verified group."""
        ...

    def observe_step(
        self, cell: Cell, drafter: bool, new_drafts: int, pairs: int, seconds: float
    ) -> None:
        """Learn from one step that ran as its cell's program.

        Args:
            cell: The program.
            drafter: Whether the MTP layer ran.
            new_drafts: The most drafts that a request made in it.
            pairs: Its scored pairs.
            seconds: Its time.
        """
        ...


class FixedDrafts:
    """Every request makes the same number of drafts, always.

    Attributes:
        most_drafts: That number; 0 never runs the drafter.
        acceptance: What was accepted.
    """

    def __init__(self, drafts: int) -> None:
        """Take the number of drafts."""
        self.most_drafts = drafts
        self.acceptance = Acceptance()

    def would_draft(self, groups: int) -> bool:
        """Return whether anyone speculates."""
        return self.most_drafts > 0

    def admit(self, request: Speculator, groups: int) -> None:
        """Let it speculate, if anyone does."""
        request.speculates = self.most_drafts > 0

    def new_drafts(self, requests: Sequence[Speculator], rooms: Sequence[int]) -> list[int]:
        """Return the fixed number, or fewer where the end is near."""
        drafts = self.most_drafts
        return [min(drafts, room) for room in rooms]

    def drafter(self, requests: Iterable[Speculator]) -> bool:
        """Return whether there are drafts at all."""
        return self.most_drafts > 0

    def observe(self, request: Speculator, drafts: int, accepted: int) -> None:
        """Count one verified group."""
        self.acceptance.observe(drafts, accepted)

    def observe_step(
        self, cell: Cell, drafter: bool, new_drafts: int, pairs: int, seconds: float
    ) -> None:
        """Learn nothing: the number is fixed."""


# Steps between two refreshes of the acceptance rates.
REFRESH_STEPS = 8
# Steps in a row at one load before its verdict ends the speculation of requests that came from
# another: a batch that grows and shrinks must not strip them for good.
PATIENCE = 32
# Verified groups that the past weighs as when speculation is tried again after a time without.
TRIAL_GROUPS = 64


class AutoDrafts:
    """Takes the draft length with the most expected tokens per second, as measured.

    Per number of groups (`DraftLoad`): expected tokens by acceptance over measured step times,
    with short visits to the other lengths. Where no length beats steps without the drafter,
    requests stop speculating for good, and new ones do not start, but for a rare trial.

    Attributes:
        acceptance: What was accepted, over all requests.
        most_drafts: The most drafts of a request.
    """

    def __init__(
        self, drafts: int, grid: Grid, step_time: StepTime, *, drafter_share: float = 0.1
    ) -> None:
        """Know nothing yet.

        Args:
            drafts: The most drafts of a request.
            grid: The compiled cells; its decode widths are the draft lengths to choose from.
            step_time: Predicts steps of cells that were not timed, and what scored pairs cost.
            drafter_share: The share of a step without drafts that the MTP layer is thought to take
                until it was measured; a little too much is better than too little, since only
                trying tells.
        """
        self.acceptance = Acceptance()
        self.most_drafts = drafts
        self._grid = grid
        self._times = DraftTimes(drafts, grid, step_time, drafter_share)
        self._loads: dict[int, DraftLoad] = {}
        self._last: DraftLoad | None = None
        self._stay = 0
        self._steps = 0

    def would_draft(self, groups: int) -> bool:
        """Return whether that pays at this load."""
        return not self._load(groups).plain

    def admit(self, request: Speculator, groups: int) -> None:
        """Let it speculate where that pays at this load, or where it is time to try again."""
        load = self._load(groups)
        request.speculates = not load.plain
        if load.plain and load.start_trial():
            self.acceptance.forget(TRIAL_GROUPS)
            request.speculates = True

    def new_drafts(self, requests: Sequence[Speculator], rooms: Sequence[int]) -> list[int]:
        """Return the load's draft length for each that speculates, or fewer; see DraftPolicy."""
        none = [0] * len(requests)
        if not requests:
            return none
        load = self._load(len(requests))
        self._stay = self._stay + 1 if load is self._last else 0
        self._last = load
        speculating = self.drafter(requests)
        if speculating:
            self._steps += 1
            if self._steps % REFRESH_STEPS == 0:
                self.acceptance.refresh(REFRESH_STEPS)
        length = load.next_length(requests, self.acceptance, speculating)
        # Of a step that runs piece by piece nothing will be heard.
        self._times.untimed_cell = False
        if load.plain and not load.exploring and self._stay >= PATIENCE:
            for request in requests:
                request.speculates = False
            return none
        if not speculating:
            return none
        if load.cuts:
            rooms = [
                min(room, load.limit(request))
                for request, room in zip(requests, rooms, strict=True)
            ]
        return [
            (length if length < room else room) if request.speculates else 0
            for request, room in zip(requests, rooms, strict=True)
        ]

    def drafter(self, requests: Iterable[Speculator]) -> bool:
        """Return whether any of them speculates."""
        return any(request.speculates for request in requests)

    def observe(self, request: Speculator, drafts: int, accepted: int) -> None:
        """Count one verified group."""
        self.acceptance.observe(drafts, accepted)
        request.acceptance.compare(drafts, accepted, self.acceptance)

    def observe_step(
        self, cell: Cell, drafter: bool, new_drafts: int, pairs: int, seconds: float
    ) -> None:
        """Learn the time of a step."""
        self._times.observe(cell, drafter, new_drafts, pairs, seconds)

    def _load(self, groups: int) -> DraftLoad:
        """Return what is known of a number of groups; those with the same bucket are alike."""
        bucket = self._grid.groups.ceiling(groups)
        load = self._loads.get(bucket)
        if load is None:
            load = self._loads[bucket] = DraftLoad(bucket, self._times)
        return load
