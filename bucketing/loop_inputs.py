"""The arrays of a decode loop: several steps of the same groups in one dispatch.

A loop takes the inputs of its first step, and what follows says when it must come back to the host.
Letters as in `step_inputs`; S is the most steps of a loop.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from bucketing.cell import Cell
from bucketing.step_inputs import NO_STOP_ID, ArraySpec, Limits


class LoopKey(NamedTuple):
    """The key of the program that loops over steps of the cell (0, G, Q)."""

    groups: int
    width: int
    steps: int

    @property
    def cell(self) -> Cell:
        """The cell of each step."""
        return Cell(0, self.groups, self.width)

    def __str__(self) -> str:
        """Short, for progress and messages."""
        return f"loop of up to {self.steps} steps of {tuple(self.cell)}"


class LoopInputs(NamedTuple):
    """When a loop ends: after `steps`, or once a group ends or may need a page.

    Attributes:
        steps: Steps to run at most.
        most_rows: Rows that each group's request can ever have in the cache: its last token is
            never computed.
        page_rows: Rows that its page table on the device holds.
        min_length: Tokens that it must hold before an end token ends it.
        end_ids: Its end tokens; pads are NO_STOP_ID.
    """

    steps: Int32[Any, " ranks"]
    most_rows: Int32[Any, "ranks G"]
    page_rows: Int32[Any, "ranks G"]
    min_length: Int32[Any, "ranks G"]
    end_ids: Int32[Any, "ranks G T"]


class LoopOutputs(NamedTuple):
    """What a loop's steps drew, as `StepOutputs` has it for one; lines past `steps` are zeros."""

    steps: Int32[Any, " ranks"]
    group_tokens: Int32[Any, "ranks S G Q"]
    group_accepted: Int32[Any, "ranks S G"]
    drafts: Int32[Any, "ranks S G k"]
    expert_load: Float32[Any, "ranks S 2"]


class LoopGroup(NamedTuple):
    """What ends the loop for one group; fields as in `LoopInputs`."""

    most_rows: int
    page_rows: int
    min_length: int
    end_ids: Sequence[int]


@lru_cache(maxsize=256)
def loop_input_shapes(groups: int, limits: Limits, ranks: int = 1) -> LoopInputs:
    """Return the ArraySpec of every array, as LoopInputs."""

    def spec(*shape: int) -> ArraySpec:
        return ArraySpec((ranks, *shape), np.dtype(np.int32))

    return LoopInputs(
        spec(), spec(groups), spec(groups), spec(groups), spec(groups, limits.stop_ids)
    )


def pack_loop(
    groups: int, limits: Limits, ranks: Sequence[Sequence[LoopGroup]], *, steps: int
) -> LoopInputs:
    """Return the arrays of a loop.

    Args:
        groups: G of its cell.
        limits: The engine's limits.
        ranks: The groups of each rank, in the order of the step's groups.
        steps: Steps to run at most.
    """
    shapes = loop_input_shapes(groups, limits, len(ranks))
    arrays = LoopInputs(*(np.zeros(spec.shape, spec.dtype) for spec in shapes))
    arrays.steps[:] = steps
    arrays.end_ids[:] = NO_STOP_ID
    for index, rank in enumerate(ranks):
        if not rank:
            continue
        most, held, least, ends = zip(*rank, strict=True)
        for array, column in zip(arrays[1:4], (most, held, least), strict=True):
            array[index, : len(column)] = column
        for g, ids in enumerate(ends):
            arrays.end_ids[index, g, : len(ids)] = ids
    return arrays
