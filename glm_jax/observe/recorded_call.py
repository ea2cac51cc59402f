"""One call of an executor as it can be made again: its arguments, and a digest of its outputs."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from bucketing.cell import Cell
from bucketing.loop_inputs import LoopInputs, LoopOutputs
from bucketing.step_inputs import Limits, StepInputs, StepOutputs, neutral_inputs
from glm_jax.engine.modes import Mode, Served
from glm_jax.observe.packed_array import read_array, write_array
from glm_jax.sampling.control_update import ControlUpdate


class RecordedCall(NamedTuple):
    """A call that changes what is on the device.

    Attributes:
        kind: "reset", "control", "run" or "loop".
        served: How a step or a loop ran; None for others.
        inputs: The arrays of a step that are not neutral, or of a control update.
        ends: What ends a loop; empty for others.
        digest: Of the outputs of a step or a loop; empty for others.
    """

    kind: str
    served: Served | None = None
    inputs: Mapping[str, np.ndarray] = {}
    ends: Mapping[str, np.ndarray] = {}
    digest: str = ""

    @classmethod
    def of_step(
        cls, served: Served, inputs: StepInputs, ends: LoopInputs | None = None
    ) -> "RecordedCall":
        """Return the call of a step or a loop, without its outputs.

        Args:
            served: How it runs.
            inputs: Packed; arrays that are the neutral ones of the layout are left out.
            ends: What ends it, if it is a loop.
        """
        changed = {
            name: array
            for name, array in inputs._asdict().items()
            # Neutral arrays are made once, and never written.
            if array.flags.writeable
        }
        kind = "run" if ends is None else "loop"
        return cls(kind, served, changed, {} if ends is None else ends._asdict())

    @classmethod
    def of_control(cls, update: ControlUpdate) -> "RecordedCall":
        """Return the call that changes control lines."""
        return cls("control", inputs=update._asdict())

    def step_inputs(self, limits: Limits) -> StepInputs:
        """Return the inputs of a step or a loop, neutral arrays included."""
        assert self.served is not None, f"a call of kind {self.kind} has no layout"
        return neutral_inputs(self.served.layout, limits)._replace(**self.inputs)

    def with_outputs(self, outputs: StepOutputs | LoopOutputs) -> "RecordedCall":
        """Return the call with the digest of its outputs."""
        return self._replace(digest=digest_of(outputs))


RESET = RecordedCall("reset")


def digest_of(outputs: StepOutputs | LoopOutputs) -> str:
    """Return a hash of all bits of a step's outputs, hidden rows included; waits for the device."""
    found = blake2b(digest_size=16)
    for name, array in outputs._asdict().items():
        host = np.asarray(array)
        found.update(f"{name} {host.dtype.str} {host.shape}".encode())
        found.update(np.ascontiguousarray(host).tobytes())
    return found.hexdigest()


def write_call(call: RecordedCall) -> list[Any]:
    """Return a call as JSON values."""
    if call.served is None:
        place = None
    else:
        mode, layout, _, bucket, _ = call.served
        place = [mode.value, list(layout), bucket]
    arrays = [
        {name: write_array(array) for name, array in part.items()}
        for part in (call.inputs, call.ends)
    ]
    return [call.kind, place, *arrays, call.digest]


def read_call(values: Sequence[Any]) -> RecordedCall:
    """Return the call of what `write_call` made.

    Raises:
        ValueError: It was made by something else.
    """
    kind, place, *packed, digest = values
    inputs, ends = ({name: read_array(array) for name, array in part.items()} for part in packed)
    served = None
    if place is not None:
        mode, layout, bucket = place
        served = Served(Mode(mode), Cell(*layout), bucket=bucket, loop=kind == "loop")
    return RecordedCall(kind, served, inputs, ends, digest)
