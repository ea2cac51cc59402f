"""Runs recorded calls again and compares their outputs bit by bit."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bucketing.loop_inputs import LoopInputs
from bucketing.step_inputs import Limits
from glm_jax.engine.executor import Executor
from glm_jax.observe.recorded_call import RecordedCall, digest_of
from glm_jax.sampling.control_update import ControlUpdate


class Replayed(NamedTuple):
    """A step or a loop that ran again.

    Attributes:
        call: As it was recorded.
        digest: Of its outputs now.
    """

    call: RecordedCall
    digest: str

    @property
    def equal(self) -> bool:
        """Whether every bit is as it was."""
        return self.digest == self.call.digest


def replay(calls: Iterable[RecordedCall], executor: Executor, limits: Limits) -> Iterator[Replayed]:
    """Yield every step of recorded calls, as it is run again.

    The state of the device is built by running all calls from the first on: a step alone would find
    an empty cache.

    Args:
        calls: From the beginning of a recording.
        executor: Of the same model and options.
        limits: Of its engine.
    """
    for call in calls:
        if call.kind == "reset":
            executor.reset()
        elif call.kind == "control":
            executor.control([ControlUpdate(**call.inputs)])
        else:
            assert call.served is not None, f"a call of kind {call.kind} has no layout"
            inputs = call.step_inputs(limits)
            if call.ends:
                outputs = executor.run_loop(call.served, inputs, LoopInputs(**call.ends))
            else:
                outputs = executor.run(call.served, inputs)
            yield Replayed(call, digest_of(outputs))
