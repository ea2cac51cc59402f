"""A small checkpoint whose names and layouts are written out here, not taken from `names.py`."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import parameter_specs
from glm_jax.model.presets import PRESETS
from glm_jax.weights import LoadPlan, load_parameters

# Three layers (dense and full, sparse and shared, the MTP layer), every width another number;
# kv_a [132, 40] has a partial last block of rows, o [40, 150] one of columns.
SMALL = PRESETS["tiny-random"].replace(
    vocab_size=30,
    hidden_size=40,
    intermediate_size=24,
    moe_intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=14,
    kv_lora_rank=130,
    qk_nope_head_dim=7,
    qk_rope_head_dim=2,
    v_head_dim=50,
    n_routed_experts=4,
    mlp_layer_types=("dense", "sparse"),
    indexer_types=("full", "shared"),
    index_n_heads=5,
    index_head_dim=9,
)

ATTENTION = {
    "input_layernorm.weight": (40,),
    "post_attention_layernorm.weight": (40,),
    "self_attn.q_a_proj.weight": (14, 40),
    "self_attn.q_a_layernorm.weight": (14,),
    "self_attn.q_b_proj.weight": (27, 14),
    "self_attn.kv_a_proj_with_mqa.weight": (132, 40),
    "self_attn.kv_a_layernorm.weight": (130,),
    "self_attn.kv_b_proj.weight": (171, 130),
    "self_attn.o_proj.weight": (40, 150),
}
INDEXER = {
    "self_attn.indexer.wq_b.weight": (45, 14),
    "self_attn.indexer.wk.weight": (9, 40),
    "self_attn.indexer.k_norm.weight": (9,),
    "self_attn.indexer.k_norm.bias": (9,),
    "self_attn.indexer.weights_proj.weight": (5, 40),
}
DENSE = {
    "mlp.gate_proj.weight": (24, 40),
    "mlp.up_proj.weight": (24, 40),
    "mlp.down_proj.weight": (40, 24),
}
SPARSE = {
    "mlp.gate.weight": (4, 40),
    "mlp.gate.e_score_correction_bias": (4,),
    "mlp.shared_experts.gate_proj.weight": (6, 40),
    "mlp.shared_experts.up_proj.weight": (6, 40),
    "mlp.shared_experts.down_proj.weight": (40, 6),
    **{
        f"mlp.experts.{expert}.{name}_proj.weight": (40, 6) if name == "down" else (6, 40)
        for expert in range(4)
        for name in ("gate", "up", "down")
    },
}
MTP = {
    "enorm.weight": (40,),
    "hnorm.weight": (40,),
    "eh_proj.weight": (40, 80),
    "shared_head.norm.weight": (40,),
}
SHAPES = {
    "model.embed_tokens.weight": (30, 40),
    "model.norm.weight": (40,),
    "lm_head.weight": (30, 40),
    **{"model.layers.0." + name: s for name, s in (ATTENTION | INDEXER | DENSE).items()},
    **{"model.layers.1." + name: s for name, s in (ATTENTION | SPARSE).items()},
    **{"model.layers.2." + name: s for name, s in (ATTENTION | INDEXER | SPARSE | MTP).items()},
}


@pytest.fixture
def small() -> GlmConfig:
    return SMALL


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """Random float32 tensors, by Hugging Face name; a test may change the dict."""
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def parameters() -> dict[str, np.ndarray]:
    """Random float32 parameters, by flat name."""
    rng = np.random.default_rng(4)
    specs = parameter_specs(SMALL)
    return {name: rng.standard_normal(s.shape).astype(np.float32) for name, s in specs.items()}


@pytest.fixture
def save(tmp_path) -> Callable[..., str]:
    """Write tensors with the safetensors library and return the checkpoint's directory."""

    def write(tensors: dict[str, np.ndarray], file: str = "model.safetensors") -> str:
        contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        save_file(contiguous, tmp_path / file)
        return str(tmp_path)

    return write


@pytest.fixture
def save_shards(tmp_path) -> Callable[..., dict[str, str]]:
    """Write shards and their index; `shard_of(name)` is a file name. Return all file names."""

    def write(tensors: dict[str, np.ndarray], shard_of: Callable[[str], str]) -> dict[str, str]:
        files = {name: shard_of(name) for name in tensors}
        for file in set(files.values()):
            part = {name: tensors[name] for name in tensors if files[name] == file}
            save_file(part, tmp_path / file)
        index = {"metadata": {"total_size": 0}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return files

    return write


@pytest.fixture
def load() -> Callable[..., tuple[dict[str, np.ndarray], LoadPlan]]:
    """Load a checkpoint into fresh arrays of NaN: the parameters by flat name, and the plan."""

    def read(path, config=SMALL, dtype=np.float32, **options):
        arrays = {}

        def destination(name):
            spec = parameter_specs(config)[name]
            assert name not in arrays, f"{name} is asked for twice"
            float32 = spec.dtype == "float32"
            arrays[name] = np.full(spec.shape, np.nan, np.float32 if float32 else dtype)
            return arrays[name]

        plan = load_parameters(path, config, destination, **options)
        assert arrays.keys() == parameter_specs(config).keys()
        return arrays, plan

    return read
