"""Faults of a step by phase: who pays for them, and a way to cause them in tests."""

from collections.abc import Callable

from glm_jax.engine.plan import StepPlan

# In the order of a step. From "dispatch" on, the donated cache is lost with the step.
PHASES = ("schedule", "pack", "dispatch", "device", "fetch", "commit")
POOL_LOST = frozenset({"dispatch", "device", "fetch", "commit"})

# Called at the start of each phase with the plan (None while scheduling); it may raise.
FaultHook = Callable[[str, StepPlan | None], None]


class RequestFaultError(RuntimeError):
    """A fault whose culprits are known: only they fail.

    Attributes:
        request_ids: the requests that caused it.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.request_ids = request_ids


class StepFault(Exception):
    """An exception inside a step, with its phase."""

    def __init__(self, phase: str, cause: Exception) -> None:
        super().__init__(f"{phase}: {type(cause).__name__}: {cause}")
        self.phase = phase
        self.cause = cause

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The culprits, if the cause names them."""
        return self.cause.request_ids if isinstance(self.cause, RequestFaultError) else ()


def no_fault(phase: str, plan: StepPlan | None) -> None:
    """Cause nothing."""
