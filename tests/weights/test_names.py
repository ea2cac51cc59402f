"""The published checkpoints' names, shapes and dtypes, written out from the model cards.

Nothing here is taken from `names.py`: the expected tables are literals.
"""

import math
from collections import Counter

import numpy as np
import pytest

from glm_jax.model.parameters import parameter_specs
from glm_jax.model.presets import PRESETS
from glm_jax.weights.headers import TensorHeader
from glm_jax.weights.names import expected_tensors, is_ignorable, tensor_table
from glm_jax.weights.plan import plan_load

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}

# Q marks what the FP8 checkpoints quantise.
Q, BF16, F32 = "Q", "BF16", "F32"
EVERY_LAYER = {
    "input_layernorm.weight": ((6144,), BF16),
    "post_attention_layernorm.weight": ((6144,), BF16),
    "self_attn.q_a_proj.weight": ((2048, 6144), Q),
    "self_attn.q_a_layernorm.weight": ((2048,), BF16),
    "self_attn.q_b_proj.weight": ((16384, 2048), Q),
    "self_attn.kv_a_proj_with_mqa.weight": ((576, 6144), Q),
    "self_attn.kv_a_layernorm.weight": ((512,), BF16),
    "self_attn.kv_b_proj.weight": ((28672, 512), Q),
    "self_attn.o_proj.weight": ((6144, 16384), Q),
}
FULL_INDEXER = {
    "self_attn.indexer.wq_b.weight": ((4096, 2048), Q),
    "self_attn.indexer.wk.weight": ((128, 6144), Q),
    "self_attn.indexer.k_norm.weight": ((128,), BF16),
    "self_attn.indexer.k_norm.bias": ((128,), BF16),
    "self_attn.indexer.weights_proj.weight": ((32, 6144), BF16),
}
DENSE = {
    "mlp.gate_proj.weight": ((12288, 6144), Q),
    "mlp.up_proj.weight": ((12288, 6144), Q),
    "mlp.down_proj.weight": ((6144, 12288), Q),
}
SPARSE = {
    "mlp.gate.weight": ((256, 6144), BF16),
    "mlp.gate.e_score_correction_bias": ((256,), F32),
    "mlp.shared_experts.gate_proj.weight": ((2048, 6144), Q),
    "mlp.shared_experts.up_proj.weight": ((2048, 6144), Q),
    "mlp.shared_experts.down_proj.weight": ((6144, 2048), Q),
}
EXPERT = {
    "gate_proj.weight": ((2048, 6144), Q),
    "up_proj.weight": ((2048, 6144), Q),
    "down_proj.weight": ((6144, 2048), Q),
}
MTP = {
    "enorm.weight": ((6144,), BF16),
    "hnorm.weight": ((6144,), BF16),
    "shared_head.norm.weight": ((6144,), BF16),
    "eh_proj.weight": ((6144, 12288), BF16),
}
SHARED_INDEX_LAYERS = {
    layer for layer in range(3, 78) if layer not in range(6, 75, 4)
}  # 57 in 5.2 and 5.3


