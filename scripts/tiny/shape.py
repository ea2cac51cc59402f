"""Shape of the embedded model: GLM-5.3 in miniature; read by every other file of this folder."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class TinyShape:
    """Sizes of the model, under their Hugging Face names.

    The cache layouts are those of production (latent 512, rope 64, index head 128), the rest is
    small.
    """

    vocab_size: int = 4096
    hidden_size: int = 192
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 8
    first_k_dense_replace: int = 3
    num_attention_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 16
    index_head_dim: int = 128
    index_topk: int = 256
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 3
    rms_norm_eps: float = 1e-5
    # 1e5: trained on up to 4,096 positions, used up to 16,384. A third of the pairs then turns
    # by less than one radian over 4,096 positions, which leaves room for matching by content.
    rope_theta: float = 1e5
    max_position_embeddings: int = 16384

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head: the part without rope, then the part with rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def total_layers(self) -> int:
        """Decoder layers including the MTP layer, which is the last one."""
        return self.num_hidden_layers + 1

    def is_dense(self, layer: int) -> bool:
        """Whether the layer has one dense MLP instead of experts."""
        return layer < self.first_k_dense_replace

    def has_indexer(self, layer: int) -> bool:
        """Whether the layer selects its own keys; the MTP layer always does."""
        if layer == self.num_hidden_layers:
            return True
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layers with experts, in order, the MTP layer last."""
        return tuple(layer for layer in range(self.total_layers) if not self.is_dense(layer))

    def to_hf(self, eos_token_ids: tuple[int, ...], pad_token_id: int) -> dict[str, Any]:
        """Return the `config.json` keys of a `glm_moe_dsa` checkpoint in block-FP8."""
        layers = range(self.num_hidden_layers)
        sizes = dataclasses.asdict(self)
        rope_theta = sizes.pop("rope_theta")
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            **sizes,
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.qk_rope_head_dim,
            "qk_head_dim": self.qk_head_dim,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "moe_router_dtype": "float32",
            "mlp_layer_types": ["dense" if self.is_dense(i) else "sparse" for i in layers],
            "indexer_types": ["full" if self.has_indexer(i) else "shared" for i in layers],
            "indexer_rope_interleave": True,
            "rope_interleave": True,
            "index_share_for_mtp_iteration": True,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "eos_token_id": list(eos_token_ids),
            "pad_token_id": pad_token_id,
            "dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            },
        }
