"""Configs of the published GLM-5 models and of a tiny one, by name; used by tests and the CLI."""

from glm_jax.model.config import GlmConfig

_GLM_5 = GlmConfig(
    vocab_size=154880,
    hidden_size=6144,
    intermediate_size=12288,
    moe_intermediate_size=2048,
    num_hidden_layers=78,
    num_attention_heads=64,
    q_lora_rank=2048,
    kv_lora_rank=512,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    mlp_layer_types=("dense",) * 3 + ("sparse",) * 75,
    indexer_types=("full",) * 78,
    index_topk=2048,
    index_n_heads=32,
    index_head_dim=128,
    indexer_rope_interleave=True,
    rope_interleave=True,
    rope_theta=1e6,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-5,
    max_position_embeddings=202752,
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=False,
    eos_token_ids=(154820, 154827, 154829),
    pad_token_id=154820,
)

# Full layers are 0, 1, 2, 6, 10, ..., 74: index_topk_freq 4, index_skip_topk_offset 3.
_GLM_5_2 = _GLM_5.replace(
    indexer_types=("full", "full") + ("full", "shared", "shared", "shared") * 19,
    rope_theta=8e6,
    max_position_embeddings=1048576,
    index_share_for_mtp_iteration=True,
)

# Sixteen index heads: with four, random weights tie exactly at the selection's boundary.
_TINY = GlmConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=32,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    mlp_layer_types=("dense",) * 2 + ("sparse",) * 4,
    indexer_types=("full", "full", "full", "shared", "full", "shared"),
    index_topk=16,
    index_n_heads=16,
    index_head_dim=32,
    indexer_rope_interleave=True,
    rope_interleave=True,
    rope_theta=8e6,
    rms_norm_eps=1e-5,
    latent_norm_eps=1e-5,
    max_position_embeddings=4096,
    num_nextn_predict_layers=1,
    index_share_for_mtp_iteration=True,
    eos_token_ids=(1,),
    pad_token_id=1,
)

# GLM-5.3 has the fields, names and shapes of 5.2 and other weights.
PRESETS: dict[str, GlmConfig] = {
    "glm-5": _GLM_5,
    "glm-5.1": _GLM_5,
    "glm-5.2": _GLM_5_2,
    "glm-5.3": _GLM_5_2,
    "tiny-random": _TINY,
}
