"""Reads a Hugging Face `config.json` into `GlmConfig` fields and back; called by `config.py` only.

The key names and their traps are those of the `glm_moe_dsa` files; every trap has a test.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODEL_TYPE = "glm_moe_dsa"
ARCHITECTURE = "GlmMoeDsaForCausalLM"

# Near relatives that people may try: the message says what they are.
_REFUSED_MODELS = {
    "glm5_next": "GLM-5.3-Flash is another architecture (linear-attention hybrid with vision)",
    "deepseek_v32": "DeepSeek-V3.2 has another indexer and another rope scaling",
}

# Keys that only one value is implemented for. An absent key means that value.
_ONLY_VALUES = {
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

_REQUIRED_KEYS = (
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
    "num_experts_per_tok",
    "index_topk",
    "index_n_heads",
    "index_head_dim",
    "max_position_embeddings",
)

_OPTIONAL_KEYS = {
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    # True for every GLM-5.x; False is DeepSeek-V3.2's half-split form.
    "indexer_rope_interleave": True,
    # Files made by transformers do not declare it and hold no MTP tensors.
    "num_nextn_predict_layers": 0,
    # Absent in GLM-5 and 5.1, whose drafts run their indexer at every step.
    "index_share_for_mtp_iteration": False,
}


class UnsupportedModelError(ValueError):
    """The config describes a model that this engine does not implement."""


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Return the JSON object of a `config.json`, given the file or its directory.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is not a JSON object.
    """
    given = Path(path)
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(
            f"no model config at {file}. Give a directory that holds config.json, or the file."
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds a JSON {type(data).__name__}, expected an object.")
    return data


def fields_from_hf(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `GlmConfig` keyword arguments for the keys of a Hugging Face config.

    Keys that do not touch the computation are ignored, and so is `head_dim`: GLM-5.2 and 5.3
    write 192 there, while the rope width is `qk_rope_head_dim`.

    Raises:
        UnsupportedModelError: another model type, or a value that is not implemented.
        ValueError: a key is absent, contradictory or malformed.
    """
    check_model_type(data)
    _check_only_values(data)
    missing = [key for key in _REQUIRED_KEYS if data.get(key) is None]
    if missing:
        raise ValueError(f"model config lacks {', '.join(missing)}.")
    fields = {key: _typed(key, data[key], int) for key in _REQUIRED_KEYS}
    _check_derived_keys(data)
    for key, default in _OPTIONAL_KEYS.items():
        value = data.get(key)
        fields[key] = default if value is None else _typed(key, value, type(default))
    latent_norm_eps = data.get("latent_norm_eps")
    if latent_norm_eps is None:
        latent_norm_eps = fields["rms_norm_eps"]
    layers = fields["num_hidden_layers"]
    return {
        **fields,
        "n_routed_experts": _expert_count(data),
        "rope_theta": _rope_theta(data),
        "latent_norm_eps": _typed("latent_norm_eps", latent_norm_eps, float),
        "mlp_layer_types": _mlp_layer_types(data, layers),
        "indexer_types": _indexer_types(data, layers),
        "eos_token_ids": _eos_token_ids(data),
        "pad_token_id": data.get("pad_token_id"),
    }


def fields_to_hf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face keys for `GlmConfig` fields; the inverse of `fields_from_hf`."""
    same = {key: fields[key] for key in (*_REQUIRED_KEYS, *_OPTIONAL_KEYS)}
    mlp_layer_types = list(fields["mlp_layer_types"])
    leading_dense = [*mlp_layer_types, "sparse"].index("sparse")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        **same,
        **_ONLY_VALUES,
        "attention_dropout": 0.0,
        "num_key_value_heads": fields["num_attention_heads"],
        "n_routed_experts": fields["n_routed_experts"],
        "moe_router_dtype": "float32",
        "qk_head_dim": fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"],
        "head_dim": fields["qk_rope_head_dim"],
        "first_k_dense_replace": leading_dense,
        "mlp_layer_types": mlp_layer_types,
        "indexer_types": list(fields["indexer_types"]),
        "rope_parameters": {"rope_theta": fields["rope_theta"], "rope_type": "default"},
        "latent_norm_eps": fields["latent_norm_eps"],
        "eos_token_id": list(fields["eos_token_ids"]),
        "pad_token_id": fields["pad_token_id"],
    }


def check_model_type(data: Mapping[str, Any]) -> None:
    """Refuse every model type but `glm_moe_dsa`, by name."""
    model_type = data.get("model_type")
    if model_type == MODEL_TYPE:
        return
    if model_type is None:
        raise UnsupportedModelError(
            f"model config has no model_type. Supported: {MODEL_TYPE} (GLM-5, 5.1, 5.2, 5.3)."
        )
    reason = _REFUSED_MODELS.get(model_type, "it is not in the GLM-5 family")
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not supported: {reason}. "
        f"Supported: {MODEL_TYPE} (GLM-5, 5.1, 5.2, 5.3)."
    )


