"""Loading: every way in which it refuses, with the message that says why."""

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from glm_jax.model.parameters import parameter_specs
from glm_jax.weights import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    load_parameters,
)

BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


def test_load_names_the_first_ten_of_each_kind(tensors, save, load):
    experts = [name for name in tensors if ".experts." in name and "layers.1" in name]
    for name in experts[:12]:
        del tensors[name]
    tensors |= {f"extra.{i:02d}": np.zeros(1, np.float32) for i in range(11)}
    tensors["model.norm.weight"] = np.zeros(41, np.float32)
    tensors["lm_head.weight"] = np.zeros((30, 40), np.int32)
    with pytest.raises(CheckpointMismatchError) as caught:
        load(save(tensors))
    lines = str(caught.value).splitlines()
    listed = ", ".join(f"extra.{i:02d}" for i in range(10))
    assert lines[1] == f"  11 unexpected: {listed}, ..."
    assert lines[2].startswith("  12 missing: model.layers.1.mlp.experts.0.gate_proj.weight, ")
    assert lines[2].count("model.layers.") == 10
    assert lines[2].endswith(", ...")
    assert lines[3] == "  1 of a wrong shape: model.norm.weight is [41], expected [40]"
    assert lines[4] == "  1 of a wrong dtype: lm_head.weight is I32, expected BF16 or F32 or F16"


def test_load_refuses_before_it_asks_for_a_destination(small, tensors, save):
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointMismatchError, match=r"1 missing: lm_head\.weight$"):
        load_parameters(save(tensors), small, lambda name: pytest.fail(name))


def test_load_says_how_to_go_without_an_mtp_layer(tensors, save, load):
    main = {n: t for n, t in tensors.items() if not n.startswith("model.layers.2.")}
    with pytest.raises(CheckpointMismatchError, match="set num_nextn_predict_layers to 0"):
        load(save(main))


def test_load_says_how_to_use_an_mtp_layer(small, tensors, save, load):
    with pytest.raises(CheckpointMismatchError, match="set num_nextn_predict_layers to 1"):
        load(save(tensors), config=small.replace(num_nextn_predict_layers=0))


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NAME: (40, 24, FP8)}, f"{NAME} is F8_E4M3 without scale_inv, expected BF16"),
        ({NAME + "_scale_inv": (1, 1, np.float32)}, f"{NAME} is F32 with scale_inv, expected F8"),
        (
            {NAME: (40, 24, FP8), NAME + "_scale_inv": (2, 1, np.float32)},
            rf"{NAME}_scale_inv is \[2, 1\], expected \[1, 1\]",
        ),
        (
            {NAME: (40, 24, FP8), NAME + "_scale_inv": (1, 1, BF16)},
            f"{NAME}_scale_inv is BF16, expected F32",
        ),
        ({NAME: (24, 40, np.float32)}, rf"{NAME} is \[24, 40\], expected \[40, 24\]"),
    ],
)
def test_load_refuses_wrong_fp8_pairs_and_shapes(tensors, save, load, changes, message):
    for name, (rows, cols, dtype) in changes.items():
        tensors[name] = np.ones((rows, cols), dtype)
    with pytest.raises(CheckpointMismatchError, match=message):
        load(save(tensors))


