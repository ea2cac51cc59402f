"""The published models' configs, their values written out."""

import pytest

from glm_jax.model.config import GlmConfig
from glm_jax.model.presets import PRESETS

# As in the published config.json files, common to 5, 5.1, 5.2 and 5.3.
COMMON = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
    "dtype": "bfloat16",
}
GLM_5 = COMMON | {
    "head_dim": 64,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "max_position_embeddings": 202752,
}
GLM_5_2 = COMMON | {
    "head_dim": 192,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "index_share_for_mtp_iteration": True,
    "moe_router_dtype": "float32",
}


@pytest.mark.parametrize(
    ("name", "published"),
    [("glm-5", GLM_5), ("glm-5.1", GLM_5), ("glm-5.2", GLM_5_2), ("glm-5.3", GLM_5_2)],
)
def test_preset_equals_the_published_config(name, published):
    assert PRESETS[name] == GlmConfig.from_hf(published)


@pytest.mark.parametrize("name", ["glm-5", "glm-5.1"])
def test_glm_5_is_full_everywhere(name):
    assert PRESETS[name].indexer_types == ("full",) * 78


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.3"])
def test_glm_5_2_has_21_full_layers(name):
    full = [i for i, kind in enumerate(PRESETS[name].indexer_types) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert len(full) == 21


def test_tiny_random_is_a_miniature_with_every_kind_of_layer():
    tiny = PRESETS["tiny-random"]
    assert tiny.indexer_types == ("full", "full", "full", "shared", "full", "shared")
    assert tiny.mlp_layer_types == ("dense",) * 2 + ("sparse",) * 4
    assert (tiny.index_n_heads, tiny.index_head_dim, tiny.index_topk) == (16, 32, 16)
    assert tiny.num_nextn_predict_layers == 1


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_a_round_trip(name):
    assert GlmConfig.from_hf(PRESETS[name].to_hf()) == PRESETS[name]
