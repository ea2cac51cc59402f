"""What a step computed: its cell and the useful rows in it; waste and fitting read it."""

from typing import NamedTuple

from bucketing.cell import Cell


class StepRows(NamedTuple):
    """The shape of one step.

    Attributes:
        cell: The program it used, or that would have served it.
        prefill_rows: Useful rows of the prefill segment.
        decode_rows: Useful rows of the decode segment.
        groups: Groups with useful rows.
        width: Rows of the longest of them; 1 without groups.
        pairs: Scored pairs of the useful rows.
    """

    cell: Cell
    prefill_rows: int
    decode_rows: int
    groups: int
    width: int
    pairs: int

    @property
    def useful_rows(self) -> int:
        """Rows that are no pads."""
        return self.prefill_rows + self.decode_rows
