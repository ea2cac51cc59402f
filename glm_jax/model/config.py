"""The model's static description, with checkpoint words for names; read by model and weights."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_jax.model.hf_config import fields_from_hf, fields_to_hf, read_config_file

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "max_position_embeddings",
    "routed_scaling_factor",
    "rope_theta",
    "rms_norm_eps",
    "latent_norm_eps",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlmConfig:
    """A GLM-5 family model (`glm_moe_dsa`); fields keep their Hugging Face names.

    Attributes:
        mlp_layer_types: "dense" or "sparse" for each hidden layer.
        indexer_types: "full" (runs its own indexer) or "shared" (reuses the selection of the
            nearest full layer before it) for each hidden layer.
        latent_norm_eps: epsilon of the norms of the query and key-value latents. Serving uses
            `rms_norm_eps` (1e-5); transformers hard-codes 1e-6, which it takes to compare.
        num_nextn_predict_layers: 1 when the checkpoint has the MTP layer, else 0. The MTP layer
            is layer `num_hidden_layers`, always sparse and always with its own indexer.
        eos_token_ids: ids that end a text, possibly none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    mlp_layer_types: tuple[str, ...]
    indexer_types: tuple[str, ...]
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    indexer_rope_interleave: bool
    rope_interleave: bool
    rope_theta: float
    rms_norm_eps: float
    latent_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    index_share_for_mtp_iteration: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        """Refuse what the model code could not compute.

        Raises:
            ValueError: a field is out of range, or two fields contradict each other.
        """
        self._check_numbers()
        self._check_layers()
        self._check_widths()
        self._check_experts()

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> "GlmConfig":
        """Read a Hugging Face config: a `config.json`, its directory, or the parsed object.

        Raises:
            FileNotFoundError: no config is there.
            UnsupportedModelError: another model, or a value that is not implemented.
            ValueError: a key is absent, contradictory or out of range.
        """
        data = source if isinstance(source, Mapping) else read_config_file(source)
        return cls(**fields_from_hf(data))

    def to_hf(self) -> dict[str, Any]:
        """Return the keys of a `config.json` that transformers and `from_hf` read."""
        return fields_to_hf(dataclasses.asdict(self))

    def replace(self, **changes: Any) -> "GlmConfig":
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head, the one whose inverse root scales the attention logits."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def total_layers(self) -> int:
        """Hidden layers plus the MTP layer, if any."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts; the MTP layer (the last one) always has."""
        return layer >= self.num_hidden_layers or self.mlp_layer_types[layer] == "sparse"

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer has its own indexer; the MTP layer (the last one) always has."""
        return layer >= self.num_hidden_layers or self.indexer_types[layer] == "full"

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected more than 0.")
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings true is not supported; every GLM-5.x has false.")
        ids = [*self.eos_token_ids, *([] if self.pad_token_id is None else [self.pad_token_id])]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(f"eos and pad token ids are {ids}, expected integers from 0 up.")

    def _check_layers(self) -> None:
        if self.num_nextn_predict_layers not in (0, 1):
            raise ValueError(
                f"num_nextn_predict_layers is {self.num_nextn_predict_layers!r}, allowed: 0, 1."
            )
        allowed = {"mlp_layer_types": {"dense", "sparse"}, "indexer_types": {"full", "shared"}}
        for name, words in allowed.items():
            types = getattr(self, name)
            if len(types) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(types)} entries for {self.num_hidden_layers} hidden layers."
                )
            unknown = sorted({str(word) for word in types} - words)
            if unknown:
                raise ValueError(f"{name} has {unknown}, allowed: {sorted(words)}.")
        if self.indexer_types[0] != "full":
            raise ValueError(
                "indexer_types starts with 'shared': layer 0 has no full layer before it to take "
                "a selection from. Make it 'full'."
            )

    def _check_widths(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, expected an even width."
            )
        if self.index_head_dim < self.qk_rope_head_dim:
            raise ValueError(
                f"index_head_dim is {self.index_head_dim}, expected at least qk_rope_head_dim "
                f"({self.qk_rope_head_dim}): rope turns that many of its dims."
            )

    def _check_experts(self) -> None:
        experts, groups = self.n_routed_experts, self.n_group
        if experts % groups:
            raise ValueError(f"n_group {groups} does not divide n_routed_experts {experts}.")
        if self.topk_group > groups:
            raise ValueError(f"topk_group {self.topk_group} is more than n_group {groups}.")
        if groups > 1 and experts // groups < 2:
            raise ValueError(
                f"n_group {groups} leaves one expert a group; a group's score is its best two."
            )
        selectable = experts // groups * self.topk_group
        if self.num_experts_per_tok > selectable:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the {selectable} "
                "experts that can be selected."
            )
