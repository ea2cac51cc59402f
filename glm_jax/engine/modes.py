"""How a step is executed, and why; the counterparts of CUDA graph FULL, PIECEWISE and NONE."""

from enum import StrEnum
from typing import NamedTuple

from bucketing.grid import Cell


class Mode(StrEnum):
    """FULL: one program. PIECEWISE: a row of small ones. EAGER: operator by operator."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    EAGER = "EAGER"


class Served(NamedTuple):
    """How an executor will run a step.

    Attributes:
        mode: The form of execution.
        layout: The cell whose array shapes the step's inputs and outputs have.
        reason: Why the step is not FULL; empty when it is.
        bucket: Rows of the pieces' programs; 0 in other modes.
        loop: Whether the program of the cell's decode loop runs several steps.
    """

    mode: Mode
    layout: Cell
    reason: str = ""
    bucket: int = 0
    loop: bool = False


def full(cell: Cell) -> Served:
    """A step run by its cell's one program."""
    return Served(Mode.FULL, cell)
