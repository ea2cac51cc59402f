"""A program that became available while an engine ran."""

from typing import NamedTuple


class CompileEvent(NamedTuple):
    """One compilation, or the loading of a stored program.

    Attributes:
        program: Its name.
        source: "compiled" or "loaded".
        seconds: What this run spent on it, here or in a child process.
        ended: When it was there, by ``time.perf_counter``.
    """

    program: str
    source: str
    seconds: float
    ended: float

    @property
    def started(self) -> float:
        """When it began."""
        return self.ended - self.seconds
