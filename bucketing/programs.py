"""The table of compiled programs: one per key, compiled ahead of time, called by exact shape.

A key is whatever names one program: the cell of a whole step, or a piece of one.
"""

import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import jax
from jax.experimental.compilation_cache import compilation_cache


class NoProgramError(LookupError):
    """A program was asked for that has not been compiled."""


class CompileReport(NamedTuple):
    """What getting one program cost and what it needs, by the compiler's own account.

    Attributes:
        key: The program's key.
        source: Whether this process, or a child of it, compiled the program in this run, or it was
            there from an earlier one.
        seconds: What this run spent: lowering and compiling, or loading.
        compile_seconds: What lowering and compiling took whenever that was.
        argument_bytes: Weights, cache, slots and inputs.
        output_bytes: Outputs, donated ones included.
        temporary_bytes: Scratch memory while it runs.
        aliased_bytes: Outputs written over donated arguments.
        code_bytes: Machine code, where the compiler says (0 on CPU).
        stored_bytes: Size on disk; 0 when it is not stored.
        problem: Why it is not stored; empty when it is, or when nobody wanted to.
    """

    key: Hashable
    source: Literal["compiled", "loaded"]
    seconds: float
    compile_seconds: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    code_bytes: int = 0
    stored_bytes: int = 0
    problem: str = ""


class ProgramTable:
    """Programs by key; programs are added, never replaced or removed.

    A program refuses any other shape, so nothing is ever compiled on the request path. A loader
    thread may add while the serving thread looks up.

    Attributes:
        reports: What each program cost and needs.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._programs: dict[Hashable, jax.stages.Compiled] = {}
        self.reports: dict[Hashable, CompileReport] = {}

    def add(self, key: Hashable, program: jax.stages.Compiled, report: CompileReport) -> bool:
        """Make a program available; from then on every lookup finds it.

        Returns:
            Whether it was added: False when the key has a program already, which then stays.
        """
        with self._lock:
            if key in self._programs:
                return False
            # The report first: who finds the program finds its report.
            self.reports[key] = report
            self._programs[key] = program
            return True

    def get(self, key: Hashable) -> jax.stages.Compiled | None:
        """The program of a key, or None while it is not compiled."""
        return self._programs.get(key)

    def __getitem__(self, key: Hashable) -> jax.stages.Compiled:
        """The program of a key.

        Raises:
            NoProgramError: it was not compiled.
        """
        program = self._programs.get(key)
        if program is None:
            known = ", ".join(sorted(map(str, self))) or "none"
            raise NoProgramError(
                f"no program for {key}; compiled: {known}. Compile it before serving."
            )
        return program

    def __contains__(self, key: object) -> bool:
        """Whether the key's program is compiled."""
        return key in self._programs

    def __iter__(self) -> Iterator[Hashable]:
        """The keys compiled by now."""
        with self._lock:
            return iter(tuple(self._programs))

    def __len__(self) -> int:
        """Number of compiled programs."""
        return len(self._programs)


def compile_program(
    lower: Callable[..., jax.stages.Lowered], key: Hashable
) -> tuple[jax.stages.Compiled, CompileReport]:
    """Lower and compile the program of a key, by the compiler and not out of JAX's own cache."""
    started = time.perf_counter()
    with _without_jax_cache():
        program = lower(key).compile()
    seconds = time.perf_counter() - started
    memory = program.memory_analysis()
    assert memory is not None, f"no memory analysis of {key} on this backend"
    report = CompileReport(
        key=key,
        source="compiled",
        seconds=seconds,
        compile_seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )
    return program, report


@contextmanager
def _without_jax_cache() -> Generator[None]:
    """Switch JAX's persistent cache off for a moment, where the user has set one up.

    An executable that JAX read from its cache can be serialised again, but the copy has lost code:
    it loads and then fails when called (jax 0.10.2, CPU: "Function ... not found").
    """
    if not (jax.config.values["jax_enable_compilation_cache"] and _jax_cache_folder()):
        yield
        return
    # JAX looks at the switch once and remembers; reset_cache makes it look again.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def _jax_cache_folder() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]
