"""The course of training: phases, learning rates and the budget, all by the fraction done."""

import dataclasses

from scripts.tiny.loss import Objective
from scripts.tiny.transformer import Mode

MUON_RATE = 3e-3
ADAM_RATE = 4e-3
BIAS_RATE = 0.03
WARM_UP_STEPS = 15
DECAY_START = 0.45
LAST_RATE = 0.02


@dataclasses.dataclass(frozen=True)
class Phase:
    """One part of training.

    Attributes:
        name: letter in logs and checkpoints.
        start: fraction of the budget at which it begins.
        rows: rows per batch.
        length: trained positions per row.
        objective: what is computed.
        synthetic_share: probability that a row is synthetic.
    """

    name: str
    start: float
    rows: int
    length: int
    objective: Objective
    synthetic_share: float


_DENSE = Objective(Mode(block=128), draft_steps=1)
_GUIDED = Objective(Mode(block=128, guided=True), draft_steps=1)
_IMITATE = Objective(Mode(row_stride=16, guided=True), draft_steps=3)
_SELECT = Objective(Mode(selection="indexer", row_stride=16), draft_steps=3)
_SELECT_LONG = Objective(Mode(selection="indexer", row_stride=16), draft_steps=1)

# A: language, within index_topk, so no selection is needed. R and S: the same with more recall.
# B: longer rows, the indexer imitates dense attention, drafts are chained. C: attention sees the
# selection only. D: long rows.
PHASES = (
    Phase("A", 0.0, 8, 256, _DENSE, 0.22),
    Phase("R", 0.24, 8, 256, _DENSE, 0.4),
    Phase("S", 0.37, 8, 256, _DENSE, 0.7),
    Phase("G", 0.47, 8, 256, _GUIDED, 0.5),
    Phase("B", 0.64, 2, 1024, _IMITATE, 0.3),
    Phase("C", 0.80, 2, 1024, _SELECT, 0.3),
    Phase("D", 0.91, 1, 4096, _SELECT_LONG, 0.3),
)


def phase_at(phases: tuple[Phase, ...], fraction: float) -> int:
    """Return the index of the phase at a fraction of the budget."""
    return max(i for i, phase in enumerate(phases) if phase.start <= fraction or i == 0)


def rate_factor(fraction: float, step: int) -> float:
    """Return the factor on all learning rates: warm up, hold, then fall in a line."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    fall = (1 - fraction) / (1 - DECAY_START)
    return warm * max(LAST_RATE, min(1.0, fall))


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long to train: by the clock (`seconds`), or by steps (repeatable)."""

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        """Check that exactly one limit is given."""
        if (self.seconds is None) == (self.steps is None):
            raise ValueError(
                f"a budget has seconds or steps, got {self.seconds=} and {self.steps=}. Give one."
            )

    def fraction(self, elapsed: float, step: int) -> float:
        """Return the part of the budget that is used (at least 1 when it is used up)."""
        if self.seconds is not None:
            return elapsed / self.seconds
        return step / (self.steps or 1)
