"""The training of the embedded model, on a toy: data, maths, a short run and its resumption."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from scripts.tiny.card import phase_spans, table
from scripts.tiny.checkpoint import Progress, initial_state, load_checkpoint, save_checkpoint
from scripts.tiny.corpus import hash_files, list_files, read_corpus
from scripts.tiny.drafts import agreement, bigram_table
from scripts.tiny.guide import continuations
from scripts.tiny.loss import Batch, Objective, training_loss
from scripts.tiny.parameters import initial_parameters, initial_router_bias
from scripts.tiny.phases import Budget, Phase, phase_at, rate_factor
from scripts.tiny.shape import TinyShape
from scripts.tiny.synthetic import PLAIN, RECALL, RowMaker
from scripts.tiny.tokenizer import (
    EOS_IDS,
    SPECIAL_TOKENS,
    encode_files,
    format_turn,
    save_tokenizer,
    train_tokenizer,
)
from scripts.tiny.trainer import Trainer
from scripts.tiny.transformer import Mode
from scripts.tiny.words import vocabulary_text
from tests.scripts.slow_forward import slow_loss

TOY = TinyShape(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=24,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=8,
    index_topk_freq=2,
    index_skip_topk_offset=1,
)
CODE = "def add(first, second):\n    return first + second\n\n\nfor item in it:\n    print(item)\n"
# Compiling takes nearly all of these tests' time, and nothing here has to run fast.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
PHASES = (Phase("A", 0.0, 2, 24, Objective(Mode(block=8), draft_steps=1), 0.25),)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([CODE * 20], TOY.vocab_size)


@pytest.fixture(scope="module")
def files(tokenizer):
    return encode_files(tokenizer, [CODE * 8, CODE * 5])


@pytest.fixture(scope="module")
def maker(tokenizer, files):
    return RowMaker(tokenizer, np.concatenate(files))


def random_batch(rng, count):
    tokens = rng.integers(0, TOY.vocab_size, (2, count)).astype(np.int32)
    weights = rng.choice(np.array([0.0, 1.0, 1.5], np.float32), (2, count))
    return Batch(tokens, weights)


def random_parameters(rng):
    """Not the first values: those are zero where the model writes, which hides mistakes."""
    values = {}
    for name, first in initial_parameters(TOY, 0).items():
        noise = rng.standard_normal(first.shape).astype(np.float32)
        values[name] = 1 + 0.3 * noise if first.ndim == 1 else noise * first.shape[-2] ** -0.5
    return values


@pytest.mark.parametrize("selection", ["all", "indexer"])
def test_training_loss_and_gradients_equal_those_of_the_slow_forward(selection):
    rng = np.random.default_rng(0)
    parameters, batch = random_parameters(rng), random_batch(rng, 28)
    bias = 0.1 * rng.standard_normal(initial_router_bias(TOY).shape).astype(np.float32)
    mode = Mode(selection=selection, row_stride=4, block=8, capacity=4.0)
    fast = functools.partial(training_loss, shape=TOY, objective=Objective(mode, draft_steps=3))
    slow = functools.partial(
        slow_loss, shape=TOY, selects=selection == "indexer", row_stride=4, draft_steps=3
    )
    differentiate = jax.jit(jax.value_and_grad(fast, has_aux=True), compiler_options=QUICK)
    (loss, _), gradients = differentiate(parameters, bias, batch)
    plain = jax.jit(jax.value_and_grad(slow), compiler_options=QUICK)
    expected, expected_gradients = plain(parameters, bias, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for name, gradient in gradients.items():
        scale = np.abs(np.asarray(expected_gradients[name])).max() + 1e-9
        error = np.abs(np.asarray(gradient) - np.asarray(expected_gradients[name])).max() / scale
        assert error < 1e-3, f"gradient of {name} is off by {error}"


def test_training_lowers_the_loss_and_resumes_with_the_same_next_loss(tmp_path, files, maker):
    def trainer(folder):
        return Trainer(folder, TOY, files, maker, Budget(steps=40), phases=PHASES, seed=3)

    first = trainer(tmp_path / "run")
    losses = [first.advance(lambda line: None)["lm"] for _ in range(20)]
    first.save()
    following = first.advance(lambda line: None)["lm"]
    second = trainer(tmp_path / "run")
    resumed = second.advance(lambda line: None)["lm"]
    assert np.mean(losses[-4:]) < np.mean(losses[:4]) - 0.3
    assert resumed == following
    assert second.progress.step == 21


def test_continuations_mark_the_key_behind_the_longest_earlier_match():
    tokens = np.array([[1, 2, 3, 1, 2, 9, 1, 2, 3]], np.int32)
    marked = np.asarray(jax.jit(continuations)(tokens))[0]
    found = {
        int(row): np.flatnonzero(marked[row]).tolist() for row in np.flatnonzero(marked.any(1))
    }
    # Row 7 ("1 2", then 3) could have followed key 5 or 2: only key 2 is a 3.
    assert found == {3: [1], 6: [1, 4], 7: [2]}


def test_checkpoint_round_trip_keeps_every_array_and_the_progress(tmp_path):
    state = initial_state(TOY, 5)
    progress = Progress(step=3, tokens=96, elapsed=1.5, phase=0, log=[{"step": 3, "lm": 2.5}])
    save_checkpoint(tmp_path / "c.safetensors", TOY, state, progress)
    shape, loaded, read = load_checkpoint(tmp_path / "c.safetensors")
    assert shape == TOY
    assert read == progress
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_checkpoint_that_is_not_there_is_a_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "none.safetensors")


def test_tokenizer_round_trip_gives_back_the_text(tokenizer):
    text = "class Ünï:\n\treturn '\\x00' # 数\n" + format_turn("user", "hi")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < TOY.vocab_size
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(8))


def test_saved_tokenizer_ends_turns_with_an_eos_id(tmp_path, tokenizer):
    save_tokenizer(tokenizer, tmp_path, 512)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(settings["eos_token"]) in EOS_IDS
    assert "<|assistant|>" in (tmp_path / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    "task", ["repeated_tokens", "scattered_facts", "dictionary", "copied_lines", "chat"]
)
def test_synthetic_row_is_exact_in_length_and_its_recalled_tokens_came_before(maker, task):
    rng = np.random.default_rng(1)
    for _ in range(5):
        row = maker.fit(rng, getattr(maker, task)(rng, 200), 200)
        assert row.tokens.shape == row.weights.shape == (200,)
        assert set(row.weights.tolist()) <= {0.0, PLAIN, RECALL}
        for position in np.flatnonzero(row.weights == RECALL):
            assert row.tokens[position] in row.tokens[:position]


def test_synthetic_tasks_ask_for_recall(maker):
    rng = np.random.default_rng(2)
    rows = [maker.make(rng, 256) for _ in range(40)]
    assert np.mean([(row.weights == RECALL).any() for row in rows]) > 0.7


def test_vocabulary_text_holds_the_words():
    assert " lantern " in vocabulary_text()


def test_corpus_splits_do_not_meet_and_hash_names_and_sizes(tmp_path):
    for index in range(20):
        (tmp_path / f"module{index}.py").write_text(f"# {index}\n" + CODE * 4)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_one.py").write_text(CODE)
    corpus = read_corpus(tmp_path)
    assert (len(corpus.train), len(corpus.dev), len(corpus.test)) == (6, 14, 1)
    assert not set(corpus.train) & set(corpus.dev)
    library, tests = list_files(tmp_path)
    assert corpus.files_hash == hash_files(tmp_path, tests + library)
    (tmp_path / "module0.py").write_text(CODE * 5)
    assert corpus.files_hash != hash_files(tmp_path, library + tests)


def test_bigram_table_holds_the_most_frequent_successor():
    files = [np.array([1, 2, 1, 2, 1, 3], np.int32), np.array([2, 0], np.int32)]
    assert bigram_table(files, 4).tolist() == [0, 2, 1, 0]


def test_agreement_counts_a_depth_only_where_the_drafts_before_it_are_the_text():
    tokens = np.array([[5, 6, 7, 8, 9, 9]])
    choices = np.array([[6, 7, 0, 9, 1]])  # what the main model would write behind each row
    drafts = [np.array([[7, 8, 9, 1, 1]]), np.array([[0, 9, 1, 1, 1]])]
    first, second = agreement(drafts, tokens, choices)
    # Rows 0..2 count. Depth 1: drafts 7 8 9 against the choices 7 0 9.
    assert first == {"rate": pytest.approx(2 / 3), "rows": 3}
    # Depth 2: all three first drafts are the text (7 8 9); drafts 0 9 1 against 0 9 1.
    assert second == {"rate": 1.0, "rows": 3}


def test_card_tables_and_phase_spans():
    assert table(["a", "b"], [["x", 0.5]]).splitlines()[-1] == "| x | 0.500 |"
    log = [{"phase": "A", "tokens": 10}, {"phase": "A", "tokens": 20}, {"phase": "B", "tokens": 30}]
    assert phase_spans(log) == [("A", 0.0, 20), ("B", 20, 30)]


def test_phases_and_rates_follow_the_fraction_of_the_budget():
    phases = (*PHASES, dataclasses.replace(PHASES[0], name="B", start=0.5))
    assert [phase_at(phases, f) for f in (0.0, 0.49, 0.5, 1.2)] == [0, 0, 1, 1]
    assert rate_factor(0.0, 0) == pytest.approx(1 / 15)
    assert rate_factor(0.2, 100) == 1.0
    assert rate_factor(1.0, 100) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="Give one"):
        Budget()
