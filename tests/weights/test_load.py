"""Loading: layouts, dtypes, shards, block FP8 and memory; refusals are in `test_load_errors`."""

import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from glm_jax.weights import load_parameters

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


def in_fp8(tensors, names):
    """The tensors with some of them as random block FP8, and the plain values these stand for."""
    rng = np.random.default_rng(5)
    stored, plain = dict(tensors), dict(tensors)
    for name in names:
        rows, cols = tensors[name].shape
        values = rng.uniform(-448, 448, (rows, cols)).astype(FP8)
        scales = rng.uniform(0.5, 2, (-(-rows // 128), -(-cols // 128))).astype(np.float32)
        stored[name], stored[name + "_scale_inv"] = values, scales
        spread = np.kron(scales, np.ones((128, 128), np.float32))[:rows, :cols]
        plain[name] = values.astype(np.float32) * spread
    return stored, plain


def matrices(tensors):
    return [name for name, tensor in tensors.items() if tensor.ndim == 2]


def assert_equal(parameters, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(parameters[name], value, err_msg=name)


def expected_parameters(hf):
    """Every parameter of the small model, each by its formula."""
    expected = {
        "embed": hf["model.embed_tokens.weight"],
        "norm": hf["model.norm.weight"],
        "head": hf["lm_head.weight"],
        "mtp.embed_norm": hf["model.layers.2.enorm.weight"],
        "mtp.hidden_norm": hf["model.layers.2.hnorm.weight"],
        "mtp.merge": hf["model.layers.2.eh_proj.weight"].T,
        "mtp.norm": hf["model.layers.2.shared_head.norm.weight"],
    }

    def gate_up(prefix):
        return np.concatenate(
            [hf[f"{prefix}.gate_proj.weight"].T, hf[f"{prefix}.up_proj.weight"].T], axis=1
        )

    for layer in range(3):
        source, target = f"model.layers.{layer}.", f"layers.{layer}."
        attention = source + "self_attn."
        kv_b = hf[attention + "kv_b_proj.weight"].reshape(3, 57, 130)
        expected |= {
            target + "input_norm": hf[source + "input_layernorm.weight"],
            target + "post_norm": hf[source + "post_attention_layernorm.weight"],
            target + "attention.q_a": hf[attention + "q_a_proj.weight"].T,
            target + "attention.q_a_norm": hf[attention + "q_a_layernorm.weight"],
            target + "attention.q_b": hf[attention + "q_b_proj.weight"].T,
            target + "attention.kv_a": hf[attention + "kv_a_proj_with_mqa.weight"].T,
            target + "attention.kv_a_norm": hf[attention + "kv_a_layernorm.weight"],
            target + "attention.k_up": kv_b[:, :7],
            target + "attention.v_up": kv_b[:, 7:].transpose(0, 2, 1),
            target + "attention.o": hf[attention + "o_proj.weight"].T,
        }
        if layer != 1:
            indexer = attention + "indexer."
            expected |= {
                target + "indexer.query": hf[indexer + "wq_b.weight"].T,
                target + "indexer.key": hf[indexer + "wk.weight"].T,
                target + "indexer.key_norm_scale": hf[indexer + "k_norm.weight"],
                target + "indexer.key_norm_bias": hf[indexer + "k_norm.bias"],
                target + "indexer.head_weight": hf[indexer + "weights_proj.weight"].T,
            }
        mlp = source + "mlp"
        if layer == 0:
            expected[target + "mlp.gate_up"] = gate_up(mlp)
            expected[target + "mlp.down"] = hf[mlp + ".down_proj.weight"].T
            continue
        experts = [f"{mlp}.experts.{expert}" for expert in range(4)]
        shared = mlp + ".shared_experts"
        expected |= {
            target + "moe.router": hf[mlp + ".gate.weight"].T,
            target + "moe.router_bias": hf[mlp + ".gate.e_score_correction_bias"],
            target + "moe.gate_up": np.stack([gate_up(expert) for expert in experts]),
            target + "moe.down": np.stack([hf[e + ".down_proj.weight"].T for e in experts]),
            target + "moe.shared_gate_up": gate_up(shared),
            target + "moe.shared_down": hf[shared + ".down_proj.weight"].T,
        }
    return expected


def test_load_puts_every_tensor_in_its_place(tensors, save, load):
    parameters, plan = load(save(tensors))
    expected = expected_parameters(tensors)
    assert parameters.keys() == expected.keys()
    assert_equal(parameters, expected)
    assert sorted(plan.consumed()) == sorted(tensors)
    assert plan.ignored == ()


def test_load_takes_a_single_file(tensors, save, load):
    parameters, _ = load(Path(save(tensors, "weights.safetensors")) / "weights.safetensors")
    assert_equal(parameters, expected_parameters(tensors))


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("wanted", [np.float32, BF16])
def test_load_converts_to_the_destination(tensors, save, load, stored, wanted):
    kept = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    parameters, _ = load(save(kept), dtype=wanted)
    widened = {name: tensor.astype(np.float32) for name, tensor in kept.items()}
    for name, value in expected_parameters(widened).items():
        dtype = np.float32 if ".router" in name else wanted
        assert parameters[name].dtype == dtype
        assert parameters[name].tobytes() == np.ascontiguousarray(value.astype(dtype)).tobytes()


def test_load_keeps_every_distinct_correction_bias(tensors, save, load):
    bias = np.float32(6.9) + np.arange(4, dtype=np.float32) * np.float32(1e-4)
    assert len(set(bias.astype(BF16).tolist())) == 1
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = bias
    parameters, _ = load(save(tensors), dtype=BF16)
    np.testing.assert_array_equal(parameters["layers.1.moe.router_bias"], bias)


def test_load_dequantises_block_fp8(tensors, save, load):
    stored, plain = in_fp8(tensors, matrices(tensors))
    parameters, plan = load(save(stored))
    assert_equal(parameters, expected_parameters(plain))
    assert sorted(plan.consumed()) == sorted(stored)


def test_load_decides_on_fp8_by_the_presence_of_scales(tensors, save, load):
    # Half of the matrices, among them weights_proj, which exclude lists name wrongly.
    chosen = [name for i, name in enumerate(matrices(tensors)) if i % 2 or "weights_proj" in name]
    stored, plain = in_fp8(tensors, chosen)
    parameters, _ = load(save(stored))
    assert_equal(parameters, expected_parameters(plain))


def test_load_reads_shards_with_scales_elsewhere(tensors, tmp_path, save_shards, load):
    stored, plain = in_fp8(tensors, matrices(tensors))
    save_shards(
        stored,
        lambda name: (
            "a.safetensors" if name.endswith("scale_inv") else f"b{len(name) % 3}.safetensors"
        ),
    )
    parameters, _ = load(tmp_path)
    assert_equal(parameters, expected_parameters(plain))


def test_load_fills_strided_views(small, tensors, save):
    expected = expected_parameters(tensors)
    pools = {name: np.zeros((2, *value.shape[::-1]), BF16) for name, value in expected.items()}

    def destination(name):
        if ".router" in name:
            return np.zeros(expected[name].shape, np.float32)
        return pools[name][1].T

    load_parameters(save(tensors), small, destination)
    for name, value in expected.items():
        if ".router" not in name:
            np.testing.assert_array_equal(pools[name][1].T, value.astype(BF16), err_msg=name)
            assert not pools[name][0].any()


def test_load_ignores_and_counts_what_other_tools_write(tensors, save, load):
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "model.layers.0.self_attn.k_scale": np.zeros(1, np.float32),
        "model.layers.1.self_attn.indexer.wk.weight": np.zeros((9, 40), np.float32),
        "model.layers.1.self_attn.indexer.k_norm.bias": np.zeros(9, np.float32),
    }
    parameters, plan = load(save(tensors | extra))
    assert plan.ignored == tuple(sorted(extra))
    assert_equal(parameters, expected_parameters(tensors))


def test_load_reports_progress_in_bytes(tensors, save, load):
    stored, _ = in_fp8(tensors, matrices(tensors))
    calls = []
    load(save(stored), progress=lambda *call: calls.append(call))
    done, totals, names = zip(*calls, strict=True)
    assert set(totals) == {sum(tensor.nbytes for tensor in stored.values())}
    assert list(done) == sorted(done)
    assert done[-1] == totals[0]
    assert sorted(names) == sorted(tensors)


def test_load_needs_no_mtp_layer_when_the_config_has_none(small, tensors, save, load):
    main = {n: t for n, t in tensors.items() if not n.startswith("model.layers.2.")}
    parameters, _ = load(save(main), config=small.replace(num_nextn_predict_layers=0))
    assert not any(name.startswith(("mtp.", "layers.2.")) for name in parameters)


@pytest.mark.parametrize("fp8", [False, True])
def test_load_takes_less_memory_than_one_tensor(small, tensors, save, load, fp8):
    config = small.replace(vocab_size=250_000, intermediate_size=90_000)
    rng = np.random.default_rng(0)
    for name, rows in (("model.embed_tokens", 250_000), ("lm_head", 250_000)):
        tensors[name + ".weight"] = rng.standard_normal((rows, 40), np.float32)
    for name in ("gate", "up", "down"):
        shape = (40, 90_000) if name == "down" else (90_000, 40)
        tensors[f"model.layers.0.mlp.{name}_proj.weight"] = np.ones(shape, np.float32)
    stored = {name: tensor.astype(BF16) for name, tensor in tensors.items()}
    if fp8:
        stored, _ = in_fp8(stored, [n for n in matrices(stored) if ".mlp." in n])
    path, largest = save(stored), 250_000 * 40 * 2
    del tensors, stored
    tracemalloc.start()
    try:
        parameters, _ = load(path, config=config, dtype=BF16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    result = sum(array.nbytes for array in parameters.values())
    assert peak - result < largest
