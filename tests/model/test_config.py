"""Config reading: every key and trap of the published `config.json` files."""

import json

import pytest

from glm_jax.model.config import GlmConfig
from glm_jax.model.hf_config import UnsupportedModelError


def hf_config(**changes):
    """A small config in the published form; a change to None removes the key."""
    config = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 8,
        "num_hidden_layers": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "qk_head_dim": 10,
        "head_dim": 192,
        "v_head_dim": 5,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 3,
        "index_topk": 4,
        "index_n_heads": 3,
        "index_head_dim": 8,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "rms_norm_eps": 1e-5,
        "eos_token_id": [7, 8],
        "pad_token_id": 7,
        "dtype": "bfloat16",
        "transformers_version": "5.15.0",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def letters(types):
    return "".join(word[0].upper() for word in types)


def test_from_hf_reads_the_plain_keys():
    config = GlmConfig.from_hf(hf_config())
    assert config.vocab_size == 100
    assert config.hidden_size == 16
    assert config.index_n_heads == 3
    assert config.rope_theta == 8e6
    assert config.eos_token_ids == (7, 8)
    assert config.pad_token_id == 7
    assert config.qk_head_dim == 10


def test_from_hf_fills_absent_keys_as_transformers_does():
    config = GlmConfig.from_hf(hf_config(n_shared_experts=None, rms_norm_eps=None))
    assert config.n_shared_experts == 1
    assert config.n_group == config.topk_group == 1
    assert config.norm_topk_prob is True
    assert config.routed_scaling_factor == 2.5
    assert config.rms_norm_eps == 1e-5
    assert config.num_nextn_predict_layers == 0
    assert config.index_share_for_mtp_iteration is False


def test_from_hf_reads_a_file_and_its_directory(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(hf_config()))
    expected = GlmConfig.from_hf(hf_config())
    assert GlmConfig.from_hf(tmp_path) == expected
    assert GlmConfig.from_hf(str(file)) == expected


@pytest.mark.parametrize("name", ["", "config.json"])
def test_from_hf_names_a_missing_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"no model config at .*config\.json"):
        GlmConfig.from_hf(tmp_path / name)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "JSON list")])
def test_from_hf_refuses_a_malformed_file(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        GlmConfig.from_hf(tmp_path)


def test_from_hf_names_missing_keys():
    with pytest.raises(ValueError, match="lacks kv_lora_rank, index_topk"):
        GlmConfig.from_hf(hf_config(kv_lora_rank=None, index_topk=None))


# Model type


def test_from_hf_refuses_glm_5_3_flash_by_name():
    with pytest.raises(UnsupportedModelError, match=r"glm5_next.*Flash.*Supported: glm_moe_dsa"):
        GlmConfig.from_hf({"model_type": "glm5_next"})


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v32", "glm4_moe"])
def test_from_hf_refuses_other_models_by_name(model_type):
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}'.*Supported: glm_moe_dsa"):
        GlmConfig.from_hf(hf_config(model_type=model_type))


def test_from_hf_refuses_a_config_without_model_type():
    with pytest.raises(UnsupportedModelError, match="no model_type"):
        GlmConfig.from_hf(hf_config(model_type=None))


# Rope


@pytest.mark.parametrize("head_dim", [None, 4, 64, 192])
def test_from_hf_ignores_head_dim(head_dim):
    assert GlmConfig.from_hf(hf_config(head_dim=head_dim)).qk_rope_head_dim == 4


def test_from_hf_prefers_the_nested_rope_theta():
    assert GlmConfig.from_hf(hf_config(rope_theta=1e6)).rope_theta == 8e6


def test_from_hf_takes_a_top_level_rope_theta_without_rope_parameters():
    assert GlmConfig.from_hf(hf_config(rope_parameters=None, rope_theta=1e6)).rope_theta == 1e6


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6},
    ],
)
def test_from_hf_has_no_default_rope_theta(changes):
    with pytest.raises(ValueError, match=r"set rope_parameters\.rope_theta"):
        GlmConfig.from_hf(hf_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_theta": 1e6, "type": "linear"}},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": {"type": "yarn"}},
    ],
)
def test_from_hf_refuses_scaled_rope(changes):
    with pytest.raises(UnsupportedModelError, match=r"rope_type '.*' is not supported"):
        GlmConfig.from_hf(hf_config(**changes))


