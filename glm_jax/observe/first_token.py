"""What the first tokens of requests waited for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm_jax.engine.outputs import StepRecord

# The part of a wait that no line of the log gives a reason for: a step that was under way when the
# request came, pauses, requests that were not named.
OTHER = "a step under way, or not named"


@dataclass(slots=True)
class FirstToken:
    """A request from its arrival to its first token.

    Attributes:
        request_id: Whose.
        seconds: All of it.
        computed: Seconds of steps that computed its rows, the last one included.
        steps: How many these were.
        waited: Seconds of the rest by what stood in its way.
    """

    request_id: str
    seconds: float = 0.0
    computed: float = 0.0
    steps: int = 0
    waited: dict[str, float] = field(default_factory=dict)


def first_tokens(records: Sequence[StepRecord]) -> list[FirstToken]:
    """Return the requests of a log that got a first token, in the order in which they got it.

    The parts of each add up to its time.
    """
    found = []
    lives: dict[str, FirstToken] = {}
    marks: dict[str, float] = {}
    for record in records:
        for arrival in record.arrived:
            lives[arrival.request_id] = FirstToken(arrival.request_id)
            marks[arrival.request_id] = arrival.time
        if not lives:
            continue
        end = record.started + record.wall_time
        served = set(record.request_ids)
        reasons = {name: note.reason for note in record.declined for name in note.request_ids}
        for name, life in lives.items():
            seconds = end - marks[name]
            marks[name] = end
            life.seconds += seconds
            if name in served:
                life.steps += 1
                life.computed += record.wall_time
                seconds -= record.wall_time
                reason = OTHER
            else:
                reason = reasons.get(name, OTHER)
            life.waited[reason] = life.waited.get(reason, 0.0) + seconds
        got = [name for name in lives if record.tokens.get(name)]
        found += [lives[name] for name in got]
        for name in (*got, *record.ended):
            lives.pop(name, None)
    return found
