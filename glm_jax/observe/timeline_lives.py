"""The lives of the requests of a log: when each came, waited, was served and ended."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from glm_jax.engine.outputs import RequestRows, StepRecord
from glm_jax.engine.step_notes import Arrival


class Wait(NamedTuple):
    """Time in which a request had no rows, though steps ran or could have run.

    Attributes:
        place: Of the step that ended it, in the log.
        since: Place of the last step that it was in; None is its arrival.
        reasons: What the steps between say of it, and how many say so.
    """

    place: int
    since: int | None
    reasons: dict[str, int]


class Service(NamedTuple):
    """A step that a request was in.

    Attributes:
        place: Of the step, in the log.
        rows: Its rows in it; of a loop, in the first step.
        chunk: Whether they sat in the prefill segment.
        verified: Drafts of it that were verified; of a loop, in all steps.
        accepted: Those that were right.
        tokens: What it got.
    """

    place: int
    rows: RequestRows
    chunk: bool
    verified: int
    accepted: int
    tokens: int


@dataclass
class Life:
    """A request from its arrival to its end.

    Attributes:
        request_id: Whose; a later request may have the same.
        first: Place of the first step that knows of it.
        arrival: How it was queued; None where the log begins later.
        waits: When it was not served; without those that nothing ended.
        services: When it was.
        end: Place of the step that tells its end; None where the log ends earlier.
        reason: Its finish reason; empty likewise.
    """

    request_id: str
    first: int
    arrival: Arrival | None = None
    waits: list[Wait] = field(default_factory=list)
    services: list[Service] = field(default_factory=list)
    end: int | None = None
    reason: str = ""
    # Since the last service.
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """All that it got."""
        return sum(service.tokens for service in self.services)

    def serve(self, service: Service) -> None:
        """Take a step that it is in."""
        before = self.services[-1].place if self.services else None
        if before is None and self.arrival is not None:
            self.waits.append(Wait(service.place, None, self.reasons))
        elif before is not None and service.place > before + 1:
            self.waits.append(Wait(service.place, before, self.reasons))
        self.reasons = {}
        self.services.append(service)


def lives_of(records: Sequence[StepRecord]) -> list[Life]:
    """Return the lives of all requests, in the order in which the log first tells of them."""
    lives: list[Life] = []
    living: dict[str, Life] = {}
    for place, record in enumerate(records):
        for arrival in record.arrived:
            if arrival.request_id in living:
                # It ended between the steps, and its id was taken at once.
                _end(living.pop(arrival.request_id), place, record)
            lives.append(Life(arrival.request_id, place, arrival))
            living[arrival.request_id] = lives[-1]
        for service, name in _services(place, record):
            if name not in living:
                lives.append(Life(name, place))
                living[name] = lives[-1]
            living[name].serve(service)
        _note_reasons(record, living)
        for name in record.ended:
            if name in living:
                _end(living.pop(name), place, record)
    return lives


def _end(life: Life, place: int, record: StepRecord) -> None:
    life.end, life.reason = place, record.ended.get(life.request_id, "")


def _note_reasons(record: StepRecord, living: dict[str, Life]) -> None:
    """Remember why who got no rows; many that wait are not all named."""
    notes = [(note.reason.value, note.request_ids) for note in record.declined]
    for reason, names in [*notes, ("preempted", record.preempted)]:
        for name in names:
            if name in living:
                reasons = living[name].reasons
                reasons[reason] = reasons.get(reason, 0) + 1


def _services(place: int, record: StepRecord) -> Iterator[tuple[Service, str]]:
    verified: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for group in record.drafts:
        name = group.request_id
        verified[name] = verified.get(name, 0) + len(group.draft_token_ids)
        accepted[name] = accepted.get(name, 0) + group.accepted
    pairs = zip(record.request_ids, record.rows, strict=True)
    for number, (name, rows) in enumerate(pairs):
        yield (
            Service(
                place,
                rows,
                number < record.chunks,
                verified.get(name, 0),
                accepted.get(name, 0),
                record.tokens.get(name, 0),
            ),
            name,
        )
