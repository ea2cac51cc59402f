"""Counts XLA compilations of this process from JAX's own monitoring events.

`python tests/compile_counter.py COUNT_FILE ARGS...` runs `python ARGS...` (only `-m MODULE ...` and
`SCRIPT ...` are understood) in this process and writes the number of its compilations to
COUNT_FILE, so that programs compiled in children of the test suite are counted too.
"""

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

# One event for every executable JAX asks for: compiled by XLA or read from the persistent cache.
# (jax/_src/dispatch.py BACKEND_COMPILE_EVENT wraps compile_or_get_cached, jax 0.10.2.)
REQUESTED = "/jax/core/compile/backend_compile_duration"
# One event for each of those that came from the persistent cache.
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Executables compiled and executables read from the persistent cache since `start`."""

    def __init__(self):
        self.requested = 0
        self.cache_hits = 0
        self.children = 0
        self.operators = 0

    @contextmanager
    def single_operators(self) -> Iterator[None]:
        """Count what is compiled inside as single operators of EAGER steps, not as programs."""
        before = self.requested, self.cache_hits
        yield
        self.operators += self.requested - before[0] - (self.cache_hits - before[1])
        self.requested, self.cache_hits = before

    @property
    def compiled(self) -> int:
        """Executables that XLA really compiled, in this process and in counted children."""
        return self.requested - self.cache_hits + self.children

    def start(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def stop(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_metadata) -> None:
        if event == REQUESTED:
            self.requested += 1

    def _on_event(self, event: str, **_metadata) -> None:
        if event == CACHE_HIT:
            self.cache_hits += 1


def run_counted(count_file: Path, arguments: list[str]) -> None:
    counter = CompileCounter().start()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        count_file.write_text(str(counter.compiled))


if __name__ == "__main__":
    # The script's own folder must not shadow what the child imports.
    sys.path[0] = ""
    run_counted(Path(sys.argv[1]), sys.argv[2:])
