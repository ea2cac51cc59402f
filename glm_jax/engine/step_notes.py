"""What the engine notes while a step runs, for the step's record."""

from dataclasses import dataclass, field
from typing import NamedTuple

from bucketing.cell import Cell
from glm_jax.engine.modes import Served
from glm_jax.engine.request import FinishReason, Request


class GroupDrafts(NamedTuple):
    """The drafts that a step verified for one request; the first ``accepted`` were right."""

    request_id: str
    draft_token_ids: tuple[int, ...]
    accepted: int

    @property
    def accepted_token_ids(self) -> tuple[int, ...]:
        """The accepted ones."""
        return self.draft_token_ids[: self.accepted]


class Arrival(NamedTuple):
    """A request that was queued.

    Attributes:
        request_id: the scheduler's: that of one completion.
        time: when, by ``time.perf_counter``.
        prompt_tokens: length of its prompt.
        max_tokens: what it may generate; None is as much as fits.
        n: completions of the user's request; 0 for all but the first of them.
    """

    request_id: str
    time: float
    prompt_tokens: int
    max_tokens: int | None = None
    n: int = 1


@dataclass(slots=True)
class StepNotes:
    """What happened from the end of one step to the end of the next.

    Attributes:
        served: how the step runs; None until that is known.
        fault: phase and message.
        expert_load: most and mean rows of an expert.
        drafts: what was verified.
        steps: steps that ran in the dispatch.
        loop_rows: useful rows of all steps of a loop; 0 where it was none.
        tokens: how many each request got.
        ended: finish reasons of those that ended, aborted between two steps too.
        arrived: who was queued.
        refused: how many requests were refused because the queue was full.
        halves: the cells of its two halves, where it was split.
        split_reason: why it was not, where split_steps is on.
    """

    served: Served | None = None
    fault: str | None = None
    expert_load: tuple[float, float] = (0.0, 0.0)
    drafts: tuple[GroupDrafts, ...] = ()
    steps: int = 1
    loop_rows: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    arrived: list[Arrival] = field(default_factory=list)
    refused: int = 0
    halves: tuple[Cell, ...] = ()
    split_reason: str = ""

    def arrive(self, request: Request, now: float, n: int) -> None:
        """Note a request that was queued."""
        name, wanted = request.request_id, request.params.max_tokens
        self.arrived.append(Arrival(name, now, request.prompt_length, wanted, n))

    def give(self, request_id: str, tokens: int, reason: FinishReason | None) -> None:
        """Note what a request got, and whether that was its end."""
        if tokens:
            self.tokens[request_id] = self.tokens.get(request_id, 0) + tokens
        if reason is not None:
            self.ended[request_id] = reason.value
