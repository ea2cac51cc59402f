"""Matrices held in block FP8: loaded from either kind of checkpoint, exported, drawn."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from glm_jax.model.parameters import fp8_obstacle, parameter_specs
from glm_jax.model.storage import ParameterStore
from glm_jax.weights import CheckpointError, export_parameters, load_parameters
from glm_jax.weights.names import expected_tensors
from glm_jax.weights.quant import dequantise_rows, quantise_blocks, scale_shape
from glm_jax.weights.random import fill_random

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn
SCALE = "_scale_inv"


@pytest.fixture
def config(small):
    """Gate and up rows of whole blocks; 160 inputs are a partial block of columns."""
    return small.replace(hidden_size=160, intermediate_size=256, moe_intermediate_size=128)


@pytest.fixture
def stored(config):
    """A published FP8 checkpoint of random bytes; scales of any size and sign."""
    rng = np.random.default_rng(8)
    kinds = {"F8_E4M3": FP8, "F32": np.float32, "BF16": BF16}
    return {
        name: rng.standard_normal(header.shape, np.float32).astype(kinds[header.dtype])
        for name, header in expected_tensors(config, fp8=True).items()
    }


def plain_of(stored):
    """The numbers that a checkpoint means."""
    return {
        name: dequantise_rows(tensor, stored[name + SCALE]) if name + SCALE in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith(SCALE)
    }


def load(path, config, *, storage="per_layer", dtype="float32"):
    store = ParameterStore(config, dtype=dtype, storage=storage, weight_dtype="fp8")
    load_parameters(path, config, store.destination)
    return store


def held_as(hf, config):
    """For each quantised parameter its Hugging Face matrices, joined as they are held.

    `hf(name)` gives values or scales of one matrix.
    """

    def gate_up(prefix):
        return np.concatenate([hf(prefix + "gate_proj"), hf(prefix + "up_proj")])

    expected = {}
    for layer in range(config.total_layers):
        source, target = f"model.layers.{layer}.", f"layers.{layer}."
        for ours, theirs in (
            ("q_a", "q_a_proj"),
            ("q_b", "q_b_proj"),
            ("kv_a", "kv_a_proj_with_mqa"),
            ("o", "o_proj"),
        ):
            expected[f"{target}attention.{ours}"] = hf(f"{source}self_attn.{theirs}")
        if config.has_indexer(layer):
            expected[target + "indexer.query"] = hf(source + "self_attn.indexer.wq_b")
            expected[target + "indexer.key"] = hf(source + "self_attn.indexer.wk")
        mlp = source + "mlp."
        if not config.is_sparse(layer):
            expected[target + "mlp.gate_up"] = gate_up(mlp)
            expected[target + "mlp.down"] = hf(mlp + "down_proj")
            continue
        experts = [f"{mlp}experts.{number}." for number in range(config.n_routed_experts)]
        expected |= {
            target + "moe.gate_up": np.stack([gate_up(expert) for expert in experts]),
            target + "moe.down": np.stack([hf(expert + "down_proj") for expert in experts]),
            target + "moe.shared_gate_up": gate_up(mlp + "shared_experts."),
            target + "moe.shared_down": hf(mlp + "shared_experts.down_proj"),
        }
    return expected


@pytest.mark.parametrize("storage", ["per_layer", "stacked"])
def test_load_keeps_the_bytes_of_an_fp8_checkpoint(config, stored, save, storage):
    store = load(save(stored), config, storage=storage)
    values = held_as(lambda name: stored[name + ".weight"], config)
    scales = held_as(lambda name: stored[name + ".weight" + SCALE], config)
    specs = parameter_specs(config)
    assert values.keys() == {name for name, spec in specs.items() if spec.quantised}
    for name in values:
        held = store.destination(name)
        assert (held.values.dtype, held.scales.dtype) == (FP8, np.float32)
        assert held.values.tobytes() == values[name].tobytes(), name
        assert held.scales.tobytes() == scales[name].tobytes(), name


def test_load_dequantises_what_absorption_needs_per_head(config, stored, save):
    store = load(save(stored), config)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    heads = dequantise_rows(stored[name], stored[name + SCALE]).reshape(3, 57, 130)
    np.testing.assert_array_equal(store.destination("layers.0.attention.k_up"), heads[:, :7])
    v_up = store.destination("layers.0.attention.v_up")
    np.testing.assert_array_equal(v_up, heads[:, 7:].swapaxes(1, 2))


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_load_quantises_a_plain_checkpoint(config, stored, save, dtype):
    plain = {name: tensor.astype(dtype) for name, tensor in plain_of(stored).items()}
    store = load(save(plain), config)
    quantised = {name: quantise_blocks(t) for name, t in plain.items() if t.ndim == 2}
    values = held_as(lambda name: quantised[name + ".weight"].values, config)
    scales = held_as(lambda name: quantised[name + ".weight"].scales, config)
    for name in values:
        held = store.destination(name)
        assert held.values.tobytes() == values[name].tobytes(), name
        assert held.scales.tobytes() == scales[name].tobytes(), name


def test_load_quantises_strip_by_strip_as_a_whole(config, save):
    tall = config.replace(intermediate_size=2**14)
    rng = np.random.default_rng(9)
    tensors = {
        name: rng.standard_normal(header.shape, np.float32).astype(BF16)
        for name, header in expected_tensors(tall, fp8=False).items()
    }
    held = load(save(tensors), tall).destination("layers.0.mlp.gate_up")
    gate_up = [tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    whole = quantise_blocks(np.concatenate(gate_up))
    assert held.values.tobytes() == whole.values.tobytes()
    assert held.scales.tobytes() == whole.scales.tobytes()


def test_load_names_a_matrix_that_cannot_be_quantised(config, stored, save):
    plain = plain_of(stored)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    plain[name][3, 4] = np.inf
    with pytest.raises(CheckpointError, match=rf"cannot quantise {name} to FP8: rows 0 to 127"):
        load(save(plain), config)


def test_load_refuses_a_pair_where_there_is_no_fp8_form(config, stored, save):
    store = ParameterStore(config, dtype="float32", storage="per_layer")

    def destination(name):
        array = store.destination(name)
        return (array, array) if name == "embed" else array

    with pytest.raises(ValueError, match="embed is a pair, but it has no block-FP8 form"):
        load_parameters(save(stored), config, destination)


def test_load_refuses_scales_of_another_shape(config, stored, save):
    store = ParameterStore(config, dtype="float32", storage="per_layer", weight_dtype="fp8")

    def destination(name):
        held = store.destination(name)
        return (held.values, held.scales.T) if name == "layers.0.mlp.gate_up" else held

    message = r"mlp\.gate_up has scales float32 \(2, 4\), expected float32 \(4, 2\)"
    with pytest.raises(ValueError, match=message):
        load_parameters(save(stored), config, destination)


def test_loading_fp8_takes_a_fifth_more_than_the_file_at_most(config, save):
    # Wide experts, as in GLM-5.3: nearly all bytes are FP8.
    wide = config.replace(hidden_size=1024, moe_intermediate_size=512, n_routed_experts=16)
    sizes = {"F8_E4M3": FP8, "F32": np.float32, "BF16": BF16}
    path = save(
        {
            name: np.zeros(header.shape, sizes[header.dtype])
            for name, header in expected_tensors(wide, fp8=True).items()
        }
    )
    file = sum(
        np.prod(header.shape) * np.dtype(sizes[header.dtype]).itemsize
        for header in expected_tensors(wide, fp8=True).values()
    )
    tracemalloc.start()
    try:
        load(path, wide, dtype="bfloat16")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.2 * file


def test_export_writes_the_bytes_that_are_held(config, stored, save, tmp_path):
    store = load(save(stored), config)
    export_parameters(tmp_path / "out", config, store.destination, dtype="fp8")
    again = load(tmp_path / "out", config)
    for name, spec in parameter_specs(config).items():
        if spec.quantised:
            old, new = store.destination(name), again.destination(name)
            assert old.values.tobytes() == new.values.tobytes(), name
            assert old.scales.tobytes() == new.scales.tobytes(), name


def test_export_writes_held_fp8_as_plain_numbers(config, stored, save, tmp_path):
    store = load(save(stored), config)
    export_parameters(tmp_path / "out", config, store.destination, dtype="float32")
    plain = ParameterStore(config, dtype="float32", storage="per_layer")
    load_parameters(tmp_path / "out", config, plain.destination)
    gate_up = plain.destination("layers.1.moe.gate_up")
    up = "model.layers.1.mlp.experts.2.up_proj.weight"
    np.testing.assert_array_equal(gate_up[2, :, 128:], plain_of(stored)[up].T)


def test_random_weights_are_the_same_draws_quantised(config):
    plain = ParameterStore(config, dtype="float32", storage="per_layer")
    held = ParameterStore(config, dtype="float32", storage="stacked", weight_dtype="fp8")
    for store in plain, held:
        fill_random(config, store.destination, seed=4)
    np.testing.assert_array_equal(held.destination("embed"), plain.destination("embed"))
    quantised = quantise_blocks(plain.destination("layers.2.moe.down")[3].T)
    down = held.destination("layers.2.moe.down")
    assert down.values[3].tobytes() == quantised.values.tobytes()
    assert down.scales[3].tobytes() == quantised.scales.tobytes()


def test_no_block_may_hold_gate_and_up_rows(small, config):
    assert fp8_obstacle(config) is None
    with pytest.raises(ValueError, match="moe_intermediate_size to be a multiple of 128") as caught:
        ParameterStore(small, dtype="float32", storage="per_layer", weight_dtype="fp8")
    assert "it is 6. Use 'float32' or 'bfloat16'." in str(caught.value)


def test_scales_cover_partial_blocks(config):
    store = ParameterStore(config, dtype="float32", storage="per_layer", weight_dtype="fp8")
    held = store.destination("layers.1.moe.gate_up")
    assert held.values.shape == (4, 256, 160)
    assert held.scales.shape == (4, *scale_shape((256, 160))) == (4, 2, 2)
