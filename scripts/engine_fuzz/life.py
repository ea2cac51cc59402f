"""One life of an engine, as JSON can hold it: limits, who comes when, what goes wrong."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from glm_jax.engine.faults import PHASES
from scripts.engine_fuzz.wish import Wish
from scripts.fuzz_schedules import Asked, Schedule, Target, draw_schedule


class Guest(NamedTuple):
    """A request, when it comes, and when it is aborted.

    Attributes:
        wish: What it asks for.
        step: It is added before this step.
        abort: Step and phase at whose start it is aborted; phase "" is before the step.
    """

    wish: Wish
    step: int
    abort: tuple[int, str] | None = None


class Fault(NamedTuple):
    """Something that goes wrong.

    Attributes:
        step: In which step.
        phase: At the start of which phase.
        kind: "nobody" names no culprit, "culprit" the first request of the step, "interrupt" is
            Ctrl-C.
    """

    step: int
    phase: str
    kind: str


KINDS = ("nobody", "nobody", "culprit", "interrupt")


@dataclass(frozen=True)
class Life:
    """Everything that decides what happens.

    Attributes:
        guests: The requests; number n is "r{n}".
        mode: An execution mode, or "loop".
        drafts: The most drafts of a request, or "auto".
        drafter: "own" are the model's, others are scripts.
        budget: The most prefill rows of a step.
        slots: The most requests at once.
        least_width: The least width of a cell with groups.
        options: Other options of the engine.
        faults: What goes wrong.
    """

    guests: Sequence[Guest]
    mode: str = "full"
    drafts: int | str = 0
    drafter: str = "own"
    budget: int = 64
    slots: int = 4
    least_width: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    faults: Sequence[Fault] = ()

    @property
    def schedule(self) -> Schedule:
        """Its limits."""
        return Schedule(
            dict(self.options), self.budget, self.slots, self.least_width, [], self.drafts
        )

    @property
    def last_step(self) -> int:
        """The step before which the last guest comes."""
        return max((guest.step for guest in self.guests), default=0)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        guests = [
            {"wish": dataclasses.asdict(guest.wish), "step": guest.step, "abort": guest.abort}
            for guest in self.guests
        ]
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "guests": guests,
            "faults": [fault._asdict() for fault in self.faults],
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Life":
        """Read it back."""
        guests = [
            Guest(Wish(**one["wish"]), one["step"], tuple(one["abort"]) if one["abort"] else None)
            for one in found["guests"]
        ]
        faults = [Fault(**one) for one in found["faults"]]
        fields: dict[str, Any] = {**found, "guests": guests, "faults": faults}
        return cls(**fields)


def draw_life(
    rng: Random, llm: Target, block: Sequence[Wish], modes: Sequence[tuple[str, float]]
) -> Life:
    """Draw a life.

    Args:
        rng: Decides.
        llm: Its compiled cells bound it.
        block: The wishes to draw guests from.
        modes: Execution modes, and how often each.
    """
    # Neighbours of the block often begin alike, and equal ones come again.
    first = rng.randrange(len(block))
    block = block[first : first + rng.choice([1, 2, 3, 5, len(block)])]
    asked = [Asked(list(wish.prompt), wish.sampling) for wish in block]
    drawn = draw_schedule(rng, llm, asked)
    names, weights = zip(*modes, strict=True)
    mode = rng.choices(names, weights)[0]
    # An EAGER step takes a second or more.
    most = 2 if mode == "eager" else len(drawn.arrivals)
    troubled = rng.random() < 0.3
    guests = [
        Guest(block[one.number], one.step, _draw_abort(rng, one.step, often=troubled))
        for one in drawn.arrivals[:most]
    ]
    faults = []
    if troubled:
        steps = [rng.randint(0, 25) for _ in range(rng.randint(0, 4))]
        faults = [Fault(step, rng.choice(PHASES), rng.choice(KINDS)) for step in steps]
        if rng.random() < 0.2:
            # The same step again and again: nobody makes progress.
            faults += [Fault(step + 1, "device", "nobody") for step in steps[:1]]
    seedless = any(guest.wish.params.get("seed") is None for guest in guests)
    drafter = rng.choice(["own", "own", "right", "wrong", "half"])
    if drawn.drafts == 0 or mode == "loop" or seedless:
        # A loop drafts on the device; of a request without a seed nobody knows what it will draw.
        drafter = "own"
    options = {**drawn.options, **_draw_options(rng, splits=drafter == "own")}
    return Life(
        guests,
        mode,
        rng.choice([drawn.drafts, drawn.drafts, "auto"]) if drawn.drafts else 0,
        drafter,
        drawn.budget,
        drawn.slots,
        drawn.least_width,
        options,
        faults,
    )


def _draw_abort(rng: Random, step: int, *, often: bool) -> tuple[int, str] | None:
    if rng.random() > (0.3 if often else 0.03):
        return None
    return step + rng.randint(0, 12), rng.choice(["", *PHASES])


def _draw_options(rng: Random, *, splits: bool) -> dict[str, Any]:
    """Draw engine options beside those of `draw_schedule`."""
    return {
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "max_overtakes": rng.choice([0, 0, 1, 3]),
        "max_queued_requests": rng.choice([None, None, None, 1, 3]),
        "enable_prefix_caching": rng.random() < 0.9,
        "split_steps": splits and rng.random() < 0.2,
        "max_step_ms": rng.choice([None, None, None, 0.6, 0.8]),
        "tbt_target_ms": rng.choice([None, None, 3.0]),
    }
