"""The option weight_dtype: what "auto" chooses, what is refused, what it makes of the size."""

import json

import pytest

from glm_jax import LLM
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine_options import resolve_options
from glm_jax.model.parameters import parameter_specs
from glm_jax.model.presets import PRESETS
from glm_jax.model_files import find_model

TINY, GLM = PRESETS["tiny-random"], PRESETS["glm-5.3"]


@pytest.mark.parametrize(
    ("platform", "fp8_checkpoint", "options", "chosen"),
    [
        ("gpu", True, {}, "fp8"),
        ("gpu", False, {}, "bfloat16"),
        ("gpu", True, {"dtype": "float32"}, "float32"),
        ("cpu", True, {}, "float32"),
        ("cpu", True, {"dtype": "bfloat16"}, "bfloat16"),
        ("cpu", False, {"weight_dtype": "fp8"}, "fp8"),
        ("gpu", True, {"weight_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_auto_keeps_fp8_checkpoints_in_fp8_on_a_gpu(platform, fp8_checkpoint, options, chosen):
    resolved = resolve_options(GLM, options, platform, fp8_checkpoint=fp8_checkpoint)
    assert resolved.engine.weight_dtype == chosen


def test_auto_takes_no_fp8_for_a_model_that_has_no_such_form():
    resolved = resolve_options(TINY, {}, "gpu", fp8_checkpoint=True)
    assert resolved.engine.weight_dtype == "bfloat16"


def test_fp8_is_refused_for_a_model_that_has_no_such_form():
    with pytest.raises(ValueError, match=r"moe_intermediate_size .* 128, and it is 32\. Use"):
        LLM("tiny-random", weight_dtype="fp8")


def test_unknown_weight_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"weight_dtype is 'int4'; allowed: .*'fp8'"):
        EngineConfig(weight_dtype="int4")


def test_the_embedded_models_config_says_that_it_is_fp8():
    assert find_model(None).fp8
    assert not find_model("tiny-random").fp8


def test_a_config_without_quantisation_is_not_fp8(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_hf()))
    assert not find_model(tmp_path).fp8


def test_fp8_holds_a_byte_per_number_of_the_large_matrices():
    embedded = find_model(None).config
    options = {"max_model_len": 1024, "dtype": "bfloat16"}
    sizes = {
        name: Lowering(*resolve_options(embedded, options | {"weight_dtype": name}, "cpu"))
        for name in ("bfloat16", "fp8")
    }
    saved = sizes["bfloat16"].weight_bytes - sizes["fp8"].weight_bytes
    values = scales = 0
    for spec in parameter_specs(embedded).values():
        if spec.quantised:
            count, (rows, cols) = 1, spec.shape[-2:]
            for size in spec.shape[:-2]:
                count *= size
            values += count * rows * cols
            scales += count * -(-rows // 128) * -(-cols // 128)
    assert saved == values - 4 * scales
