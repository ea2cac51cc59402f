"""What wants to know of every step and every program of an engine."""

from typing import Protocol, runtime_checkable

from glm_jax.engine.outputs import StepRecord


@runtime_checkable
class Observer(Protocol):
    """A ``StepLog``, ``Metrics``, or one's own."""

    def add(self, record: StepRecord) -> None:
        """Take a step; called between steps, so it should be quick."""
        ...

    def compiled(self, program: str, source: str, seconds: float) -> None:
        """Take a program that became available: "compiled" or "loaded"; from any thread."""
        ...
