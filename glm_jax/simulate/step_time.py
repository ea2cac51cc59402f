"""Step times of GLM-5.3 on one node of 8 H200, from sizes and peak rates alone.

Floors: per operator max(bytes / bandwidth, operations / peak) on the busiest GPU, added over the
operators of a step; no launch gaps, norms or imbalance. A very good engine needs 1.5 to 2.5 times
as long, but padding is judged by ratios. Attention is data-parallel over the 8 GPUs with prefill
rows split over all of them, experts are spread over the same GPUs.

A row attends `index_topk` keys however short its context is: the program's index lists have that
length, and unused entries read page 0. So only the pairs that the indexer scores depend on context.
"""

from functools import cached_property, lru_cache
from typing import NamedTuple

from bucketing.cell import Cell
from glm_jax.model.config import GlmConfig
from glm_jax.model.presets import PRESETS


class Hardware(NamedTuple):
    """What one GPU of a node can do.

    Attributes:
        gpus: GPUs of the node.
        memory: Bytes per second: a measured copy on H200 (4.8e12 by specification).
        bf16: Operations per second: a measured matrix product on H200 (990e12 by specification).
        fp8: The same fraction of the specified 1979e12; an assumption, near the 1550e12 that
            DeepGEMM publishes for H800.
        cache: Bytes per second from the L2 cache; an assumption.
        link: NVLink bytes per second and direction, 89 % of the specified 450e9; an assumption.
        collective: Seconds of one small collective from launch to finish; an assumption.
    """

    gpus: int = 8
    memory: float = 4.3e12
    bf16: float = 790e12
    fp8: float = 1580e12
    cache: float = 7.0e12
    link: float = 400e9
    collective: float = 8e-6


# Bytes of a token in the cache: 512 e4m3 + 4 float32 scales + 64 bfloat16; read as bfloat16 by a
# prefill, which decodes it once per chunk.
LATENT_BYTES = 656
LATENT_BYTES_BF16 = 1152
# Bytes of an index key: 128 e4m3 and a float32 scale.
INDEX_KEY_BYTES = 132


