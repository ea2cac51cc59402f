"""What a caller gets back: whole results, stream pieces, and the record of a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bucketing.grid import Cell
from glm_jax.engine.declined import Declined
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.engine.modes import Mode, Served
from glm_jax.engine.plan import NOBODY, Occupancy, StepPlan
from glm_jax.engine.request import RowClass
from glm_jax.engine.request_times import RequestTimes
from glm_jax.engine.step_notes import Arrival, GroupDrafts, StepNotes


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
        index: its number among the request's n.
    """

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    index: int = 0


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
        outputs: one per completion: n.
        drafts: what became of its drafts.
        prompt_logprobs: per prompt token, by id: the token's own, then the most likely ones; None
            for the first. None where they were not asked for, or no token was generated yet.
        num_cached_tokens: tokens of the prompt that were found in the prefix cache when it was
            first admitted; None before.
        times: when what happened to it; to its first completion.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    drafts: DraftCounts = NO_DRAFTS
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    times: RequestTimes | None = None


class StreamDelta(NamedTuple):
    """What one step added to a request.

    Attributes:
        logprobs: of its tokens; None where they were not asked for.
        prompt_logprobs: of the prompt, with the first token only.
        index: which of the request's n completions grew.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    index: int = 0


class HostPhases(NamedTuple):
    """Seconds the host spent in each phase of a step; in ``device`` it waited for the device."""

    schedule: float = 0.0
    pack: float = 0.0
    dispatch: float = 0.0
    fetch: float = 0.0
    commit: float = 0.0
    device: float = 0.0


class RequestRows(NamedTuple):
    """The rows of one request in a step.

    Attributes:
        known: committed tokens among them.
        drafts: drafts after those.
        start: position of the first row.
        prefill: whether they are of class PREFILL.
    """

    known: int
    drafts: int
    start: int
    prefill: bool


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
        halves: the cells of its two halves, where it was split; `cell` is what it was planned for.
        split_reason: why it was not, where split_steps is on.
        cached_tokens: tokens that requests admitted in it found in the prefix cache.
        prefix_waits: requests that waited because others wrote the pages they begin with.
        loop_rows: useful decode rows of all its steps.
        started: when it began, by ``time.perf_counter``.
        cpu_time: seconds of all cores together that the process used in it; 0 is not known.
        rows: the rows of each request, in the order of ``request_ids``.
        chunks: how many of them sit in the prefill segment; they come first.
        predicted: seconds that it was expected to take, a loop with all its steps.
        tokens: how many tokens each request got.
        ended: finish reasons of the requests that ended since the step before.
        arrived: requests that were queued since the step before.
        refused: requests refused meanwhile because the queue was full.
        occupancy: requests and pages when it was planned.
        queried_tokens: tokens that the requests admitted in it had.
        declined: who got no rows in it, and why.
        preempted: who lost their pages to its decodes.
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
    halves: tuple[Cell, ...] = ()
    split_reason: str = ""
    cached_tokens: int = 0
    prefix_waits: int = 0
    loop_rows: int = 0
    started: float = 0.0
    cpu_time: float = 0.0
    rows: tuple[RequestRows, ...] = ()
    chunks: int = 0
    predicted: float = 0.0
    tokens: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, str] = field(default_factory=dict)
    arrived: tuple[Arrival, ...] = ()
    refused: int = 0
    occupancy: Occupancy = NOBODY
    queried_tokens: int = 0
    declined: tuple[Declined, ...] = ()
    preempted: tuple[str, ...] = ()

    @property
    def pad_rows(self) -> int:
        """Pad rows of both segments."""
        return self.prefill_pad_rows + self.decode_pad_rows

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


def record_of(
    index: int,
    plan: StepPlan | None,
    notes: StepNotes,
    phases: HostPhases,
    wall_time: float,
    started: float = 0.0,
    cpu_time: float = 0.0,
) -> StepRecord:
    """The record of a planned step, of an idle one, or of a fault before there was a plan.

    Args:
        index: number of the step.
        plan: of the step.
        notes: what happened besides.
        phases: seconds of the host.
        wall_time: seconds of all.
        started: by ``time.perf_counter``.
        cpu_time: seconds of the process on all cores.
    """
    kind = "fault" if notes.fault else "idle" if plan is None else plan.kind
    happened: dict[str, Any] = {
        "fault": notes.fault,
        "started": started,
        "cpu_time": cpu_time,
        "tokens": notes.tokens,
        "ended": notes.ended,
        "arrived": tuple(notes.arrived),
        "refused": notes.refused,
    }
    if plan is None:
        return StepRecord(index, kind, None, 0, 0, 0, 0, (), phases, wall_time, **happened)
    return StepRecord(
        index=index,
        kind=kind,
        phases=phases,
        wall_time=wall_time,
        **_planned(plan),
        **_ran(plan, notes),
        **happened,
    )


def _planned(plan: StepPlan) -> dict[str, Any]:
    """What a record takes from its plan."""
    prefill_rows, decode_rows = plan.prefill_rows, plan.decode_rows
    cell, entries = plan.cell, plan.entries
    return {
        "cell": cell,
        "prefill_rows": prefill_rows,
        "prefill_pad_rows": cell.prefill - prefill_rows,
        "decode_rows": decode_rows,
        "decode_pad_rows": cell.groups * cell.width - decode_rows,
        "request_ids": tuple([entry.request.request_id for entry in entries]),
        "rows": tuple(
            [
                RequestRows(
                    entry.known,
                    len(entry.draft_token_ids),
                    entry.start,
                    entry.row_class is RowClass.PREFILL,
                )
                for entry in entries
            ]
        ),
        "chunks": len(plan.chunk_entries),
        "pairs": plan.pairs,
        "drafter": plan.drafter,
        "new_drafts": max([entry.new_drafts for entry in entries], default=0),
        "cached_tokens": plan.cached_tokens,
        "queried_tokens": plan.queried_tokens,
        "prefix_waits": plan.prefix_waits,
        "declined": plan.declined,
        "preempted": plan.preempted,
        "occupancy": plan.occupancy,
    }


def _ran(plan: StepPlan, notes: StepNotes) -> dict[str, Any]:
    """What a record takes from how its plan ran."""
    served = notes.served
    return {
        "mode": "" if served is None else served.mode.value,
        "mode_reason": "" if served is None else served.reason,
        "expert_rows_max": int(notes.expert_load[0]),
        "expert_rows_mean": notes.expert_load[1],
        "drafts": notes.drafts,
        "loop_steps": notes.steps,
        "loop_reason": _loop_reason(plan, served),
        "loop_rows": notes.loop_rows or plan.decode_rows,
        "predicted": plan.predicted * notes.steps,
        "halves": notes.halves,
        "split_reason": notes.split_reason,
    }


def _loop_reason(plan: StepPlan, served: Served | None) -> str:
    """Why a plan was no loop; empty where it was one, or loops are off."""
    if plan.loop_steps == 1 or served is None or served.loop:
        return plan.loop_reason
    return "the loop's program is not compiled yet" if served.mode is Mode.FULL else served.reason