def test_load_names_a_missing_directory(tmp_path, load):
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint at .*nowhere") as caught:
        load(tmp_path / "nowhere")
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("file", "found"), [(None, "an empty directory"), ("x.bin", r"x\.bin")])
def test_load_says_what_a_directory_without_weights_holds(tmp_path, load, file, found):
    if file is not None:
        (tmp_path / file).touch()
    with pytest.raises(CheckpointNotFoundError, match=f"expected model.safetensors.*{found}"):
        load(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_load_notices_a_file_that_is_cut_off(tensors, save, load, kept):
    file = Path(save(tensors)) / "model.safetensors"
    os.truncate(file, kept if kept >= 0 else file.stat().st_size + kept)
    with pytest.raises(CorruptCheckpointError, match="is cut off"):
        load(file.parent)


def test_load_notices_a_file_that_shrinks_while_it_is_read(small, tensors, save):
    file = Path(save(tensors)) / "model.safetensors"
    shapes = {key: spec.shape for key, spec in parameter_specs(small).items()}

    def destination(name):
        os.truncate(file, 20_000)
        return np.zeros(shapes[name], np.float32)

    with pytest.raises(CorruptCheckpointError, match=r"ended while .* was read"):
        load_parameters(file.parent, small, destination)


def header_bytes(text):
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>an error page, not weights</html>", "not a safetensors file"),
        (header_bytes(b"{not json}"), "not JSON"),
        (header_bytes(b"[1, 2]"), "not a JSON object"),
        (header_bytes(b'{"a": {"dtype": "F32", "shape": [1]}}'), "entry of a is malformed"),
        (
            header_bytes(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}')
            + b"1234",
            r"a is F32 \[2\] but takes 4 bytes",
        ),
        (
            header_bytes(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}')
            + b"12345678",
            "starts at byte",
        ),
        (
            header_bytes(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}')
            + b"12345678",
            "longer than its header says",
        ),
    ],
)
def test_load_refuses_malformed_files(tmp_path, load, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=message):
        load(tmp_path)


def by_parity(name):
    return f"part-{len(name) % 2}.safetensors"


def test_load_names_missing_shards(tensors, tmp_path, save_shards, load):
    save_shards(tensors, by_parity)
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"1 of 2 shards .*part-1\.safetensors"):
        load(tmp_path)


def test_load_notices_an_index_that_names_the_wrong_shard(tensors, tmp_path, save_shards, load):
    files = save_shards(tensors, by_parity)
    wrong = "part-0.safetensors" if files["lm_head.weight"][5] == "1" else "part-1.safetensors"
    index = {"weight_map": files | {"lm_head.weight": wrong, "lost": wrong}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match=f"2 tensors .*lm_head.weight .{wrong}.*lost"):
        load(tmp_path)


def test_load_refuses_a_tensor_in_two_shards(tensors, tmp_path, save_shards, load):
    save_shards(tensors, by_parity)
    for parity in range(2):
        part = {n: t for n, t in tensors.items() if len(n) % 2 == parity}
        part["model.norm.weight"] = tensors["model.norm.weight"]
        save_file(part, tmp_path / f"part-{parity}.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"model\.norm\.weight is in two shards"):
        load(tmp_path)


def test_load_notices_a_shard_that_is_cut_off(tensors, tmp_path, save_shards, load):
    save_shards(tensors, by_parity)
    os.truncate(tmp_path / "part-1.safetensors", 5000)
    with pytest.raises(CorruptCheckpointError, match=r"part-1\.safetensors is cut off"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a shard index"),
        ("[]", "not a shard index"),
        ("{}", "not a shard index"),
        ('{"weight_map": []}', "not an object"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "expected a file name"),
        ('{"weight_map": {"a": 1}}', "expected a file name"),
    ],
)
def test_load_refuses_a_malformed_index(tmp_path, load, index, message):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CorruptCheckpointError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("embed", np.zeros((40, 30), np.float32), r"shape \(40, 30\), expected \(30, 40\)"),
        ("layers.1.moe.router_bias", np.zeros(4, BF16), "bfloat16, it has to be float32"),
        ("norm", np.broadcast_to(np.float32(0), (40,)), "read-only"),
    ],
)
def test_load_refuses_a_wrong_destination(small, tensors, save, name, array, message):
    shapes = {key: spec.shape for key, spec in parameter_specs(small).items()}

    def destination(wanted):
        return array if wanted == name else np.zeros(shapes[wanted], np.float32)

    with pytest.raises(ValueError, match=f"destination of {name} .*{message}"):
        load_parameters(save(tensors), small, destination)


def test_every_refusal_is_a_checkpoint_error():
    for kind in (CheckpointMismatchError, CheckpointNotFoundError, CorruptCheckpointError):
        assert issubclass(kind, CheckpointError)
