"""Which programs are waited for before the first request, and which follow in the background."""

from collections.abc import Iterable
from typing import NamedTuple

from bucketing.cell import Cell
from bucketing.hot_cells import hot_cells
from bucketing.loop_inputs import LoopKey
from bucketing.piecewise import PieceBuckets
from bucketing.program_key import ProgramKey
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import CONTROLS, logits_key
from glm_jax.model.config import GlmConfig
from glm_jax.model.piece_shapes import kinds_of


class WarmOrder(NamedTuple):
    """Programs in the order to get them.

    Attributes:
        now: before the first request.
        later: while serving.
    """

    now: tuple[ProgramKey, ...]
    later: tuple[ProgramKey, ...]


def warm_order(model: GlmConfig, engine: EngineConfig) -> WarmOrder:
    """Order the programs that an engine may need, as grid_warm and execution_mode say.

    Pieces come first wherever a step may need them, since they serve every step; an engine whose
    grid is complete and waited for never needs any.
    """
    pieces = PieceBuckets(kinds_of(model, engine.num_drafts), engine.piecewise_axis(), ())
    cells = engine.grid().cells()
    mode = engine.execution_mode
    if mode == "eager":
        return WarmOrder((CONTROLS, *dict.fromkeys(map(logits_key, cells))), ())
    if mode == "piecewise":
        return WarmOrder((CONTROLS, *_first_pieces(engine, pieces)), pieces.rest)
    hot = hot_cells(engine.grid(), 1 + engine.num_drafts)
    waited = {"none": (), "hot": hot, "all": cells}[engine.grid_warm]
    if mode == "full":
        # Nothing else could serve the steps of a cell that is still missing.
        waited = cells
    later = [cell for cell in (*hot, *cells) if cell not in waited]
    needs_pieces = mode == "auto" and (later or not engine.grid().complete)
    now = [*(_first_pieces(engine, pieces) if needs_pieces else ()), *_with_logits(waited)]
    # Only requests with controls need it, but then a step cannot do without.
    now.append(CONTROLS)
    now += _loops(engine, waited)
    rest = [*_with_logits(later), *(pieces.rest if needs_pieces else ()), *_loops(engine, later)]
    now = dict.fromkeys(now)
    return WarmOrder(tuple(now), tuple(key for key in dict.fromkeys(rest) if key not in now))


def _with_logits(cells: tuple[Cell, ...] | list[Cell]) -> tuple[ProgramKey, ...]:
    """Cells, each behind the program that turns its rows into logits and log-probabilities.

    So whatever a step runs by, what its requests want of its rows is there.
    """
    return tuple(key for cell in cells for key in (logits_key(cell), cell))


def _loops(engine: EngineConfig, cells: Iterable[Cell]) -> list[LoopKey]:
    """The decode loops of the pure decode cells among these, if loops are switched on."""
    steps = engine.decode_loop_steps
    if steps <= 1:
        return []
    return [LoopKey(cell.groups, cell.width, steps) for cell in cells if not cell.prefill]


def _first_pieces(engine: EngineConfig, pieces: PieceBuckets) -> tuple[ProgramKey, ...]:
    """The pieces of the largest bucket, which serve any step, and the logits of its rows."""
    return (*pieces.first, logits_key(engine.widest))