def published(fp8, shared_index_layers):
    listed = {
        "model.embed_tokens.weight": ((154880, 6144), BF16),
        "model.norm.weight": ((6144,), BF16),
        "lm_head.weight": ((154880, 6144), BF16),
    }
    for layer in range(79):
        parts = dict(EVERY_LAYER)
        if layer not in shared_index_layers:
            parts |= FULL_INDEXER
        parts |= DENSE if layer < 3 else SPARSE
        if layer >= 3:
            for expert in range(256):
                parts |= {f"mlp.experts.{expert}.{name}": t for name, t in EXPERT.items()}
        if layer == 78:
            parts |= MTP
        listed |= {f"model.layers.{layer}.{name}": t for name, t in parts.items()}
    headers = {}
    for name, (shape, kind) in listed.items():
        if kind == Q and fp8:
            scales = ((shape[0] + 127) // 128, (shape[1] + 127) // 128)
            headers[name] = (shape, "F8_E4M3")
            headers[name + "_scale_inv"] = (scales, "F32")
        else:
            headers[name] = (shape, BF16 if kind == Q else kind)
    return headers


def elements(headers):
    return sum(math.prod(shape) for shape, _ in headers.values())


def stored_bytes(headers):
    return sum(math.prod(shape) * BYTES[dtype] for shape, dtype in headers.values())


def planned(headers, config):
    return plan_load({name: TensorHeader(*header) for name, header in headers.items()}, config)


def test_bf16_checkpoint_of_glm_5_2_and_5_3():
    headers = published(fp8=False, shared_index_layers=SHARED_INDEX_LAYERS)
    assert len(headers) == 59_585
    assert elements(headers) == 753_329_940_480
    assert PRESETS["glm-5.2"] == PRESETS["glm-5.3"]
    assert expected_tensors(PRESETS["glm-5.2"], fp8=False) == headers
    plan = planned(headers, PRESETS["glm-5.2"])
    assert Counter(plan.consumed()) == Counter(headers.keys())
    assert plan.ignored == ()


def test_fp8_checkpoint_of_glm_5_3():
    headers = published(fp8=True, shared_index_layers=SHARED_INDEX_LAYERS)
    assert len(headers) == 118_629
    assert stored_bytes(headers) == 755_617_140_416
    assert headers["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == ((5, 48), F32)
    assert expected_tensors(PRESETS["glm-5.3"], fp8=True) == headers
    plan = planned(headers, PRESETS["glm-5.3"])
    assert Counter(plan.consumed()) == Counter(headers.keys())
    assert plan.ignored == ()


def test_bf16_checkpoint_of_glm_5_1():
    headers = published(fp8=False, shared_index_layers=())
    assert len(headers) == 59_870
    assert expected_tensors(PRESETS["glm-5.1"], fp8=False) == headers
    assert Counter(planned(headers, PRESETS["glm-5.1"]).consumed()) == Counter(headers.keys())


def test_parameters_have_the_elements_of_the_checkpoint():
    specs = parameter_specs(PRESETS["glm-5.3"])
    assert sum(math.prod(spec.shape) for spec in specs.values()) == 753_329_940_480
    assert all(len(spec.shape) == len(spec.axes) for spec in specs.values())


def test_router_and_bias_are_the_float32_parameters():
    specs = parameter_specs(PRESETS["tiny-random"])
    float32 = {name.split(".", 2)[2] for name, spec in specs.items() if spec.dtype == "float32"}
    assert float32 == {"moe.router", "moe.router_bias"}
    assert {spec.dtype for spec in specs.values()} == {"weight", "float32"}


@pytest.mark.parametrize("mtp_layers", [0, 1])
def test_table_fills_every_element_of_every_parameter_once(small, mtp_layers):
    config = small.replace(num_nextn_predict_layers=mtp_layers)
    fills = {name: np.zeros(spec.shape, int) for name, spec in parameter_specs(config).items()}
    for name, tensor in tensor_table(config).items():
        covered = [row for piece in tensor.pieces for row in range(piece.start, piece.stop)]
        assert covered == list(range(tensor.shape[0])), name
        for piece in tensor.pieces:
            rectangle = fills[piece.parameter][piece.index]
            rows = rectangle.T if piece.transposed else rectangle
            assert rows.shape == (piece.stop - piece.start, *tensor.shape[1:]), name
            rows += 1
    assert {name for name, count in fills.items() if not (count == 1).all()} == set()


def test_table_has_the_tensors_of_a_parameter_side_by_side(small):
    order = [tensor.pieces[0].parameter for tensor in tensor_table(small).values()]
    changes = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert len(changes) == len(set(changes))


@pytest.mark.parametrize(
    ("name", "ignorable"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
        ("model.layers.1.self_attn.k_scale", True),
        ("model.layers.1.self_attn.attn.v_scale", True),
        ("model.layers.1.self_attn.indexer.wk.weight", True),
        ("model.layers.1.self_attn.indexer.wq_b.weight_scale_inv", True),
        ("model.layers.1.self_attn.indexer.k_norm.bias", True),
        # Layer 0 and the MTP layer have indexers: what the table lacks there is a surprise.
        ("model.layers.0.self_attn.indexer.wk.weight_scale", False),
        ("model.layers.2.self_attn.indexer.extra.weight", False),
        ("model.layers.1.self_attn.indexer.extra.weight", False),
        ("model.layers.9.self_attn.indexer.wk.weight", False),
        ("other.1.self_attn.indexer.wk.weight", False),
        ("model.layers.1.self_attn.q_a_proj.bias", False),
        ("model.layers.1.self_attn.q_a_proj.weight_scale_inv", False),
    ],
)
def test_is_ignorable_knows_buffers_and_repeated_indexers(small, name, ignorable):
    assert is_ignorable(name, small) is ignorable
