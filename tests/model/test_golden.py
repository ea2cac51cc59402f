"""Equality with transformers' GlmMoeDsaForCausalLM; `scripts/make_golden.py` made the references.

transformers norms the latents with eps 1e-6, so these tests do.
"""

import functools
import zlib
from pathlib import Path
from typing import NamedTuple

import fp8_bytes
import ml_dtypes
import numpy as np
import pytest
from model.open_step import Opened, Ties, read_parameters, run_open

from glm_jax import LLM, SamplingParams
from glm_jax.engine.draft_policy import FixedDrafts
from glm_jax.engine.engine import Engine
from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import parameter_specs
from glm_jax.model_files import find_model
from glm_jax.observe.step_log import read_step_log

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
EPS = 1e-6
TOLERANCE = 1e-4
# A mutant counts as noticed when it is wrong by much more than the tolerance.
NOTICED = 10 * TOLERANCE


class Golden(NamedTuple):
    config: GlmConfig
    parameters: dict[str, np.ndarray]
    tokens: np.ndarray
    prompt_tokens: int
    logits: np.ndarray
    selected: np.ndarray


@functools.cache
def golden(name: str) -> Golden:
    config = GlmConfig.from_hf(GOLDEN / name).replace(latent_norm_eps=EPS)
    with np.load(GOLDEN / name / "reference.npz") as reference:
        tokens = reference["tokens"]
        return Golden(
            config,
            read_parameters(GOLDEN / name, config),
            tokens,
            int(reference["prompt_tokens"]),
            reference["logits"],
            np.unpackbits(reference["selected"], axis=-1, count=len(tokens)).astype(bool),
        )


def test_logits_and_greedy_tokens_equal_transformers(tmp_path):
    """The product's front door with one cell, whose chunks and groups serve every step."""
    expected = golden("odd")
    llm = LLM(
        GOLDEN / "odd",
        dtype="float32",
        latent_norm_eps=EPS,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        execution_mode="full",
        grid_cells=((64, 1, 1),),
        step_log=tmp_path / "steps.jsonl",
    )
    logits = llm.logits(expected.tokens.tolist())
    check_logits(expected, logits)
    generated = expected.tokens[expected.prompt_tokens :].tolist()
    params = SamplingParams(temperature=0, max_tokens=len(generated), ignore_eos=True)
    (output,) = llm.generate([expected.tokens[: expected.prompt_tokens].tolist()], params)
    assert output.outputs[0].token_ids == generated
    check_log(llm, tokens=1 + len(generated))


def check_log(llm: LLM, *, tokens: int) -> None:
    """What the model was asked to log: its programs, and every token it drew."""
    (log,) = llm._observers
    log.close()
    written = read_step_log(log.path)
    assert written.header.model == llm.model_config
    assert "P=64 G=1 Q=1" in {event.program for event in written.compiles}
    assert sum(sum(record.tokens.values()) for record in written.records) == tokens


def check_logits(expected: Golden, logits: np.ndarray) -> None:
    """Rows with fewer keys than are selected, rows with more, and the generated tokens."""
    assert logits.shape == expected.logits.shape
    topk, error = expected.config.index_topk, np.abs(logits - expected.logits).max(axis=-1)
    assert len(error) > 2 * topk
    assert error[:topk].max() <= TOLERANCE
    assert error[topk:].max() <= TOLERANCE
    start = expected.prompt_tokens
    assert logits[start - 1 : -1].argmax(axis=-1).tolist() == expected.tokens[start:].tolist()


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_greedy_tokens_equal_transformers_whatever_is_drafted(tiny_llm, drafts):
    with np.load(GOLDEN / "mtp" / "reference.npz") as reference:
        tokens, prompt_tokens = reference["tokens"].tolist(), int(reference["prompt_tokens"])
    tiny_llm.runner.reset()
    engine = Engine(tiny_llm.config, tiny_llm.runner, vocab_size=tiny_llm.model_config.vocab_size)
    engine.scheduler.drafting.policy = FixedDrafts(drafts)
    generated = tokens[prompt_tokens:]
    params = SamplingParams(temperature=0, max_tokens=len(generated), ignore_eos=True)
    engine.add_request("r", tokens[:prompt_tokens], params)
    while engine.has_unfinished:
        engine.step()
    output, _ = engine.release("r")
    assert output.outputs[0].token_ids == generated
    assert bool(output.drafts.draft_tokens) == bool(drafts)