def _check_only_values(data: Mapping[str, Any]) -> None:
    for key, allowed in _ONLY_VALUES.items():
        value = data.get(key)
        if value is not None and value != allowed:
            raise UnsupportedModelError(
                f"{key} {value!r} is not supported; allowed: {allowed!r} (every GLM-5.x has it)."
            )


def _check_derived_keys(data: Mapping[str, Any]) -> None:
    """Check keys that repeat others, where the file has them."""
    derived = {
        "num_key_value_heads": data["num_attention_heads"],
        "qk_head_dim": data["qk_nope_head_dim"] + data["qk_rope_head_dim"],
    }
    for key, expected in derived.items():
        value = data.get(key)
        if value is not None and value != expected:
            raise ValueError(
                f"{key} is {value!r} but the other keys of the config give {expected}."
            )


def _expert_count(data: Mapping[str, Any]) -> int:
    # transformers: `num_experts` overrides; `num_local_experts` is another name of the same key.
    if data.get("num_experts") is not None:
        return _typed("num_experts", data["num_experts"], int)
    given = [
        _typed(k, data[k], int)
        for k in ("n_routed_experts", "num_local_experts")
        if data.get(k) is not None
    ]
    if not given:
        raise ValueError("model config lacks n_routed_experts (or num_experts, num_local_experts).")
    if given[0] != given[-1]:
        raise ValueError(f"n_routed_experts {given[0]} and num_local_experts {given[-1]} disagree.")
    return given[0]


def _rope_theta(data: Mapping[str, Any]) -> float:
    """Return the rope base; there is no default, since a guess mis-ropes GLM-5.2 in silence."""
    rope = data.get("rope_parameters")
    if rope is None:
        # Files older than transformers 5 have the base on top, and its scaling in rope_scaling.
        rope = {**(data.get("rope_scaling") or {}), "rope_theta": data.get("rope_theta")}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {rope!r}, expected an object with rope_theta.")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise UnsupportedModelError(
            f"rope_type {rope_type!r} is not supported; allowed: 'default'."
        )
    theta = rope.get("rope_theta")
    if theta is None:
        raise ValueError("model config has no rope base: set rope_parameters.rope_theta.")
    return _typed("rope_theta", theta, float)


def _mlp_layer_types(data: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    explicit = data.get("mlp_layer_types")
    if explicit is not None:
        return tuple(explicit)
    first = _integer(data, "first_k_dense_replace", default=3, least=0)
    freq = _integer(data, "moe_layer_freq", default=1, least=1)
    return tuple("sparse" if i >= first and i % freq == 0 else "dense" for i in range(layers))


def _indexer_types(data: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Return "full" or "shared" for each layer: explicit list, else pattern, else freq/offset."""
    explicit = data.get("indexer_types")
    if explicit is not None:
        return tuple(explicit)
    pattern = data.get("index_topk_pattern")
    if pattern is not None:
        words = {"F": "full", "S": "shared"}
        return tuple(words.get(entry, entry) for entry in pattern)
    # Absent keys make every layer full, as GLM-5 and 5.1 are.
    freq = _integer(data, "index_topk_freq", default=1, least=1)
    offset = _integer(data, "index_skip_topk_offset", default=2, least=0)
    return tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers))


def _integer(data: Mapping[str, Any], key: str, *, default: int, least: int) -> int:
    value = default if data.get(key) is None else data[key]
    if _typed(key, value, int) < least:
        raise ValueError(f"{key} is {value!r}, expected an integer of at least {least}.")
    return value


def _typed(key: str, value: Any, kind: type) -> Any:
    """Return a JSON value as an int, float or bool; only an int may stand for a float."""
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        words = {int: "an integer", float: "a number", bool: "true or false"}
        raise ValueError(f"{key} is {value!r}, expected {words[kind]}.")
    return kind(value)


def _eos_token_ids(data: Mapping[str, Any]) -> tuple[int, ...]:
    eos = data.get("eos_token_id")
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
