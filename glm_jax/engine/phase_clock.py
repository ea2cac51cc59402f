"""Times the phases of a step and turns what goes wrong in one into a fault of that phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from glm_jax.engine.faults import StepFault
from glm_jax.engine.outputs import HostPhases


class PhaseClock:
    """Seconds spent in each phase of a step."""

    def __init__(self, started: float) -> None:
        """Start at a reading of ``time.perf_counter``."""
        self._last = started
        self._spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and turn any exception in it into a fault of that phase."""
        try:
            yield
        except Exception as error:  # every kind: a step must not take the engine down
            raise StepFault(name, error) from error
        finally:
            self._stop(name)

    def phases(self) -> HostPhases:
        """All phases, zero where the step did not get to."""
        return HostPhases(**self._spent)

    def _stop(self, phase: str) -> None:
        """Charge the time since the last stop to a phase."""
        now = time.perf_counter()
        self._spent[phase] = self._spent.get(phase, 0.0) + now - self._last
        self._last = now
