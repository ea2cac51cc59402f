"""Export: what is loaded from the written files is bit-equal to what was given."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from glm_jax.model.config import GlmConfig
from glm_jax.weights import CheckpointError, export_parameters
from glm_jax.weights.checkpoint import open_checkpoint
from glm_jax.weights.names import expected_tensors

BF16 = ml_dtypes.bfloat16


def same_bytes(first, second):
    assert first.keys() == second.keys()
    return all(
        first[name].dtype == second[name].dtype and first[name].tobytes() == second[name].tobytes()
        for name in first
    )


def file_bytes(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def in_dtype(parameters, dtype):
    return {
        name: value if ".router" in name else value.astype(dtype)
        for name, value in parameters.items()
    }


@pytest.mark.parametrize(("dtype", "kind"), [("float32", np.float32), ("bfloat16", BF16)])
def test_export_then_load_is_bit_equal(small, parameters, tmp_path, load, dtype, kind):
    given = in_dtype(parameters, kind)
    export_parameters(tmp_path / "a", small, given.__getitem__, dtype=dtype)
    loaded, _ = load(tmp_path / "a", dtype=kind)
    assert same_bytes(given, loaded)
    export_parameters(tmp_path / "b", small, loaded.__getitem__, dtype=dtype)
    assert file_bytes(tmp_path / "a") == file_bytes(tmp_path / "b")


@pytest.mark.parametrize("stored", [np.float32, BF16])
def test_load_then_export_gives_the_same_tensors(small, tensors, save, load, tmp_path, stored):
    kept = {
        name: tensor if ".mlp.gate." in name else tensor.astype(stored)
        for name, tensor in tensors.items()
    }
    loaded, _ = load(save(kept), dtype=stored)
    dtype = "float32" if stored is np.float32 else "bfloat16"
    export_parameters(tmp_path / "out", small, loaded.__getitem__, dtype=dtype)
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert sorted(file.keys()) == sorted(kept)
        assert same_bytes(kept, {name: file.get_tensor(name) for name in kept})


def test_fp8_export_of_its_own_values_gives_the_same_bytes(small, parameters, tmp_path, load):
    export_parameters(tmp_path / "a", small, parameters.__getitem__, dtype="fp8")
    loaded, _ = load(tmp_path / "a")
    export_parameters(tmp_path / "b", small, loaded.__getitem__, dtype="fp8")
    assert file_bytes(tmp_path / "a") == file_bytes(tmp_path / "b")
    reloaded, _ = load(tmp_path / "b")
    assert same_bytes(loaded, reloaded)


def test_fp8_export_is_close(small, parameters, tmp_path, load):
    export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    loaded, _ = load(tmp_path)
    for name, value in parameters.items():
        # Half a step of three mantissa bits; for tiny values half a step of the block's scale.
        np.testing.assert_allclose(loaded[name], value, rtol=2**-4, atol=1e-4, err_msg=name)
    for name in ("layers.1.moe.router", "layers.1.moe.router_bias"):
        assert loaded[name].tobytes() == parameters[name].tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_export_writes_the_published_names_shapes_and_dtypes(small, parameters, tmp_path, dtype):
    export_parameters(tmp_path, small, parameters.__getitem__, dtype=dtype)
    written = {name: tensor.header for name, tensor in open_checkpoint(tmp_path).items()}
    expected = expected_tensors(small, fp8=dtype == "fp8")
    # The router is float32 here and in transformers' files, BF16 in the published ones.
    for name in expected:
        if name.endswith(".mlp.gate.weight"):
            expected[name] = expected[name]._replace(dtype="F32")
    assert written == expected


def test_export_quantises_exactly_these_matrices(small, parameters, tmp_path):
    export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    stored = open_checkpoint(tmp_path)
    plain = sorted(
        name.removeprefix("model.layers.2.")
        for name, tensor in stored.items()
        if name.startswith("model.layers.2.")
        and len(tensor.header.shape) == 2
        and tensor.header.dtype != "F8_E4M3"
        and not name.endswith("_scale_inv")
    )
    assert plain == ["eh_proj.weight", "mlp.gate.weight", "self_attn.indexer.weights_proj.weight"]
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].header == (
        (2, 1),
        "F32",
    )


def test_export_writes_a_config_that_is_read_back(small, parameters, tmp_path):
    config = small.replace(latent_norm_eps=1e-6)
    for dtype in ("bfloat16", "float32", "fp8"):
        export_parameters(tmp_path, config, parameters.__getitem__, dtype=dtype)
        assert GlmConfig.from_hf(tmp_path) == config
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["dtype"] == ("float32" if dtype == "float32" else "bfloat16")
        assert ("quantization_config" in written) == (dtype == "fp8")
    assert written["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": [
            "model.embed_tokens",
            "lm_head",
            "model.layers.0.self_attn.indexer.weights_proj",
            "model.layers.1.mlp.gate",
            "model.layers.2.self_attn.indexer.weights_proj",
            "model.layers.2.mlp.gate",
            "model.layers.2.eh_proj",
        ],
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_export_shards_above_the_limit(small, parameters, tmp_path, load, dtype):
    limit = 20_000
    export_parameters(
        tmp_path / "a", small, parameters.__getitem__, dtype=dtype, max_shard_bytes=limit
    )
    shards = sorted(file.name for file in (tmp_path / "a").glob("*.safetensors"))
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    stored = open_checkpoint(tmp_path / "a")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: tensor.path.name for name, tensor in stored.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    for shard in shards:
        inside = [tensor.nbytes for tensor in stored.values() if tensor.path.name == shard]
        # Only a matrix that is larger than the limit by itself may exceed it.
        assert sum(inside) <= limit or len(inside) <= 2
    export_parameters(tmp_path / "b", small, parameters.__getitem__, dtype=dtype)
    assert same_bytes(load(tmp_path / "a")[0], load(tmp_path / "b")[0])


def test_export_aligns_every_tensor(small, parameters, tmp_path):
    export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    itemsize = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
    for name, tensor in open_checkpoint(tmp_path).items():
        assert tensor.offset % itemsize[tensor.header.dtype] == 0, name


def test_export_asks_for_each_parameter_once(small, parameters, tmp_path):
    asked = []

    def source(name):
        asked.append(name)
        return parameters[name]

    export_parameters(tmp_path, small, source)
    assert sorted(asked) == sorted(parameters)


def test_export_reports_progress_in_bytes(small, parameters, tmp_path):
    calls = []
    export_parameters(
        tmp_path,
        small,
        parameters.__getitem__,
        dtype="fp8",
        progress=lambda *call: calls.append(call),
    )
    total = sum(tensor.nbytes for tensor in open_checkpoint(tmp_path).values())
    assert {call[1] for call in calls} == {total}
    assert calls[-1][0] == total


def test_export_replaces_an_earlier_export(small, parameters, tmp_path, load):
    export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    export_parameters(tmp_path, small, parameters.__getitem__, dtype="float32")
    assert same_bytes(load(tmp_path)[0], parameters)


def test_export_refuses_to_mix_with_other_weights(small, parameters, tmp_path):
    export_parameters(tmp_path, small, parameters.__getitem__, max_shard_bytes=20_000)
    before = file_bytes(tmp_path)
    with pytest.raises(CheckpointError, match=r"would not replace: model-00001-of-.*Choose"):
        export_parameters(tmp_path, small, parameters.__getitem__)
    assert file_bytes(tmp_path) == before


def test_export_leaves_nothing_behind_when_it_fails(small, parameters, tmp_path):
    parameters["layers.1.attention.o"][3, 5] = np.nan
    with pytest.raises(ValueError, match=r"cannot write model\.layers\.1\.self_attn\.o_proj"):
        export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    assert list(tmp_path.iterdir()) == []


def test_export_that_fails_over_an_earlier_one_leaves_no_config(small, parameters, tmp_path):
    export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    parameters["head"] = parameters["head"][:, :1]
    with pytest.raises(ValueError, match="parameter head"):
        export_parameters(tmp_path, small, parameters.__getitem__, dtype="fp8")
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_export_refuses_an_unknown_dtype(small, parameters, tmp_path):
    with pytest.raises(ValueError, match=r"'int8' is unknown; allowed: .*fp8"):
        export_parameters(tmp_path, small, parameters.__getitem__, dtype="int8")


def test_export_refuses_a_parameter_of_a_wrong_shape(small, parameters, tmp_path):
    parameters["head"] = parameters["head"].T
    with pytest.raises(ValueError, match=r"head has shape \(40, 30\), expected \(30, 40\)"):
        export_parameters(tmp_path, small, parameters.__getitem__)