class H200StepTime:
    """Seconds of a step, for a cell or for exactly the useful rows; a `bucketing` StepTime.

    Attributes:
        config: The model.
        hardware: The GPUs.
        drafts: Tokens that the MTP layer drafts in a step with groups, one pass each.
    """

    def __init__(
        self,
        config: GlmConfig | None = None,
        hardware: Hardware | None = None,
        *,
        drafts: int = 5,
    ) -> None:
        """Take GLM-5.3 on 8 H200 by default."""
        self.config = config or PRESETS["glm-5.3"]
        self.hardware = hardware or Hardware()
        self.drafts = drafts
        self._of_cell = lru_cache(maxsize=None)(self._cell_seconds)

    def predict(self, cell: Cell, pairs: int) -> float:
        """Return the seconds of a step in a cell, pads charged like useful rows."""
        return self._of_cell(cell) + pairs * self._pair_seconds

    def useful(self, prefill_rows: int, decode_rows: int, groups: int, pairs: int) -> float:
        """Return the seconds that exactly these rows would take."""
        return (
            self._dense(prefill_rows, decode_rows)
            + self._ragged(prefill_rows, decode_rows, groups)
            + pairs * self._pair_seconds
        )

    def skipping(
        self, padded: tuple[int, int], prefill_rows: int, decode_rows: int, groups: int, pairs: int
    ) -> float:
        """Return the seconds of a padded step whose kernels are told the true counts.

        Experts, sparse attention and drafts then skip tiles of pads and pay useful rows only;
        projections and collectives, which are dense in the program's shape, pay all.

        Args:
            padded: Prefill and decode rows of the program.
            prefill_rows: Useful rows of the prefill segment.
            decode_rows: Useful rows of the decode segment.
            groups: Groups with useful rows.
            pairs: Their scored pairs.
        """
        return (
            self._dense(*padded)
            + self._ragged(prefill_rows, decode_rows, groups)
            + pairs * self._pair_seconds
        )

    def floor(self, cell: Cell, context: int) -> float:
        """Return the seconds of a step in which nothing is done in vain.

        Unlike `predict`, the rows of a prompt's first chunk attend only the keys that they can
        see, and index keys are read, by all rows of a request together.

        Args:
            cell: The rows, all useful; its prefill rows are one chunk.
            context: Tokens of each group's request.
        """
        c, decode_rows = self.config, cell.groups * cell.width
        seen = min(cell.prefill, c.index_topk)
        chunk_keys = seen * seen / 2 + (cell.prefill - seen) * c.index_topk
        attention = self._attend(chunk_keys, decode_rows * min(context, c.index_topk))
        return (
            self._dense(cell.prefill, decode_rows)
            + c.mlp_layer_types.count("sparse") * self._experts(cell.prefill + decode_rows)
            + c.num_hidden_layers * attention
            + c.indexer_types.count("full") * self._score(cell, context)
            + self._drafting(cell.groups)
        )

    def _cell_seconds(self, cell: Cell) -> float:
        rows = cell.groups * cell.width
        return self._dense(cell.prefill, rows) + self._ragged(cell.prefill, rows, cell.groups)

    @cached_property
    def _pair_seconds(self) -> float:
        """Index scores in fp8, and one read of the float32 score by an exact top-k."""
        config, hardware = self.config, self.hardware
        operations = 2 * config.index_n_heads * config.index_head_dim
        full_layers = config.indexer_types.count("full")
        seconds = operations / hardware.fp8 + 4 / hardware.memory
        return full_layers * seconds / hardware.gpus

    @cached_property
    def _attention_weights(self) -> int:
        """Weights of one layer's projections; fp8, so also bytes."""
        c = self.config
        return (
            c.hidden_size * (c.q_lora_rank + c.kv_lora_rank + c.qk_rope_head_dim)
            + c.q_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
            + c.kv_lora_rank * c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim)
            + c.num_attention_heads * c.v_head_dim * c.hidden_size
        )

    @cached_property
    def _expert_weights(self) -> int:
        return 3 * self.config.hidden_size * self.config.moe_intermediate_size

    @cached_property
    def _head_seconds(self) -> float:
        """One read of the bfloat16 head, split over the vocabulary."""
        c, hardware = self.config, self.hardware
        read = 2 * c.vocab_size * c.hidden_size / hardware.gpus / hardware.memory
        return read + hardware.collective

    def _matmul(self, weights: float | int, rows: float | int) -> float:
        """Seconds of a product with fp8 weights that one GPU holds."""
        return max(weights / self.hardware.memory, 2 * weights * rows / self.hardware.fp8)

    def _dense(self, prefill_rows: int, decode_rows: int) -> float:
        """Projections, dense and shared MLPs, collectives and head: dense in all rows."""
        c, hardware = self.config, self.hardware
        rows = prefill_rows + decode_rows
        on_each = rows / hardware.gpus
        layers, sparse = c.num_hidden_layers, c.mlp_layer_types.count("sparse")
        indexer = c.q_lora_rank * c.index_n_heads * c.index_head_dim
        indexer += c.hidden_size * (c.index_head_dim + c.index_n_heads)
        dense_mlp = 3 * c.hidden_size * c.intermediate_size / hardware.gpus
        shared = c.n_shared_experts * self._expert_weights / hardware.gpus
        return (
            layers * self._matmul(self._attention_weights, on_each)
            + c.indexer_types.count("full") * self._matmul(indexer, on_each)
            + (layers - sparse) * (self._matmul(dense_mlp, rows) + self._gather(rows))
            + sparse * (self._matmul(shared, rows) + self._exchange(on_each))
            + layers * self._share_keys(prefill_rows)
            + self._head_seconds
        )

    def _gather(self, rows: int) -> float:
        """All-gather in fp8 and reduce-scatter in bfloat16 around a dense MLP."""
        hardware = self.hardware
        size = rows * self.config.hidden_size * (hardware.gpus - 1) / hardware.gpus
        return 3 * size / hardware.link + 2 * hardware.collective

    def _exchange(self, on_each: float) -> float:
        """Expert-parallel dispatch in fp8 and combine in bfloat16, one copy per other GPU hit."""
        hardware = self.hardware
        gpus, picks = hardware.gpus, self.config.num_experts_per_tok
        copies = _distinct(gpus, 1, picks) * (gpus - 1) / gpus
        # Two percent for scales and metadata.
        size = on_each * copies * self.config.hidden_size * 1.02
        return 3 * size / hardware.link + 2 * hardware.collective

    def _share_keys(self, prefill_rows: int) -> float:
        """Gather a chunk's new keys to all GPUs; older keys are there since their own step."""
        if prefill_rows == 0:
            return 0.0
        hardware = self.hardware
        size = prefill_rows * LATENT_BYTES * (hardware.gpus - 1) / hardware.gpus
        return size / hardware.link + hardware.collective

    def _ragged(self, prefill_rows: int, decode_rows: int, groups: int) -> float:
        """Routed experts, sparse attention and drafts: kernels that can skip what is a pad."""
        c = self.config
        rows = prefill_rows + decode_rows
        sparse = c.mlp_layer_types.count("sparse")
        return (
            sparse * self._experts(rows)
            + c.num_hidden_layers * self._sparse_attention(prefill_rows, decode_rows)
            + self._drafting(groups)
        )

    def _experts(self, rows: int) -> float:
        """Read the experts that the rows hit, or compute."""
        c, hardware = self.config, self.hardware
        hit = _distinct(c.n_routed_experts, c.num_experts_per_tok, rows) / hardware.gpus
        compute = 2 * self._expert_weights * rows * c.num_experts_per_tok / hardware.gpus
        return max(hit * self._expert_weights / hardware.memory, compute / hardware.fp8)

    def _sparse_attention(self, prefill_rows: int, decode_rows: int) -> float:
        """Each row attends its selection: decodes read it from memory, prefills from L2."""
        topk = self.config.index_topk
        return self._attend(prefill_rows * topk, decode_rows * topk)

    def _attend(self, prefill_keys: float | int, decode_keys: int) -> float:
        """Seconds of one layer's attention, by the keys that all rows of a kind attend."""
        c, hardware = self.config, self.hardware
        operations = 2 * c.num_attention_heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
        compute = operations / hardware.bf16
        decode = decode_keys * max(LATENT_BYTES / hardware.memory, compute)
        prefill = prefill_keys * max(LATENT_BYTES_BF16 / hardware.cache, compute)
        return (decode + prefill) / hardware.gpus

    def _score(self, cell: Cell, context: int) -> float:
        """One full layer's index scores and exact top-k; every GPU reads the whole chunk's keys."""
        c, hardware = self.config, self.hardware
        pairs = cell.prefill * cell.prefill / 2 + cell.groups * cell.width * context
        pairs /= hardware.gpus
        keys = cell.prefill + cell.groups * context / hardware.gpus
        # A float32 score is written once, and read once by the top-k.
        scores = 4 * pairs / hardware.memory
        read = keys * INDEX_KEY_BYTES / hardware.memory
        operations = 2 * c.index_n_heads * c.index_head_dim * pairs
        return max(read + scores, operations / hardware.fp8) + scores

    def _drafting(self, groups: int) -> float:
        """The MTP layer's passes, one row per group each."""
        if groups == 0:
            return 0.0
        hardware = self.hardware
        one = self._experts(groups) + self._attention_weights / hardware.memory
        return self.drafts * (one + self._head_seconds + 2 * hardware.collective)


def _distinct(items: int, picks: int, rows: int) -> float:
    """Expected distinct items hit when each row picks `picks` of them evenly."""
    return items * (1 - (1 - picks / items) ** rows)