@pytest.mark.parametrize("name", ["tiny", "odd"])
def test_every_layer_selects_and_computes_what_transformers_does(name):
    expected = golden(name)
    opened = run_open(expected.config, expected.parameters, expected.tokens)
    check_logits(expected, opened.logits)
    check_against(expected, opened)
    assert (opened.selected.sum(-1).max(-1) == expected.config.index_topk).all()


def check_against(expected: Golden, opened: Opened) -> None:
    np.testing.assert_allclose(opened.logits, expected.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(opened.selected, expected.selected)


def half_split_indexer_rope(expected):
    return expected.config.replace(indexer_rope_interleave=False), expected.parameters


def wrong_latent_eps(expected):
    return expected.config.replace(latent_norm_eps=1e-5), expected.parameters


def no_correction_bias(expected):
    return expected.config, changed(expected, "router_bias", np.zeros_like)


def bfloat16_correction_bias(expected):
    return expected.config, changed(
        expected, "router_bias", lambda bias: bias.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def scale_of_the_latent_width(expected):
    """(kv_lora_rank + rope)^-0.5, 576^-0.5 in GLM-5; only the product of q_b meets the scale."""
    config = expected.config
    ratio = config.qk_head_dim / (config.kv_lora_rank + config.qk_rope_head_dim)
    return config, changed(expected, "attention.q_b", lambda q_b: q_b * ratio**0.5)


def own_selection_on_shared_layers(expected):
    """Every layer runs an indexer; a shared one has the weights of the full layer before it."""
    config = expected.config.replace(indexer_types=("full",) * expected.config.num_hidden_layers)
    parameters = {}
    for name in parameter_specs(config):
        source = name
        while source not in expected.parameters:
            _, number, rest = source.split(".", 2)
            source = f"layers.{int(number) - 1}.{rest}"
        parameters[name] = expected.parameters[source]
    return config, parameters


def changed(expected, suffix, change):
    hit = {name for name in expected.parameters if name.endswith(suffix)}
    assert hit
    return {
        name: change(array) if name in hit else array for name, array in expected.parameters.items()
    }


@pytest.mark.parametrize(
    "mutate",
    [
        half_split_indexer_rope,
        wrong_latent_eps,
        no_correction_bias,
        bfloat16_correction_bias,
        scale_of_the_latent_width,
        own_selection_on_shared_layers,
    ],
)
def test_the_golden_test_notices(mutate):
    expected = golden("tiny")
    opened = run_open(*mutate(expected), expected.tokens)
    with pytest.raises(AssertionError):
        check_against(expected, opened)
    assert np.abs(opened.logits - expected.logits).max() > NOTICED


def test_half_split_indexer_rope_shows_only_past_index_topk():
    """Why the prompts are longer than index_topk: before it every key is selected anyway."""
    expected = golden("tiny")
    opened = run_open(*half_split_indexer_rope(expected), expected.tokens)
    error = np.abs(opened.logits - expected.logits).max(axis=-1)
    assert error[: expected.config.index_topk].max() <= TOLERANCE
    assert error[expected.config.index_topk :].max() > NOTICED


@pytest.fixture(scope="module")
def embedded():
    found = find_model(None)
    with np.load(GOLDEN / "embedded.npz") as stored:
        reference = dict(stored)
    checkpoint = (found.folder / "model.safetensors").read_bytes()
    assert zlib.crc32(checkpoint) == reference["checkpoint_crc"], (
        "tests/golden/embedded.npz was made from another checkpoint; run "
        "python -m scripts.make_golden --embedded FOLDER"
    )
    return found, reference


@pytest.fixture(scope="module")
def embedded_llm():
    return LLM(
        dtype="float32",
        latent_norm_eps=EPS,
        max_model_len=1792,
        max_num_seqs=1,
        execution_mode="full",
        grid_cells=((512, 0, 1), (0, 1, 1)),
    )


@pytest.mark.slow
def test_embedded_model_generates_what_transformers_generates(embedded, embedded_llm):
    """Up to the first tie everything is equal; after it one other key is worth some 1e-3."""
    _, reference = embedded
    llm = embedded_llm
    for number in (0, 1):
        tokens, rows = reference[f"tokens_{number}"], reference[f"rows_{number}"]
        prompt_tokens = int(reference[f"prompt_tokens_{number}"])
        assert prompt_tokens >= 1500
        logits = llm.logits(tokens.tolist())
        error = np.abs(logits[rows] - reference[f"logits_{number}"]).max(axis=-1)
        before = rows < reference[f"tie_row_{number}"].min()
        assert rows[before].max() > llm.model_config.index_topk
        assert error[before].max() <= TOLERANCE
        wide = reference[f"token_margin_{number}"] > 0.05
        assert wide.mean() > 0.9
        np.testing.assert_array_equal(logits.argmax(-1)[wide], reference[f"best_{number}"][wide])
        generated = tokens[prompt_tokens:].tolist()
        params = SamplingParams(temperature=0, max_tokens=len(generated), ignore_eos=True)
        (output,) = llm.generate([tokens[:prompt_tokens].tolist()], params)
        assert output.outputs[0].token_ids == generated


@pytest.mark.slow
def test_what_the_embedded_model_caches_fits_fp8_within_4_percent_of_its_norm(
    embedded, embedded_llm
):
    # Through the tests' own encoder; tests/pallas_kernels/test_page_write.py holds the product's
    # bytes against it.
    _, reference = embedded
    tokens = reference["tokens_0"][:512].tolist()
    embedded_llm.logits(tokens)
    latent, index_keys = (array[0] for array in embedded_llm.runner.snapshot())
    written = latent[latent.any(axis=-1)]
    assert len(written) >= len(tokens) * embedded_llm.model_config.num_hidden_layers
    read = fp8_bytes.entry_values(fp8_bytes.entry_bytes(written))
    assert fp8_bytes.relative_error(read, written.astype(np.float64)).max() < 0.04

    keys = index_keys[index_keys.any(axis=-1)]
    page = np.zeros((len(keys), 132), np.uint8)
    for offset, key in enumerate(keys):
        fp8_bytes.put_index_key(page, offset, key)
    error = fp8_bytes.relative_error(fp8_bytes.index_keys(page), keys.astype(np.float64))
    assert error.max() < 0.04


@pytest.mark.slow
def test_embedded_model_equals_transformers_at_every_row_once_ties_fall_alike(embedded):
    found, reference = embedded
    config = found.config.replace(latent_norm_eps=EPS)
    parameters = read_parameters(found.folder, config)
    full = [config.has_indexer(layer) for layer in range(config.num_hidden_layers)]
    for number in (0, 1):
        ties = Ties(*(reference[f"tie_{field}_{number}"] for field in Ties._fields))
        selections = reference[f"selected_crc_{number}"].size
        assert len(ties.row) < 0.02 * selections
        opened = run_open(config, parameters, reference[f"tokens_{number}"], ties)
        crc = [
            [zlib.crc32(row.tobytes()) for row in layer]
            for layer in np.packbits(opened.selected[full], axis=-1)
        ]
        np.testing.assert_array_equal(crc, reference[f"selected_crc_{number}"])
        for layer in range(1, config.num_hidden_layers):
            if not full[layer]:
                np.testing.assert_array_equal(opened.selected[layer], opened.selected[layer - 1])
        rows = reference[f"rows_{number}"]
        error = np.abs(opened.logits[rows] - reference[f"logits_{number}"])
        assert error.max() <= TOLERANCE
