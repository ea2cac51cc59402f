"""The stages of a layer's attention, with the indexer of a full layer, in the order they run.

Formulas: DeepSeek-V2 report, 2.1 (latent attention), DeepSeek-V3.2 report (indexer). Letters are
those of the design: D model width, H heads, A, B, U, C widths of a head's parts and of the latent,
R query latent, M index heads of width I, K selected keys.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from glm_jax.ledger.formats import Formats, weight_bytes
from glm_jax.ledger.hardware import Hardware
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.stage import Demand, Stage
from glm_jax.ledger.weights import StageWeights
from glm_jax.ledger.work import Method, Segment, Work
from glm_jax.model.config import GlmConfig

# A float32 score, written and read where the selection is not fused.
_SCORE_BYTES = 4

BytesOf = Callable[[GlmConfig], int]


class Setting(NamedTuple):
    """What all stages of a ledger share."""

    config: GlmConfig
    weights: StageWeights
    formats: Formats
    layout: Layout
    hardware: Hardware
    method: Method


class Parts(NamedTuple):
    """Names of the kinds of layer that stages of a pass stand under."""

    layer: str
    full: str


def matrix_stage(
    part: str,
    name: str,
    setting: Setting,
    work: Work,
    sizes: tuple[float | int, float | int, float | int],
) -> Stage:
    """A product of all rows with matrices of one precision.

    Args:
        part: of the stage.
        name: of the stage.
        setting: of the ledger.
        work: its rows.
        sizes: elements of the matrices; values of a row in and out; elementwise operations a row.
    """
    elements, values, elementwise = sizes
    precision = setting.formats.matrices
    demand = Demand(
        operations=2 * elements * work.rows,
        elementwise=elementwise * work.rows,
        read=elements * weight_bytes(precision),
        cached=values * setting.formats.row_bytes * work.rows,
    )
    formula = f"2 x {elements:,.0f} weights x rows; weights read once"
    return Stage(part, name, precision, work.rows, "rows", formula, shared=demand)


def attention_stages(
    setting: Setting, work: Work, parts: Parts, *, writes: bool, indexed: bool
) -> Iterator[Stage]:
    """Attention of one layer; its full part stands between the projections and the attention.

    Args:
        setting: of the ledger.
        work: of the pass.
        parts: names.
        writes: whether the rows enter the cache.
        indexed: whether there is an indexer among the layers of this pass.
    """
    yield _projections(setting, work, parts.layer, writes=writes)
    if writes:
        yield _cache_write(setting, work, parts.layer, setting.formats.latent_bytes)
    if work.gathered:
        yield _key_gather(setting, work, parts.layer, setting.formats.latent_bytes)
    if indexed:
        yield from _indexer_stages(setting, work, parts.full, writes=writes)
    yield _up_projections(setting, work, parts.layer)
    if work.chunks.rows:
        yield _chunk_attention(setting, work, parts.layer)
    if work.groups.rows:
        yield _group_attention(setting, work, parts.layer)
    yield _output(setting, work, parts.layer)


def _projections(setting: Setting, work: Work, part: str, *, writes: bool) -> Stage:
    """q_a, q_b and kv_a; rows that do not enter the cache need no kv_a."""
    c, split = setting.config, setting.layout.attention_tp
    # Latents are made on every device of a rank, the heads' queries are split.
    queries = c.num_attention_heads * c.qk_head_dim / split
    entry = c.kv_lora_rank + c.qk_rope_head_dim if writes else 0
    elements = c.hidden_size * (c.q_lora_rank + entry) + c.q_lora_rank * queries
    norms = 4 * (c.hidden_size + c.q_lora_rank + entry)
    rope = 3 * (c.num_attention_heads / split + 1) * c.qk_rope_head_dim
    values = c.hidden_size + c.q_lora_rank + entry + queries
    name = "q, kv projections" if writes else "q projections"
    return matrix_stage(part, name, setting, work, (elements, values, norms + rope))


def _cache_write(setting: Setting, work: Work, part: str, size: BytesOf) -> Stage:
    entry = size(setting.config)
    name = "latent write" if size == setting.formats.latent_bytes else "index key write"
    return Stage(
        part,
        name,
        "float32",
        work.useful,
        "rows",
        f"{entry} bytes x useful rows",
        chunks=Demand(written=entry * work.chunks.rows),
        groups=Demand(written=entry * work.groups.rows),
    )


def _key_gather(setting: Setting, work: Work, part: str, size: BytesOf) -> Stage:
    """Rows of a chunk are spread, and each may attend to any key of its request."""
    entry, ranks = size(setting.config), setting.layout.dp
    name = "latent gather" if size == setting.formats.latent_bytes else "index key gather"
    return Stage(
        part,
        name,
        "float32",
        work.gathered,
        "entries",
        f"{entry} bytes x (prefix + P) x {ranks - 1}/{ranks}",
        chunks=Demand(sent=entry * work.gathered * (ranks - 1) / ranks),
        exchanges=1,
    )


def _indexer_stages(setting: Setting, work: Work, part: str, *, writes: bool) -> Iterator[Stage]:
    c, weights = setting.config, setting.weights
    width = c.index_n_heads * c.index_head_dim
    values = c.hidden_size + c.q_lora_rank + width + c.index_head_dim + c.index_n_heads
    rope = 3 * (c.index_n_heads + 1) * c.qk_rope_head_dim
    other = 6 * c.index_head_dim + rope
    matrices = matrix_stage(
        part, "indexer projections", setting, work, (weights.index_projections, values, other)
    )
    # The weights of the index heads are not in FP8.
    heads = Demand(
        operations=2 * weights.index_heads * work.rows,
        read=weights.index_heads * weight_bytes(setting.formats.narrow),
    )
    yield matrices._replace(shared=matrices.shared + heads)
    if writes:
        yield _cache_write(setting, work, part, setting.formats.index_bytes)
    if work.gathered:
        yield _key_gather(setting, work, part, setting.formats.index_bytes)
    yield _scoring(setting, work, part)
    if not setting.method.fused_topk:
        yield _topk(work, part)


def _scoring(setting: Setting, work: Work, part: str) -> Stage:
    c = setting.config
    key = setting.formats.index_bytes(c)
    per_pair = 2 * c.index_n_heads * c.index_head_dim
    written = 0 if setting.method.fused_topk else _SCORE_BYTES

    def demand(segment: Segment) -> Demand:
        return Demand(
            operations=per_pair * segment.scored,
            elementwise=3 * c.index_n_heads * segment.scored,
            read=key * segment.scanned,
            written=written * segment.scored,
            cached=setting.formats.row_bytes * segment.rows * c.index_n_heads * c.index_head_dim,
        )

    return Stage(
        part,
        "index scores",
        setting.formats.index,
        work.chunks.scored + work.groups.scored,
        "pairs",
        f"2 x M x I = {per_pair:,} x pairs, pairs = P prefix + P (P + 1) / 2 + D S; {key} bytes "
        f"a key and {written} a score",
        chunks=demand(work.chunks),
        groups=demand(work.groups),
    )


def _topk(work: Work, part: str) -> Stage:
    def demand(segment: Segment) -> Demand:
        return Demand(elementwise=segment.scored, read=_SCORE_BYTES * segment.scored)

    return Stage(
        part,
        "top-k",
        "float32",
        work.chunks.scored + work.groups.scored,
        "scores",
        f"one read of the scores, {_SCORE_BYTES} bytes each: the least of an exact selection",
        chunks=demand(work.chunks),
        groups=demand(work.groups),
    )


def _up_projections(setting: Setting, work: Work, part: str) -> Stage:
    """W_UK on queries and W_UV on mixtures; or both on the keys, where attention is expanded."""
    c, split = setting.config, setting.layout.attention_tp
    elements = setting.weights.expansion / split
    keys = work.chunks.expanded + work.groups.expanded
    # Latent queries and mixtures can stay inside a kernel that does both products.
    values = c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
    demand = Demand(
        operations=2 * elements * (work.up_rows + keys),
        read=elements * weight_bytes(setting.formats.expansion),
        cached=values / split * setting.formats.row_bytes * work.up_rows,
    )
    return Stage(
        part,
        "latent up-projections",
        setting.formats.expansion,
        work.up_rows + keys,
        "rows",
        f"2 x {elements:,.0f} weights x rows (x keys where expanded); weights read once",
        shared=demand,
    )


def _attention_demand(setting: Setting, work: Work, segment: Segment) -> Demand:
    """Products and softmax; the bytes differ between segments."""
    c = setting.config
    heads = c.num_attention_heads / setting.layout.attention_tp
    expanded = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
    return Demand(
        operations=2 * heads * (work.attend_width * segment.attended + expanded * segment.masked),
        elementwise=5 * heads * (segment.attended + segment.masked),
    )


def _attention_stage(setting: Setting, work: Work, part: str, name: str, segment: Segment) -> Stage:
    heads = setting.config.num_attention_heads // setting.layout.attention_tp
    return Stage(
        part,
        name,
        setting.formats.attention,
        segment.attended + segment.masked,
        "pairs",
        f"2 x {heads} heads x (2 C + B) x pairs, at most K a row",
    )


def _chunk_attention(setting: Setting, work: Work, part: str) -> Stage:
    """Rows gather widened entries: from the cache on the chip, if those of the request fit."""
    segment = work.chunks
    demand = _attention_demand(setting, work, segment)
    entry = setting.formats.gathered_bytes(setting.config)
    gathered = entry * segment.attended
    if segment.reach * entry < setting.hardware.cache_bytes:
        demand = demand._replace(
            cached=gathered, read=setting.formats.latent_bytes(setting.config) * segment.reach
        )
    else:
        demand = demand._replace(read=gathered)
    stage = _attention_stage(setting, work, part, "sparse MLA, chunks", segment)
    formula = f"{stage.formula}; {entry} bytes gathered a pair"
    return stage._replace(formula=formula, chunks=demand)


def _group_attention(setting: Setting, work: Work, part: str) -> Stage:
    segment = work.groups
    entry = setting.formats.latent_bytes(setting.config)
    demand = _attention_demand(setting, work, segment)._replace(read=entry * segment.attended)
    stage = _attention_stage(setting, work, part, "sparse MLA, groups", segment)
    return stage._replace(formula=f"{stage.formula}; {entry} bytes read a pair", groups=demand)


def _output(setting: Setting, work: Work, part: str) -> Stage:
    c, layout = setting.config, setting.layout
    elements = setting.weights.output / layout.attention_tp
    values = c.num_attention_heads * c.v_head_dim / layout.attention_tp + c.hidden_size
    stage = matrix_stage(
        part, "output projection", setting, work, (elements, values, c.hidden_size)
    )
    share = layout.attention_tp
    if share == 1:
        return stage
    # Summed over the devices of a rank: a reduce-scatter and an all-gather.
    size = setting.formats.row_bytes * c.hidden_size * work.rows
    sent = 2 * size * (share - 1) / share
    return stage._replace(shared=stage.shared._replace(sent=sent), exchanges=2)
