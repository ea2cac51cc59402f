"""Captures a few steps with JAX's profiler; every step is marked with its number."""

from pathlib import Path

import jax

from glm_jax.engine.outputs import StepRecord

# What the marks are called; "step_num" is the number of the step.
MARK = "engine step"


class Profile:
    """Profiles the steps that follow the next one; an ``Observer``.

    The first step that it is told of is not in the profile: where the engine has just started, it
    is slower than the others. A mark reaches from the end of the step before to the end of its own,
    so it holds what the caller did between them. Steps in which there was nothing to do have marks
    but are not counted. Ending the profile takes up to a second, between two steps.

    The profiler knows marks by thread: all of this is called by the thread that runs the steps.

    Example:
        ``with closing(Profile("profile", steps=20)) as profile: llm.watch(profile); ...``

    Attributes:
        folder: Where the profile is written, as TensorBoard and XProf expect it.
        steps: Steps to capture.
        captured: Steps captured so far.
    """

    def __init__(self, folder: str | Path, *, steps: int) -> None:
        """Wait for the first step.

        Args:
            folder: Where to write; made if it is missing.
            steps: How many to capture.

        Raises:
            ValueError: There are no steps to capture.
        """
        if steps < 1:
            raise ValueError(f"profile steps is {steps}; allowed: an integer >= 1.")
        self.folder = Path(folder)
        self.steps = steps
        self.captured = 0
        self._started = False
        self._mark: jax.profiler.StepTraceAnnotation | None = None

    @property
    def running(self) -> bool:
        """Whether the profiler is on."""
        return self._mark is not None

    def add(self, record: StepRecord) -> None:
        """Take a step; it starts and ends the profile.

        Raises:
            RuntimeError: Another profile is running in this process.
        """
        if not self._started:
            self._start()
        elif self._mark is not None:
            self._leave(self._mark)
            self.captured += record.kind != "idle"
            if self.captured == self.steps:
                jax.profiler.stop_trace()
                return
        else:
            return
        self._mark = jax.profiler.StepTraceAnnotation(MARK, step_num=record.index + 1)
        self._mark.__enter__()

    def compiled(self, program: str, source: str, seconds: float) -> None:
        """Ignore programs; the profiler sees compilations of this process by itself."""

    def close(self) -> None:
        """End the profile, if it is running, with the steps captured so far."""
        if self._mark is not None:
            self._leave(self._mark)
            jax.profiler.stop_trace()

    def _start(self) -> None:
        options = jax.profiler.ProfileOptions()
        # Calls of Python functions would slow down the host and hide the marks.
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self._started = True

    def _leave(self, mark: jax.profiler.StepTraceAnnotation) -> None:
        mark.__exit__(None, None, None)
        self._mark = None
