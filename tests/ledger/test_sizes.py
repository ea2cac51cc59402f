"""Parameters, tensors and bytes of a token: exactly those of the published models."""

import pytest

from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.weights import model_size, stage_weights, tensor_counts
from glm_jax.model.cache import CACHE_FORMATS, entry_bytes
from glm_jax.model.presets import PRESETS

GLM = PRESETS["glm-5.3"]
INDEXER = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32

# With and without the MTP layer, tensors in bfloat16 and in FP8. The presets of GLM-5 and 5.1 have
# an indexer in all 78 layers, those of 5.2 and 5.3 in 21: 57 x 5 tensors, 2 of them in FP8.
SIZES = {
    "glm-5": (753_329_940_480 + 57 * INDEXER, 59_870, 118_629 + 57 * 7),
    "glm-5.1": (753_329_940_480 + 57 * INDEXER, 59_870, 118_629 + 57 * 7),
    "glm-5.2": (753_329_940_480, 59_585, 118_629),
    "glm-5.3": (753_329_940_480, 59_585, 118_629),
}


@pytest.mark.parametrize("preset", SIZES)
def test_published_models_have_their_parameters_and_tensors(preset):
    config = PRESETS[preset]
    assert (model_size(config).parameters, *tensor_counts(config)) == SIZES[preset]


def test_the_tiny_model_has_its_parameters_and_tensors():
    D, H, E, Y = 64, 4, 8, 32
    attention = D * 48 + 48 + 48 * H * 32 + D * 40 + 32 + H * 24 * 32 + H * 32 * 32 + H * 32 * D
    indexer = 48 * 16 * 32 + D * 32 + 2 * 32 + D * 16
    dense, sparse = 3 * D * 128, D * E + E + 3 * E * D * Y + 3 * D * Y
    own = 7 * (attention + 2 * D) + 5 * indexer + 2 * dense + 5 * sparse
    size = model_size(PRESETS["tiny-random"])
    assert size.parameters == own + 2 * 256 * D + D + 2 * D * D + 3 * D
    # Per layer 9, per indexer 5, per dense MLP 3, per sparse one 2 + 3 + 3 x 8; 3 + 4 besides.
    tensors, _ = tensor_counts(PRESETS["tiny-random"])
    assert tensors == 7 * 9 + 5 * 5 + 2 * 3 + 5 * 29 + 7


def test_active_and_total_are_the_published_billions():
    size, weights = model_size(GLM), stage_weights(GLM)
    # Norms and biases of routers, which the other calculation leaves out, are one millionth.
    assert size.without_mtp == pytest.approx(743_375_831_040, rel=1e-5)
    assert size.active == 40_297_758_720
    assert weights.attention == 165_019_648
    assert weights.index_projections + weights.index_heads == 9_371_648
    assert weights.expert == weights.shared == 37_748_736


def test_a_token_takes_656_and_132_bytes_a_layer():
    formats = make_formats(GLM)
    assert formats.latent_bytes(GLM) == 656
    assert formats.index_bytes(GLM) == 132
    assert formats.token_bytes(GLM, mtp=False) == 53_940
    assert formats.token_bytes(GLM, mtp=True) == 53_940 + 656 + 132
    assert formats.token_bytes(GLM, mtp=False) * 2**20 == pytest.approx(56.6e9, rel=1e-3)


@pytest.mark.parametrize("name", CACHE_FORMATS)
@pytest.mark.parametrize("preset", ["glm-5", "glm-5.3"])
def test_a_token_takes_what_the_engines_cache_gives_it(preset, name):
    config = PRESETS[preset]
    formats = make_formats(config, weights="bfloat16", cache=name)
    assert formats.token_bytes(config, mtp=True) == entry_bytes(config, CACHE_FORMATS[name])
    without = config.replace(num_nextn_predict_layers=0)
    assert formats.token_bytes(without, mtp=True) == formats.token_bytes(config, mtp=False)


def test_formats_refuse_what_the_model_has_no_form_for():
    tiny = PRESETS["tiny-random"]
    with pytest.raises(ValueError, match="to be a multiple of 128"):
        make_formats(tiny, cache="float32")
    with pytest.raises(ValueError, match="fp8_ds_mla needs kv_lora_rank in tiles of 128"):
        make_formats(tiny, weights="float32")
    with pytest.raises(ValueError, match="allowed: fp8, bfloat16, float32"):
        make_formats(GLM, weights="int8")
