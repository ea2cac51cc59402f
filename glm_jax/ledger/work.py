"""How much there is to do in one pass over a step's rows, on the busiest device."""

from collections.abc import Sequence
from typing import NamedTuple

from bucketing.cell import chunks_for
from glm_jax.ledger.layout import Layout, distinct_experts
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.model.config import GlmConfig


class Segment(NamedTuple):
    """One segment's rows in attention.

    Attributes:
        rows: useful rows.
        scored: pairs of a row and a key that the indexer scores.
        scanned: index keys that are read for that.
        attended: pairs of a row and a selected key.
        reach: cache entries that the rows may see together.
        expanded: keys made for every head; none where attention stays in the latent space.
        masked: pairs of a row and such a key.
    """

    rows: float = 0.0
    scored: float = 0.0
    scanned: float = 0.0
    attended: float = 0.0
    reach: float = 0.0
    expanded: float = 0.0
    masked: float = 0.0

    def __add__(self, other: object) -> "Segment":
        """Both together."""
        assert isinstance(other, Segment)
        return Segment(*(a + b for a, b in zip(self, other, strict=True)))

    def scaled(self, factor: float) -> "Segment":
        """A part of it; keys are seen by every part whole."""
        rows, scored, _, attended, _, _, masked = (value * factor for value in self)
        return self._replace(rows=rows, scored=scored, attended=attended, masked=masked)


class Work(NamedTuple):
    """One pass.

    Attributes:
        rows: rows of the busiest device in operators that compute pads too.
        all_rows: the same of all devices.
        chunks: attention of the prefill segment.
        groups: attention of the decode segment.
        up_rows: rows through the up-projections between latents and heads.
        assignments: rows of experts, of all devices.
        hit: experts that any row reaches.
        gathered: cache entries sent to the other devices, for chunks whose rows are split.
        sampled: rows that the head projects, of all devices.
        attend_width: multiply-adds of a pair in attention, per head.
    """

    rows: float
    all_rows: float
    chunks: Segment
    groups: Segment
    up_rows: float
    assignments: float
    hit: float
    gathered: float
    sampled: float
    attend_width: int

    @property
    def useful(self) -> float | int:
        """Rows of the busiest device that are no pads."""
        return self.chunks.rows + self.groups.rows


class Method(NamedTuple):
    """How the indexer works.

    Attributes:
        shares_keys: the rows of a group share one read of its index keys; otherwise each reads
            them (peers that flatten verify rows do).
        fused_topk: the selection is made while scores are computed; otherwise they are written
            once and read once.
    """

    shares_keys: bool = True
    fused_topk: bool = False


def useful_work(
    config: GlmConfig, shape: StepShape, layout: Layout, method: Method | None = None
) -> Work:
    """The first pass: every row through the layers.

    Pads are counted where every row of the program is computed; attention, indexer and experts skip
    them.
    """
    method = method or Method()
    chunks, gathered = _busiest_chunks(config, shape.chunks, layout)
    groups = _busiest_groups(config, shape.groups, layout, method)
    rows, all_rows, sampled = chunks.rows + groups.rows, shape.rows, shape.sampled_rows
    if shape.cell is not None:
        cell = shape.cell
        rows = -(-cell.prefill // layout.dp) + -(-cell.groups // layout.dp) * cell.width
        all_rows = cell.rows
        sampled = chunks_for(cell.prefill, shape.max_num_seqs) + cell.groups * cell.width
    return Work(
        rows=rows,
        all_rows=all_rows,
        chunks=chunks,
        groups=groups,
        up_rows=rows,
        assignments=shape.rows * config.num_experts_per_tok,
        hit=distinct_experts(config.n_routed_experts, config.num_experts_per_tok, shape.rows),
        gathered=gathered,
        sampled=sampled,
        attend_width=2 * config.kv_lora_rank + config.qk_rope_head_dim,
    )


def draft_work(config: GlmConfig, shape: StepShape, layout: Layout, *, indexed: bool) -> Work:
    """A later pass of the MTP layer: one row of every request that drafts.

    Args:
        config: the model.
        shape: the step.
        layout: of the devices.
        indexed: whether the pass selects keys of its own.
    """
    ahead = [GroupShape(group.context + 1) for group in shape.groups]
    ahead += [GroupShape(chunk.prefix + chunk.rows + 1) for chunk in shape.chunks if chunk.sampled]
    groups = _busiest_groups(config, ahead, layout, Method())
    if not indexed:
        groups = groups._replace(scored=0.0, scanned=0.0)
    all_rows: int = len(ahead)
    if shape.cell is not None:
        all_rows = chunks_for(shape.cell.prefill, shape.max_num_seqs) + shape.cell.groups
    rows = -(-all_rows // layout.dp)
    return Work(
        rows=rows,
        all_rows=all_rows,
        chunks=Segment(),
        groups=groups,
        up_rows=rows,
        assignments=len(ahead) * config.num_experts_per_tok,
        hit=distinct_experts(config.n_routed_experts, config.num_experts_per_tok, len(ahead)),
        gathered=0.0,
        sampled=all_rows,
        attend_width=2 * config.kv_lora_rank + config.qk_rope_head_dim,
    )


def _busiest_chunks(
    config: GlmConfig, chunks: Sequence[ChunkShape], layout: Layout
) -> tuple[Segment, float]:
    """Of the rank with the most rows, and the cache entries that have to reach the others."""
    segments = [
        Segment(
            rows=chunk.rows,
            scored=chunk.pairs,
            scanned=chunk.prefix + chunk.rows,
            attended=chunk.pairs_within(config.index_topk),
            reach=chunk.prefix + chunk.rows,
        )
        for chunk in chunks
    ]
    if layout.split_chunks and layout.dp > 1:
        together = sum(segments, Segment())
        return together.scaled(1 / layout.dp), together.reach
    return _busiest(segments, layout.dp), 0.0


def _busiest_groups(
    config: GlmConfig, groups: Sequence[GroupShape], layout: Layout, method: Method
) -> Segment:
    segments = [
        Segment(
            rows=group.rows,
            scored=group.pairs,
            scanned=group.context * (1 if method.shares_keys else group.rows),
            attended=group.pairs_within(config.index_topk),
            reach=group.context,
        )
        for group in groups
    ]
    return _busiest(segments, layout.dp)


def _busiest(segments: Sequence[Segment], ranks: int) -> Segment:
    """The fullest rank when the longest segments are dealt first, each to the least loaded."""
    loads = [Segment()] * ranks
    for segment in sorted(segments, key=lambda one: one.scored, reverse=True):
        least = min(range(ranks), key=lambda rank: (loads[rank].rows, loads[rank].scored))
        loads[least] += segment
    return max(loads, key=lambda load: (load.rows, load.scored))
