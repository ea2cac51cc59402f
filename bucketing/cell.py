"""One cell of the grid: the shape of a step's rows, which names one compiled program."""

from typing import NamedTuple


class Cell(NamedTuple):
    """One compiled program: P prefill rows, G decode groups, Q rows per group."""

    prefill: int
    groups: int
    width: int

    @property
    def rows(self) -> int:
        """Rows the program computes, pads included."""
        return self.prefill + self.groups * self.width


def chunks_for(prefill: int, max_num_seqs: int) -> int:
    """Return J, the number of chunks a prefill bucket can hold; it depends on P only."""
    if prefill == 0:
        return 0
    return min(max_num_seqs, max(4, prefill // 16))
