"""What a caller gets back: whole results, stream pieces, and the record of a step."""

from dataclasses import dataclass
from typing import NamedTuple

from bucketing.grid import Cell
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.engine.modes import Mode, Served
from glm_jax.engine.plan import StepPlan


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        text: the text so far; empty when nothing is detokenised.
        token_ids: the tokens so far, the ending one included.
        finish_reason: "stop", "length", "abort", "error", or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS and the rest.
        error: what went wrong, with finish reason "error".
        logprobs: per token, by id: the token's own, then the most likely ones and those of
            ``logprob_token_ids``; None where they were not asked for.
        cumulative_logprob: the sum of the tokens' own, likewise.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None


class DraftCounts(NamedTuple):
    """What became of a request's drafts.

    Attributes:
        verified_groups: Steps that verified drafts of it.
        draft_tokens: Drafts that were verified.
        accepted_tokens: Those that are among its tokens.
    """

    verified_groups: int
    draft_tokens: int
    accepted_tokens: int

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per verifying step: accepted drafts and the one after them; 1 without steps."""
        return 1.0 + self.accepted_tokens / max(self.verified_groups, 1)


NO_DRAFTS = DraftCounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and what it has generated.

    Attributes:
        prompt: its text, if it came as text.
        drafts: what became of its drafts.
        prompt_logprobs: per prompt token, by id: the token's own, then the most likely ones; None
            for the first. None where they were not asked for, or no token was generated yet.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    drafts: DraftCounts = NO_DRAFTS
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class StreamDelta(NamedTuple):
    """What one step added to a request.

    Attributes:
        logprobs: of its tokens; None where they were not asked for.
        prompt_logprobs: of the prompt, with the first token only.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None


class GroupDrafts(NamedTuple):
    """The drafts that a step verified for one request; the first ``accepted`` were right."""

    request_id: str
    draft_token_ids: tuple[int, ...]
    accepted: int

    @property
    def accepted_token_ids(self) -> tuple[int, ...]:
        """The accepted ones."""
        return self.draft_token_ids[: self.accepted]


class HostPhases(NamedTuple):
    """Seconds the host spent in each phase of a step; device time is inside ``fetch``."""

    schedule: float = 0.0
    pack: float = 0.0
    dispatch: float = 0.0
    fetch: float = 0.0
    commit: float = 0.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did and cost.

    Attributes:
        index: number of the step since the engine started.
        kind: "prefill", "decode" or "mixed", by the classes of the requests in it; "fault" when
            the step was lost; "idle" when there was nothing to do.
        cell: the cell it was planned for; None for an idle step or a fault before planning.
        mode: "FULL" (the cell's program), "PIECEWISE" or "EAGER"; empty when nothing was run.
        mode_reason: why it was not FULL; empty when it was.
        pairs: (row, key) pairs that an indexer layer scored.
        prefill_rows: useful rows of the prefill segment.
        prefill_pad_rows: its pad rows.
        decode_rows: useful rows of the decode segment.
        decode_pad_rows: its pad rows.
        request_ids: who was in it, prefill segment first.
        phases: host time per phase, seconds.
        wall_time: the whole step, seconds.
        fault: phase and message of a fault.
        expert_rows_max: rows that the busiest expert of any layer got.
        expert_rows_mean: mean over experts and layers.
        drafter: whether the MTP layer ran.
        new_drafts: the most drafts that it made for a request.
        drafts: what was verified, one entry per request with drafts (and step of a loop).
        loop_steps: steps that ran in this one dispatch. Rows, pairs and pads are those of the
            first; drafts are those of all.
        loop_reason: why it was one step, where decode loops are switched on.
    """

    index: int
    kind: str
    cell: Cell | None
    prefill_rows: int
    prefill_pad_rows: int
    decode_rows: int
    decode_pad_rows: int
    request_ids: tuple[str, ...]
    phases: HostPhases
    wall_time: float
    fault: str | None = None
    mode: str = ""
    mode_reason: str = ""
    pairs: int = 0
    expert_rows_max: int = 0
    expert_rows_mean: float = 0.0
    drafter: bool = False
    new_drafts: int = 0
    drafts: tuple[GroupDrafts, ...] = ()
    loop_steps: int = 1
    loop_reason: str = ""

    @property
    def draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(len(group.draft_token_ids) for group in self.drafts)

    @property
    def accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(group.accepted for group in self.drafts)


class StepResult(NamedTuple):
    """Stream pieces of a step and its record."""

    deltas: list[StreamDelta]
    record: StepRecord


@dataclass(slots=True)
class StepNotes:
    """What the engine notes while a step runs.

    Attributes:
        served: how it runs; None until that is known.
        fault: phase and message.
        expert_load: most and mean rows of an expert.
        drafts: what was verified.
        steps: steps that ran in the dispatch.
    """

    served: Served | None = None
    fault: str | None = None
    expert_load: tuple[float, float] = (0.0, 0.0)
    drafts: tuple[GroupDrafts, ...] = ()
    steps: int = 1


def record_of(
    index: int, plan: StepPlan | None, notes: StepNotes, phases: HostPhases, wall_time: float
) -> StepRecord:
    """The record of a planned step, of an idle one, or of a fault before there was a plan."""
    served, fault = notes.served, notes.fault
    if plan is None:
        kind = "fault" if fault else "idle"
        return StepRecord(index, kind, None, 0, 0, 0, 0, (), phases, wall_time, fault)
    return StepRecord(
        index=index,
        kind="fault" if fault else plan.kind,
        cell=plan.cell,
        prefill_rows=plan.prefill_rows,
        prefill_pad_rows=plan.prefill_pad_rows,
        decode_rows=plan.decode_rows,
        decode_pad_rows=plan.decode_pad_rows,
        request_ids=plan.request_ids,
        phases=phases,
        wall_time=wall_time,
        fault=fault,
        mode="" if served is None else served.mode.value,
        mode_reason="" if served is None else served.reason,
        pairs=plan.pairs,
        expert_rows_max=int(notes.expert_load[0]),
        expert_rows_mean=notes.expert_load[1],
        drafter=plan.drafter,
        new_drafts=max((entry.new_drafts for entry in plan.entries), default=0),
        drafts=notes.drafts,
        loop_steps=notes.steps,
        loop_reason=_loop_reason(plan, served),
    )


def _loop_reason(plan: StepPlan, served: Served | None) -> str:
    """Why a plan was no loop; empty where it was one, or loops are off."""
    if plan.loop_steps == 1 or served is None or served.loop:
        return plan.loop_reason
    return "the loop's program is not compiled yet" if served.mode is Mode.FULL else served.reason
