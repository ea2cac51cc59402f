"""Which programs an engine needs: whole steps, pieces, and logits of a step's rows."""

from bucketing.cell import Cell
from bucketing.piecewise import Piece, PieceBuckets
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import logits_key

ProgramKey = Cell | Piece


def full_keys(engine: EngineConfig) -> tuple[ProgramKey, ...]:
    """Every cell of the grid, and the logits of its rows."""
    cells = engine.grid().cells()
    return (*cells, *dict.fromkeys(map(logits_key, cells)))


def piece_keys(engine: EngineConfig, pieces: PieceBuckets) -> tuple[ProgramKey, ...]:
    """The pieces that a start needs: those of the largest bucket, and the logits of its rows."""
    return (*pieces.first, logits_key(engine.widest))