@pytest.mark.parametrize("rope", [[1e6], "default"])
def test_from_hf_refuses_malformed_rope_parameters(rope):
    with pytest.raises(ValueError, match="expected an object"):
        GlmConfig.from_hf(hf_config(rope_parameters=rope))


@pytest.mark.parametrize(("given", "expected"), [(None, True), (True, True), (False, False)])
def test_from_hf_honours_indexer_rope_interleave(given, expected):
    config = GlmConfig.from_hf(hf_config(indexer_rope_interleave=given))
    assert config.indexer_rope_interleave is expected


# Which layers have an indexer


def test_indexer_types_are_all_full_without_keys():
    assert letters(GlmConfig.from_hf(hf_config()).indexer_types) == "FFFFFFFF"


def test_indexer_types_follow_freq_and_offset():
    config = GlmConfig.from_hf(hf_config(index_topk_freq=4, index_skip_topk_offset=3))
    assert letters(config.indexer_types) == "FFFSSSFS"


def test_indexer_types_default_to_offset_two():
    config = GlmConfig.from_hf(hf_config(index_topk_freq=3))
    assert letters(config.indexer_types) == "FFSSFSSF"


@pytest.mark.parametrize(
    "pattern",
    ["FSSFSSFS", list("FSSFSSFS"), ["full", "shared", "shared", "full", *"SSFS"]],
)
def test_indexer_pattern_wins_over_freq(pattern):
    config = GlmConfig.from_hf(
        hf_config(index_topk_pattern=pattern, index_topk_freq=4, index_skip_topk_offset=3)
    )
    assert letters(config.indexer_types) == "FSSFSSFS"


def test_indexer_types_win_over_pattern_and_freq():
    config = GlmConfig.from_hf(
        hf_config(
            indexer_types=["full"] + ["shared"] * 7,
            index_topk_pattern="FSSFSSFS",
            index_topk_freq=4,
        )
    )
    assert letters(config.indexer_types) == "FSSSSSSS"


def test_indexer_types_null_is_absent():
    data = hf_config(index_topk_freq=4, index_skip_topk_offset=3)
    config = GlmConfig.from_hf({**data, "indexer_types": None, "index_topk_pattern": None})
    assert letters(config.indexer_types) == "FFFSSSFS"


def test_shared_layer_before_any_full_layer_is_an_error():
    with pytest.raises(ValueError, match="no full layer before it"):
        GlmConfig.from_hf(hf_config(index_topk_pattern="SFFFFFFF"))


@pytest.mark.parametrize("pattern", ["FFF", "FFFFFFFFF", "FFXFFFFF"])
def test_indexer_pattern_of_wrong_length_or_letter_is_an_error(pattern):
    with pytest.raises(ValueError, match="indexer_types has"):
        GlmConfig.from_hf(hf_config(index_topk_pattern=pattern))


def test_mtp_layer_has_its_own_indexer_and_experts():
    config = GlmConfig.from_hf(
        hf_config(num_nextn_predict_layers=1, index_topk_freq=4, index_skip_topk_offset=3)
    )
    assert config.total_layers == 9
    assert config.has_indexer(8)
    assert config.is_sparse(8)
    assert [config.has_indexer(layer) for layer in (2, 3, 6, 7)] == [True, False, True, False]


# Which layers have experts


def test_mlp_layer_types_derive_from_first_k_dense():
    assert letters(GlmConfig.from_hf(hf_config()).mlp_layer_types) == "DDDSSSSS"


def test_mlp_layer_types_derive_from_moe_layer_freq():
    config = GlmConfig.from_hf(hf_config(moe_layer_freq=2))
    assert letters(config.mlp_layer_types) == "DDDDSDSD"


def test_mlp_layer_types_win_over_first_k_dense():
    types = ["dense"] * 5 + ["sparse"] * 3
    config = GlmConfig.from_hf(hf_config(mlp_layer_types=types))
    assert letters(config.mlp_layer_types) == "DDDDDSSS"
    assert [config.is_sparse(layer) for layer in (4, 5)] == [False, True]


@pytest.mark.parametrize("types", [["dense"] * 3, ["dense"] * 7 + ["moe"]])
def test_mlp_layer_types_of_wrong_length_or_word_are_an_error(types):
    with pytest.raises(ValueError, match="mlp_layer_types has"):
        GlmConfig.from_hf(hf_config(mlp_layer_types=types))


