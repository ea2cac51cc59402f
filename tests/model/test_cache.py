"""Formats of the cache by option, and the bytes they take."""

import jax.numpy as jnp
import pytest

from glm_jax.engine_options import resolve_options
from glm_jax.model.cache import cache_format_of, cache_shapes, entry_bytes
from glm_jax.model.presets import PRESETS

GLM = PRESETS["glm-5.3"]


@pytest.mark.parametrize(
    ("kv_cache_dtype", "planes", "keys"),
    [("float32", 4 * 576, 4 * 128), ("bfloat16", 2 * 576, 2 * 128), ("fp8_ds_mla", 656, 132)],
)
def test_a_token_takes_an_entry_per_layer_and_a_key_per_full_layer(kv_cache_dtype, planes, keys):
    # 78 layers, 21 of them full, and the MTP layer, which has its own indexer.
    expected = 79 * planes + 22 * keys
    assert entry_bytes(GLM, cache_format_of(GLM, kv_cache_dtype)) == expected


def test_glm_5_3_caches_a_token_in_53_940_bytes_of_fp8_without_the_mtp_layer():
    model = GLM.replace(num_nextn_predict_layers=0)
    assert entry_bytes(model, cache_format_of(model, "fp8_ds_mla")) == 53_940
    assert entry_bytes(GLM, cache_format_of(GLM, "fp8_ds_mla")) == 53_940 + 656 + 132


def test_fp8_arrays_hold_bytes():
    shapes = cache_shapes(GLM, cache_format_of(GLM, "fp8_ds_mla"), num_pages=9, page_size=64)
    assert [shape.shape for shape in shapes] == [(79, 9, 64, 656), (22, 9, 64, 132)]
    assert {shape.dtype for shape in shapes} == {jnp.dtype(jnp.uint8)}


@pytest.mark.parametrize(
    "width", [{"kv_lora_rank": 544, "qk_rope_head_dim": 32}, {"index_head_dim": 64}], ids=str
)
def test_fp8_is_refused_for_other_widths_by_their_names(width):
    model = GLM.replace(**width)
    words = "kv_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128; this model has "
    words += ", ".join(
        f"{name} {getattr(model, name)}"
        for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
    )
    with pytest.raises(ValueError, match=words):
        cache_format_of(model, "fp8_ds_mla")


def test_an_unknown_kv_cache_dtype_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="allowed: float32, bfloat16, fp8_ds_mla"):
        cache_format_of(GLM, "fp8")


@pytest.mark.parametrize(
    ("options", "platform", "expected"),
    [
        ({}, "cpu", "float32"),
        ({}, "gpu", "bfloat16"),
        ({"dtype": "float32"}, "gpu", "float32"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "cpu", "fp8_ds_mla"),
    ],
)
def test_kv_cache_dtype_is_as_dtype_where_nothing_else_is_asked(options, platform, expected):
    options = {"max_model_len": 4096, **options}
    assert resolve_options(GLM, options, platform).engine.kv_cache_dtype == expected
