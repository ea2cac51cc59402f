"""A step says how many rows each expert got; pads count nowhere."""

import numpy as np
import pytest

from glm_jax import SamplingParams
from glm_jax.engine.engine import Engine
from scripts.fuzz_modes import target_of


def _story(target, monkeypatch) -> tuple[list, list[np.ndarray]]:
    """Records of the steps of three requests, and the rows of every expert in each step."""
    counts: list[np.ndarray] = []
    run = target.runner.run

    def watched(served, inputs):
        outputs = run(served, inputs)
        counts.append(np.asarray(outputs.expert_rows)[0])
        return outputs

    target.runner.reset()
    monkeypatch.setattr(target.runner, "run", watched)
    engine = Engine(target.config, target.runner, vocab_size=target.model_config.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for number, length in enumerate((3, 50, 90)):
        prompt = (
            np.random.default_rng(number)
            .integers(0, target.model_config.vocab_size, length)
            .tolist()
        )
        engine.add_request(f"r{number}", prompt, params)
    records = []
    while engine.has_unfinished:
        records.append(engine.step().record)
    return records, counts


@pytest.fixture(params=["full", "piecewise"])
def story(request, tiny_llm, monkeypatch):
    target = tiny_llm if request.param == "full" else target_of(tiny_llm, "piecewise")
    return _story(target, monkeypatch)


def test_every_useful_row_reaches_as_many_experts_as_the_model_says(tiny_llm, story):
    config = tiny_llm.model_config
    sparse = sum(config.is_sparse(layer) for layer in range(config.num_hidden_layers))
    records, counts = story
    assert any(record.prefill_pad_rows + record.decode_pad_rows for record in records)
    for record, rows in zip(records, counts, strict=True):
        assert rows.shape == (sparse, config.n_routed_experts)
        useful = record.prefill_rows + record.decode_rows
        assert rows.sum(axis=1).tolist() == [useful * config.num_experts_per_tok] * sparse


def test_the_record_has_the_busiest_expert_and_the_mean(story):
    for record, rows in zip(*story, strict=True):
        assert record.expert_rows_max == rows.max()
        assert record.expert_rows_mean == pytest.approx(rows.mean())


def test_modes_count_alike(tiny_llm, monkeypatch):
    _, counts = _story(tiny_llm, monkeypatch)
    monkeypatch.undo()
    _, piecewise = _story(target_of(tiny_llm, "piecewise"), monkeypatch)
    np.testing.assert_array_equal(np.concatenate(counts), np.concatenate(piecewise))
