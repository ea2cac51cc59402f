"""The offline API on the golden checkpoint: batches, streams, logits, and refused calls."""

import numpy as np
import pytest

from glm_jax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(tiny_llm):
    generator = np.random.default_rng(0)
    vocab_size = tiny_llm.model_config.vocab_size
    return [generator.integers(0, vocab_size, length).tolist() for length in (48, 5, 70, 1, 17, 33)]


@pytest.fixture(scope="module")
def alone(tiny_llm, prompts):
    return [tiny_llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]


def test_generate_gives_a_batch_the_tokens_of_each_alone(tiny_llm, prompts, alone):
    # Six requests on four slots: chunks, mixed steps and waiting all happen.
    outputs = tiny_llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert all(output.finished for output in outputs)
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_generate_takes_one_flat_list_as_one_prompt(tiny_llm, prompts, alone):
    (output,) = tiny_llm.generate(prompts[1], GREEDY)
    assert output.outputs[0].token_ids == alone[1]
    assert output.outputs[0].finish_reason == "length"


def test_generate_takes_parameters_per_prompt(tiny_llm, prompts, alone):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 7)]
    outputs = tiny_llm.generate(prompts[:2], params)
    assert [output.outputs[0].token_ids for output in outputs] == [alone[0][:1], alone[1][:7]]


def test_generate_stops_at_a_stop_token(tiny_llm, prompts, alone):
    stop = alone[2][3]
    params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[stop], ignore_eos=True)
    (output,) = tiny_llm.generate([prompts[2]], params)
    first = alone[2].index(stop)
    assert output.outputs[0].token_ids == alone[2][: first + 1]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_generate_repeats_a_seed_in_any_company(tiny_llm, prompts):
    params = [SamplingParams(temperature=0.9, top_p=0.9, seed=n, max_tokens=8) for n in range(6)]
    together = tiny_llm.generate(prompts, params)
    single = [tiny_llm.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in single]


def test_stream_adds_up_to_generate(tiny_llm, prompts, alone):
    tokens = [[] for _ in prompts]
    for index, delta in tiny_llm.stream(prompts, GREEDY):
        tokens[index] += delta.token_ids
    assert tokens == alone


def test_stream_left_early_frees_everything(tiny_llm, prompts):
    for _ in tiny_llm.stream(prompts, GREEDY):
        break
    assert not tiny_llm.engine.scheduler.has_unfinished
    pages = tiny_llm.engine.scheduler.pages
    assert pages.free == pages.capacity


def test_stream_loses_nothing_when_other_calls_run_inside_it(tiny_llm, prompts, alone):
    tokens = []
    for _, delta in tiny_llm.stream([prompts[0]], GREEDY):
        tokens += delta.token_ids
        if len(tokens) == 3:
            (inner,) = tiny_llm.generate([prompts[1]], GREEDY)
    assert inner.outputs[0].token_ids == alone[1]
    assert tokens == alone[0]


def test_generate_interrupted_by_the_user_leaves_nothing_behind(tiny_llm, prompts, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tiny_llm.engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tiny_llm.generate(prompts, GREEDY)
    assert not tiny_llm.engine.has_unfinished


def test_a_new_pool_replaces_the_old_one(tiny_llm):
    old = tiny_llm.runner._cache.latent
    tiny_llm.runner.reset()
    assert old.is_deleted()


def test_logits_cover_every_position_whatever_the_chunking(tiny_llm, prompts, alone):
    logits = tiny_llm.logits(prompts[2])
    assert logits.shape == (70, tiny_llm.model_config.vocab_size)
    assert logits.dtype == np.float32
    assert logits[-1].argmax() == alone[2][0]
    np.testing.assert_allclose(tiny_llm.logits(prompts[2][:40]), logits[:40], atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([[1, 2], []], "empty"),
        ([3, 120], "token id 120 is out of range; allowed: 0 to 119"),
        ([-1], "token id -1 is out of range"),
        ([1] * 128, "max_model_len"),
        ("text", "needs a tokenizer"),
    ],
)
def test_generate_refuses_a_bad_prompt_and_goes_on(tiny_llm, prompts, alone, prompt, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm.generate(prompt or [[]], GREEDY)
    assert tiny_llm.generate([prompts[1]], GREEDY)[0].outputs[0].token_ids == alone[1]


def test_generate_refuses_a_wrong_number_of_parameters(tiny_llm, prompts):
    with pytest.raises(ValueError, match="2 sampling parameters for 6 prompts"):
        tiny_llm.generate(prompts, [GREEDY, GREEDY])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seq": 4}, "Did you mean 'max_num_seqs'"),
        ({"max_model_len": 10**6}, "max_position_embeddings"),
        ({"dtype": "float16"}, "allowed: 'auto', 'float32', 'bfloat16'"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_lora_rank 512, .*; this model has kv_lora_rank 32,"),
        ({"layer_loop": "scan", "layer_storage": "per_layer"}, "needs layer_storage 'stacked'"),
        ({"layer_storage": "packed"}, "allowed: 'auto', 'stacked', 'per_layer'"),
    ],
)
def test_llm_refuses_bad_options_before_it_loads(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("tiny-random", **options)


def test_llm_names_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder here"):
        LLM(tmp_path / "absent")


def test_llm_refuses_the_flash_model_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "glm5_next"}')
    with pytest.raises(ValueError, match="glm5_next"):
        LLM(tmp_path)
