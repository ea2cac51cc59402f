"""The step log: one JSON line per step, and its reader."""

import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.compile_event import CompileEvent
from glm_jax.observe.log_header import LogHeader, read_header, write_header
from glm_jax.observe.recorded_call import write_call
from glm_jax.observe.recorder import Recorder
from glm_jax.observe.step_line import LoggedStep, read_line, write_line

# A reader that follows the file is at most so far behind, in seconds.
FLUSH_SECONDS = 1.0
_BUFFER_BYTES = 1 << 18


class StepLogWarning(UserWarning):
    """The log could not be written; the engine goes on without."""


class StepLog:
    """Writes a log; its ``add`` is for an engine's ``watches``.

    Lines are kept in memory for a second, so that a step waits for no disk. What an interrupted
    process had not written is lost.

    Attributes:
        path: The file.
        steps: Steps written so far.
        recorder: Where to take what the executor was told, for `glm-jax replay`; None writes none.
    """

    def __init__(self, path: str | Path, header: LogHeader) -> None:
        """Begin a file; one that is there is replaced.

        Args:
            path: The file.
            header: What runs.

        Raises:
            OSError: It cannot be written.
        """
        self.path = Path(path)
        self.steps = 0
        self.recorder: Recorder | None = None
        self._file: IO[str] = self.path.open("w", buffering=_BUFFER_BYTES, encoding="utf-8")
        # Nobody has to remember to close it: what is in memory is written when the log goes.
        self._closer = weakref.finalize(self, self._file.close)
        self._compiles: deque[CompileEvent] = deque()
        self._flushed = time.perf_counter()
        self._file.write(write_header(header) + "\n")
        self._file.flush()

    def add(self, record: StepRecord) -> None:
        """Write a step. Steps in which nothing was done and nothing happened are left out.

        A full disk must not cost anybody's tokens: the log ends with a ``StepLogWarning``.
        """
        happened = record.arrived or record.ended or record.refused
        if self._file.closed or (record.kind == "idle" and not happened):
            return
        compiles = []
        while self._compiles:
            compiles.append(self._compiles.popleft())
        calls = [] if self.recorder is None else list(map(write_call, self.recorder.take()))
        line = write_line(LoggedStep(record, tuple(compiles), calls))
        try:
            self._file.write(line + "\n")
            self.steps += 1
            if record.started - self._flushed > FLUSH_SECONDS:
                self._flushed = record.started
                self._file.flush()
        except OSError as error:
            self._give_up(error)

    def compiled(self, program: str, source: str, seconds: float) -> None:
        """Note a program that became available; from any thread.

        Args:
            program: Its name.
            source: "compiled" or "loaded".
            seconds: What was spent on it.
        """
        self._compiles.append(CompileEvent(program, source, seconds, time.perf_counter()))

    def close(self) -> None:
        """Write what is in memory and close the file; harmless if it is closed."""
        try:
            self._closer()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._closer.detach()
        with suppress(OSError):
            self._file.close()
        message = f"the step log {self.path} ends after {self.steps} steps: {error}"
        warnings.warn(message, StepLogWarning, stacklevel=3)


class StepLogFile(NamedTuple):
    """A log that was read.

    Attributes:
        header: What ran.
        steps: In order.
    """

    header: LogHeader
    steps: tuple[LoggedStep, ...]

    @property
    def records(self) -> list[StepRecord]:
        """The engine's records alone."""
        return [step.record for step in self.steps]

    @property
    def compiles(self) -> list[CompileEvent]:
        """All programs that became available."""
        return [event for step in self.steps for event in step.compiles]


def read_step_log(path: str | Path) -> StepLogFile:
    """Read a log; a last line that was cut off while it was written is left out.

    Raises:
        ValueError: The file is no step log, or a line of it is none.
        OSError: It cannot be read.
    """
    with Path(path).open(encoding="utf-8") as file:
        header = read_header(file.readline())
        return StepLogFile(header, tuple(_steps(file)))


def _steps(file: IO[str]) -> Iterator[LoggedStep]:
    for text in file:
        if not text.endswith("\n"):
            return
        yield read_line(text)
