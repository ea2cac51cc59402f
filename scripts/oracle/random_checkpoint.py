"""Random GLM checkpoints in which no mistake can hide: non-default norms, biases, odd sizes."""

from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from transformers import GlmMoeDsaConfig

COMMON = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Not read by transformers, which computes as if they had these values; written to config.json.
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True)
class Recipe:
    """A random checkpoint: its sizes, and the first seed to try."""

    seed: int
    prompt_tokens: int
    sizes: dict


RECIPES = {
    # The real proportions in small: two dense layers, one group of experts.
    "tiny": Recipe(
        seed=21,
        prompt_tokens=48,
        sizes={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 16,
            "num_attention_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 16,
            "index_n_heads": 16,
            "index_head_dim": 32,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
            "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
        },
    ),
    # No two sizes alike and few powers of two: a swapped axis or a wrong width cannot hide.
    "odd": Recipe(
        seed=5,
        prompt_tokens=37,
        sizes={
            "vocab_size": 101,
            "hidden_size": 36,
            "intermediate_size": 52,
            "moe_intermediate_size": 14,
            "num_attention_heads": 3,
            "q_lora_rank": 22,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 18,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "index_topk": 11,
            "index_n_heads": 17,
            "index_head_dim": 20,
            "mlp_layer_types": ["dense"] + ["sparse"] * 5,
            "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        },
    ),
}


# One MTP layer on a short target. More than two heads and an odd number of them, few powers of two.
MTP_RECIPE = Recipe(
    seed=13,
    prompt_tokens=48,
    sizes={
        "vocab_size": 120,
        "hidden_size": 40,
        "intermediate_size": 56,
        "moe_intermediate_size": 12,
        "num_attention_heads": 3,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 18,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 16,
        "index_n_heads": 16,
        "index_head_dim": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
    },
)


def build_config(sizes: dict) -> GlmMoeDsaConfig:
    """Return the config of a recipe."""
    return GlmMoeDsaConfig(
        architectures=["GlmMoeDsaForCausalLM"],
        **(COMMON | sizes),
        num_hidden_layers=len(sizes["indexer_types"]),
        num_key_value_heads=sizes["num_attention_heads"],
        first_k_dense_replace=sizes["mlp_layer_types"].count("dense"),
        dtype="bfloat16",
    )


class Weights:
    """Draws a checkpoint's tensors: bfloat16 values, non-default norms and biases."""

    def __init__(self, config: GlmMoeDsaConfig, seed: int):
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _linear(self, name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = (
            self._normal(outputs, inputs) * gain * inputs**-0.5
        ).bfloat16()

    def _norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + 0.25 * self._normal(width)).bfloat16()

    def draw(self) -> dict[str, torch.Tensor]:
        """Return the tensors by published name."""
        c = self.config
        self.tensors["model.embed_tokens.weight"] = self._normal(
            c.vocab_size, c.hidden_size
        ).bfloat16()
        for layer in range(c.num_hidden_layers):
            full, sparse = c.indexer_types[layer] == "full", c.mlp_layer_types[layer] == "sparse"
            self._layer(f"model.layers.{layer}.", full=full, sparse=sparse)
        self._norm("model.norm", c.hidden_size)
        self._linear("lm_head", c.vocab_size, c.hidden_size, gain=1.5)
        if c.num_nextn_predict_layers:
            self._mtp(f"model.layers.{c.num_hidden_layers}.")
        return self.tensors

    def _layer(self, prefix: str, *, full: bool, sparse: bool) -> None:
        c = self.config
        self._norm(prefix + "input_layernorm", c.hidden_size)
        self._norm(prefix + "post_attention_layernorm", c.hidden_size)
        self._attention(prefix + "self_attn.")
        if full:
            self._indexer(prefix + "self_attn.indexer.")
        if sparse:
            self._experts(prefix + "mlp.")
        else:
            self._mlp(prefix + "mlp.", c.intermediate_size)

    def _mtp(self, prefix: str) -> None:
        hidden = self.config.hidden_size
        self._layer(prefix, full=True, sparse=True)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            self._norm(prefix + name, hidden)
        self._linear(prefix + "eh_proj", hidden, 2 * hidden)

    def _attention(self, prefix: str) -> None:
        c = self.config
        heads, latent = c.num_attention_heads, c.kv_lora_rank
        # Small latents, so that the eps of their norms can be seen in the logits.
        self._linear(prefix + "q_a_proj", c.q_lora_rank, c.hidden_size, gain=0.05)
        self._norm(prefix + "q_a_layernorm", c.q_lora_rank)
        self._linear(prefix + "q_b_proj", heads * c.qk_head_dim, c.q_lora_rank, gain=1.5)
        self._linear(prefix + "kv_a_proj_with_mqa", latent + c.qk_rope_head_dim, c.hidden_size)
        self.tensors[prefix + "kv_a_proj_with_mqa.weight"][:latent] *= 1 / 16
        self._norm(prefix + "kv_a_layernorm", latent)
        rows = heads * (c.qk_nope_head_dim + c.v_head_dim)
        self._linear(prefix + "kv_b_proj", rows, latent, gain=1.5)
        self._linear(prefix + "o_proj", c.hidden_size, heads * c.v_head_dim)

    def _indexer(self, prefix: str) -> None:
        c = self.config
        self._linear(prefix + "wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self._linear(prefix + "wk", c.index_head_dim, c.hidden_size)
        self._norm(prefix + "k_norm", c.index_head_dim)
        self.tensors[prefix + "k_norm.bias"] = (0.3 * self._normal(c.index_head_dim)).bfloat16()
        self._linear(prefix + "weights_proj", c.index_n_heads, c.hidden_size)

    def _experts(self, prefix: str) -> None:
        c = self.config
        # float32 and no bfloat16 values, so that rounding the router is noticed; the bias has a big
        # offset and a small spread like GLM-5.2's ([6.817, 7.063]).
        self.tensors[prefix + "gate.weight"] = (
            1.5 * self._normal(c.n_routed_experts, c.hidden_size) * c.hidden_size**-0.5
        )
        self.tensors[prefix + "gate.e_score_correction_bias"] = 7 + 0.1 * self._normal(
            c.n_routed_experts
        )
        for expert in range(c.n_routed_experts):
            self._mlp(f"{prefix}experts.{expert}.", c.moe_intermediate_size)
        self._mlp(prefix + "shared_experts.", c.moe_intermediate_size * c.n_shared_experts)

    def _mlp(self, prefix: str, width: int) -> None:
        hidden = self.config.hidden_size
        self._linear(prefix + "gate_proj", width, hidden)
        self._linear(prefix + "up_proj", width, hidden)
        self._linear(prefix + "down_proj", hidden, width)


def write_checkpoint(folder: Path, config: GlmMoeDsaConfig, seed: int) -> None:
    """Write config.json and model.safetensors under the published per-expert names."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    file = folder / "model.safetensors"
    safetensors.torch.save_file(Weights(config, seed).draw(), file, metadata={"format": "pt"})
    file.chmod(0o644)