@pytest.mark.parametrize("changes", [{"moe_layer_freq": [0, 1]}, {"first_k_dense_replace": -1}])
def test_malformed_layer_keys_are_an_error(changes):
    with pytest.raises(ValueError, match="expected an integer"):
        GlmConfig.from_hf(hf_config(**changes))


# Experts


def test_num_experts_overrides_n_routed_experts():
    assert GlmConfig.from_hf(hf_config(num_experts=16)).n_routed_experts == 16


def test_num_local_experts_is_another_name():
    config = GlmConfig.from_hf(hf_config(n_routed_experts=None, num_local_experts=16))
    assert config.n_routed_experts == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_routed_experts": None}, "lacks n_routed_experts"),
        ({"num_local_experts": 4}, "disagree"),
        ({"num_experts_per_tok": 9}, "more than the 8 experts"),
        ({"n_group": 3}, "does not divide"),
        ({"n_group": 2, "topk_group": 3}, "more than n_group"),
        ({"n_group": 8}, "one expert a group"),
        ({"n_group": 4, "num_experts_per_tok": 3}, "more than the 2 experts"),
    ],
)
def test_impossible_expert_counts_are_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        GlmConfig.from_hf(hf_config(**changes))


# Other keys


@pytest.mark.parametrize(("given", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_eos_token_id_is_an_integer_or_a_list(given, expected):
    assert GlmConfig.from_hf(hf_config(eos_token_id=given)).eos_token_ids == expected


def test_latent_norm_eps_follows_rms_norm_eps_until_set():
    assert GlmConfig.from_hf(hf_config(rms_norm_eps=1e-4)).latent_norm_eps == 1e-4
    config = GlmConfig.from_hf(hf_config(latent_norm_eps=1e-6))
    assert (config.rms_norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    assert config.replace(latent_norm_eps=1e-3).latent_norm_eps == 1e-3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
    ],
)
def test_unsupported_values_are_an_error(key, value):
    with pytest.raises(UnsupportedModelError, match=f"{key} {value!r} is not supported; allowed"):
        GlmConfig.from_hf(hf_config(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0, expected more than 0"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0"),
        ({"vocab_size": True}, "vocab_size is True, expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor is '2.5'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6'"),
        ({"num_experts": "8"}, "num_experts is '8'"),
        ({"latent_norm_eps": "small"}, "latent_norm_eps is 'small', expected a number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
        ({"eos_token_id": [-1]}, "eos and pad token ids"),
        ({"num_nextn_predict_layers": 2}, "is 2, allowed: 0, 1"),
        ({"qk_rope_head_dim": 5, "qk_head_dim": None}, "expected an even width"),
        ({"index_head_dim": 2}, "at least qk_rope_head_dim"),
        ({"qk_head_dim": 192}, "qk_head_dim is 192"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1"),
    ],
)
def test_out_of_range_values_are_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        GlmConfig.from_hf(hf_config(**changes))


def test_replace_validates_again():
    with pytest.raises(ValueError, match="mlp_layer_types has 8 entries for 9"):
        GlmConfig.from_hf(hf_config()).replace(num_hidden_layers=9)


# Writing


def test_to_hf_is_read_back_equal():
    config = GlmConfig.from_hf(
        hf_config(
            index_topk_freq=4,
            index_skip_topk_offset=3,
            latent_norm_eps=1e-6,
            num_nextn_predict_layers=1,
            index_share_for_mtp_iteration=True,
            indexer_rope_interleave=False,
        )
    )
    assert GlmConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_to_hf_writes_what_transformers_reads():
    written = GlmConfig.from_hf(hf_config(index_topk_pattern="FSFSFSFS")).to_hf()
    assert written["architectures"] == ["GlmMoeDsaForCausalLM"]
    assert written["model_type"] == "glm_moe_dsa"
    assert written["head_dim"] == 4
    assert written["num_key_value_heads"] == 2
    assert written["first_k_dense_replace"] == 3
    assert written["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 5
    assert written["indexer_types"] == ["full", "shared"] * 4
    assert written["rope_parameters"] == {"rope_theta": 8e6, "rope_type": "default"}
    assert written["eos_token_id"] == [7, 8]
    assert "eos_token_ids" not in written
