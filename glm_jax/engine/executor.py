"""What the engine wants of whatever runs its steps."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from bucketing.cell import Cell
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.engine.modes import Served
from glm_jax.sampling.control_update import ControlUpdate
from glm_jax.sampling.row_logprobs import RowLogprobs, RowQuestion


@runtime_checkable
class Executor(Protocol):
    """Runs packed steps; ``Runner`` on a device, a fake in tests.

    Attributes:
        drafts_write_ahead: whether making drafts writes the cache behind a step's rows.
    """

    drafts_write_ahead: bool

    @property
    def resets(self) -> int:
        """How often cache and slots were made anew, by whoever."""
        ...

    def serve(self, cell: Cell, rows: int, loop_steps: int = 1) -> Served:
        """Say how a step of so many useful rows will run, and in which layout to pack it.

        Where ``loop_steps`` is more than one and the loop's program is there, it is a loop.
        """
        ...

    def control(self, updates: Sequence[ControlUpdate]) -> None:
        """Change the control lines of the slots, before the step that reads them."""
        ...

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Dispatch one step."""
        ...

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        """Dispatch a decode loop."""
        ...

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> Float[np.ndarray, "rows V"]:
        """Logits of chosen rows of a step."""
        ...

    def logprobs(self, outputs: StepOutputs, question: RowQuestion) -> RowLogprobs:
        """Log-probabilities at chosen rows of a step."""
        ...

    def reset(self) -> None:
        """Make a new zero cache and empty slots."""
        ...
