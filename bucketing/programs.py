"""The table of compiled programs: one per cell, compiled ahead of time, called by exact shape."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from bucketing.grid import Cell


class NoProgramError(LookupError):
    """A cell was asked for that has not been compiled."""


class CompileReport(NamedTuple):
    """What compiling one cell cost and what the program needs, by the compiler's own account."""

    cell: Cell
    seconds: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int  # outputs written over donated arguments


class ProgramTable:
    """Programs by cell.

    A program refuses any other shape, so nothing is ever compiled on the request path.
    """

    def __init__(self, lower: Callable[[Cell], jax.stages.Lowered]) -> None:
        """Start empty.

        Args:
            lower: traces and lowers the step of a cell.
        """
        self._lower = lower
        self._programs: dict[Cell, jax.stages.Compiled] = {}
        self.reports: dict[Cell, CompileReport] = {}

    def compile(
        self, cells: Iterable[Cell], on_done: Callable[[CompileReport], Any] | None = None
    ) -> None:
        """Compile the cells that are missing, one after the other, reporting each."""
        for cell in cells:
            if cell in self._programs:
                continue
            started = time.perf_counter()
            program = self._lower(cell).compile()
            report = _report(cell, program, time.perf_counter() - started)
            self._programs[cell] = program
            self.reports[cell] = report
            if on_done is not None:
                on_done(report)

    def __getitem__(self, cell: Cell) -> jax.stages.Compiled:
        """The program of a cell.

        Raises:
            NoProgramError: the cell was not compiled.
        """
        program = self._programs.get(cell)
        if program is None:
            known = ", ".join(map(str, sorted(self._programs))) or "none"
            raise NoProgramError(
                f"no program for {cell}; compiled: {known}. Compile it before serving."
            )
        return program

    def __contains__(self, cell: Cell) -> bool:
        """Whether the cell is compiled."""
        return cell in self._programs

    def __len__(self) -> int:
        """Number of compiled programs."""
        return len(self._programs)


def _report(cell: Cell, program: jax.stages.Compiled, seconds: float) -> CompileReport:
    memory = program.memory_analysis()
    assert memory is not None, f"no memory analysis of {cell} on this backend"
    return CompileReport(
        cell=cell,
        seconds=seconds,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
    )
