"""Records what an engine lets its executor do, so that any step can be replayed bit by bit."""

from collections.abc import Sequence
from typing import Any, cast

from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.engine.executor import Executor
from glm_jax.engine.modes import Served
from glm_jax.observe.recorded_call import RESET, RecordedCall
from glm_jax.sampling.control_update import ControlUpdate


class Recorder:
    """An executor around an executor.

    Recording waits for every step's outputs and reads all of them: it is for finding faults, not
    for serving.
    """

    def __init__(self, executor: Executor) -> None:
        """Record from now on; the device must hold nothing yet that steps will read.

        Args:
            executor: Runs the steps.
        """
        self._executor = executor
        self._calls: list[RecordedCall] = [RESET]

    @property
    def executor(self) -> Executor:
        """Itself, as what an engine takes: whatever it does not do, the executor around does."""
        return cast("Executor", self)

    def take(self) -> list[RecordedCall]:
        """Return the calls since the last time, in order."""
        calls, self._calls = self._calls, []
        return calls

    def control(self, updates: Sequence[ControlUpdate]) -> None:
        """Change control lines."""
        self._calls += map(RecordedCall.of_control, updates)
        self._executor.control(updates)

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Run a step."""
        call = RecordedCall.of_step(served, inputs)
        outputs = self._executor.run(served, inputs)
        self._calls.append(call.with_outputs(outputs))
        return outputs

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        """Run a decode loop."""
        call = RecordedCall.of_step(served, inputs, ends)
        outputs = self._executor.run_loop(served, inputs, ends)
        self._calls.append(call.with_outputs(outputs))
        return outputs

    def reset(self) -> None:
        """Make the device anew."""
        self._calls.append(RESET)
        self._executor.reset()

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to the executor."""
        return getattr(self._executor, name)
