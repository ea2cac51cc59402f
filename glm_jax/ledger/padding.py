"""What a program computes for a step: whole blocks of rows, keys and experts, pads among them.

The counts are of one device whose operators cut their work as ``Blocks`` says: the CPU's
(``pallas_kernels.*.xla``), whose loops run as far as the rows and contexts of the step reach.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bucketing.cell import Cell, chunks_for
from glm_jax.ledger.ledger import Passes
from glm_jax.ledger.shape import ChunkShape, StepShape
from glm_jax.ledger.work import Segment, Work
from glm_jax.model.config import GlmConfig


class Blocks(NamedTuple):
    """How operators cut their work.

    Attributes:
        tile_rows: rows of a chunk that select and attend together.
        score_keys: keys that are scored at a time.
        attend_rows: rows that gather and attend at a time.
        expand_keys: keys that are expanded for every head at a time.
        expert_rows: the fewest and the most rows of an expert in one product, powers of two.
        selected: K, entries a row attends to.
        expands: whether a chunk of positions first to last attends to its whole context, expanded,
            and not to gathered entries.
    """

    tile_rows: int
    score_keys: int
    attend_rows: int
    expand_keys: int
    expert_rows: tuple[int, int]
    selected: int
    expands: Callable[[int, int], bool]


class _Tile(NamedTuple):
    """Some rows of a chunk: positions first .. last of a chunk from ``start`` to ``end``."""

    first: int
    last: int
    start: int
    end: int


def program_passes(
    config: GlmConfig, shape: StepShape, blocks: Blocks, shares: Sequence[float] | None = None
) -> Passes:
    """The work of a program's passes, on one device.

    Args:
        config: the model.
        shape: the step; it names the cell of the program.
        blocks: how operators cut their work.
        shares: of all rows, the part that chooses each expert, the same in every layer; together
            X. None is an even choice.

    Raises:
        ValueError: the shape names no cell.
    """
    if shape.cell is None:
        raise ValueError("the step names no cell, so no program. Give the shape a cell.")
    experts, choices = config.n_routed_experts, config.num_experts_per_tok
    even = [choices / experts] * experts
    spread = _Spread(list(shares or even), choices, blocks.expert_rows)
    target = _target(config, shape, shape.cell, blocks, spread)
    room = chunks_for(shape.cell.prefill, shape.max_num_seqs)
    first = target._replace(sampled=room + shape.cell.groups)
    return Passes(target, first, _later(config, shape, room, blocks, spread))


class _Spread(NamedTuple):
    """How rows choose experts, and how an expert's rows are cut."""

    shares: list[float]
    choices: int
    block: tuple[int, int]

    def assignments(self, rows: int, room: int) -> int:
        """Rows of all experts in whole blocks, for ``rows`` of the ``room`` that there is."""
        low, high = self.block
        mean = max(1, room * self.choices // len(self.shares))
        block = min(high, max(low, 1 << (mean - 1).bit_length()))
        return block * sum(math.ceil(share * rows / block) for share in self.shares)

    def hit(self, rows: int) -> int:
        """Experts that get a row."""
        return sum(share * rows > 0 for share in self.shares)


def _target(
    config: GlmConfig, shape: StepShape, cell: Cell, blocks: Blocks, spread: _Spread
) -> Work:
    decode_rows = cell.groups * cell.width
    chunks, absorbed_rows = _chunks(shape.chunks, cell.prefill, blocks)
    return Work(
        rows=cell.rows,
        all_rows=cell.rows,
        chunks=chunks._replace(rows=shape.prefill_rows),
        groups=_groups(shape, cell, blocks),
        up_rows=decode_rows + absorbed_rows,
        assignments=spread.assignments(shape.rows, cell.rows),
        hit=spread.hit(shape.rows),
        gathered=0.0,
        sampled=chunks_for(cell.prefill, shape.max_num_seqs) + decode_rows,
        attend_width=_attend_width(config),
    )


def _attend_width(config: GlmConfig) -> int:
    """The rope columns are mixed too, and dropped: cutting them off first would copy."""
    return 2 * (config.kv_lora_rank + config.qk_rope_head_dim)


def _chunks(chunks: Sequence[ChunkShape], prefill: int, blocks: Blocks) -> tuple[Segment, int]:
    """All tiles, and the rows of those that attend in the latent space."""
    total, absorbed = Segment(), 0
    tile_rows = min(blocks.tile_rows, prefill)
    for chunk in chunks:
        known = 0
        for tile in _tiles(chunk, tile_rows):
            if tile.last >= blocks.selected:
                keys = _whole(tile.last + 1, blocks.score_keys)
                total += Segment(scored=tile_rows * keys, scanned=keys)
            if not blocks.expands(tile.start, tile.end):
                absorbed += tile_rows
                rows = _whole(tile.last - tile.first + 1, math.gcd(tile_rows, blocks.attend_rows))
                total += Segment(attended=rows * blocks.selected, reach=tile.last + 1)
                continue
            keys = _whole(tile.last + 1, blocks.expand_keys)
            fresh = keys - known // blocks.expand_keys * blocks.expand_keys
            known = tile.last + 1
            total += Segment(expanded=fresh, masked=tile_rows * keys, reach=tile.last + 1)
    return total, absorbed


def _tiles(chunk: ChunkShape, tile_rows: int) -> list[_Tile]:
    start, end = chunk.prefix, chunk.prefix + chunk.rows - 1
    firsts = range(start, end + 1, tile_rows)
    return [_Tile(first, min(end, first + tile_rows - 1), start, end) for first in firsts]


def _groups(shape: StepShape, cell: Cell, blocks: Blocks) -> Segment:
    """All groups of the cell go together, as far as the longest context reaches."""
    if not shape.groups:
        return Segment()
    room, longest = cell.groups * cell.width, max(group.context for group in shape.groups)
    used = cell.width * (len(shape.groups) - 1) + shape.groups[-1].rows
    return _together(room, used, longest, blocks)._replace(rows=shape.decode_rows)


def _later(config: GlmConfig, shape: StepShape, room: int, blocks: Blocks, spread: _Spread) -> Work:
    """One row of each chunk and group that there is room for; unused ones attend to nothing."""
    assert shape.cell is not None
    lines = room + shape.cell.groups
    drafting = [place for place, chunk in enumerate(shape.chunks) if chunk.sampled]
    drafting += [room + place for place in range(len(shape.groups))]
    contexts = [chunk.prefix + chunk.rows + 1 for chunk in shape.chunks if chunk.sampled]
    contexts += [group.context + 1 for group in shape.groups]
    groups = Segment()
    if drafting:
        groups = _together(lines, drafting[-1] + 1, max(contexts), blocks)._replace(
            rows=len(drafting)
        )
    if config.index_share_for_mtp_iteration:
        groups = groups._replace(scored=0.0, scanned=0.0)
    return Work(
        rows=lines,
        all_rows=lines,
        chunks=Segment(),
        groups=groups,
        up_rows=lines,
        assignments=spread.assignments(len(drafting), lines),
        hit=spread.hit(len(drafting)),
        gathered=0.0,
        sampled=lines,
        attend_width=_attend_width(config),
    )


def _together(rows: int, used: int, longest: int, blocks: Blocks) -> Segment:
    """Rows of groups: scored together up to the longest context, attended to block by block."""
    scored = 0
    if longest > blocks.selected:
        scored = rows * _whole(longest, blocks.score_keys)
    attended = _whole(used, math.gcd(rows, blocks.attend_rows)) * blocks.selected
    return Segment(scored=scored, scanned=scored, attended=attended, reach=longest)


def _whole(size: int, block: int) -> int:
    """In whole blocks."""
    return -(-size // block) * block
