"""Steps of a small model with GLM-5's entries and index keys, in a cache of fp8_ds_mla."""

import jax
import numpy as np
import pytest

from bucketing.cell import Cell
from bucketing.pack import Chunk, Group, RankRows, SlotReset, SlotSettings, pack
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.modes import Mode, Served, full
from glm_jax.engine.runner import Runner
from glm_jax.model.presets import PRESETS
from glm_jax.model.storage import ParameterStore
from glm_jax.weights.random import fill_random

# One cell for all steps; it is the widest, so pieces are laid out like it.
CELL = Cell(16, 2, 1)
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
FULL, PIECEWISE = full(CELL), Served(Mode.PIECEWISE, CELL, bucket=CELL.rows)
PROMPT, DECODED = 28, 3
TOKENS = np.random.default_rng(7).integers(0, 256, PROMPT).astype(np.int32)


@pytest.fixture(scope="module")
def runner():
    """All layers full and sparse: six kinds of pieces."""
    config = PRESETS["tiny-random"].replace(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_topk=8,
        num_hidden_layers=2,
        indexer_types=("full",) * 2,
        mlp_layer_types=("sparse",) * 2,
    )
    store = ParameterStore(config, dtype="float32", storage="per_layer")
    fill_random(config, store.destination, seed=3)
    engine = EngineConfig(
        max_model_len=64,
        max_num_seqs=CELL.groups,
        max_num_batched_tokens=CELL.prefill,
        prefill_buckets=(CELL.prefill,),
        group_buckets=(CELL.groups,),
        piecewise_buckets=(CELL.rows,),
        page_size=8,
        num_pages=17,
        dtype="float32",
        weight_dtype="float32",
        kv_cache_dtype="fp8_ds_mla",
        layer_storage="per_layer",
        layer_loop="unrolled",
        kernels="xla",
    )
    runner = Runner(store.to_device(jax.devices()[0]), Lowering(config, engine))
    runner.compile([CELL, *runner.pieces.first])
    return runner


def _step(runner, served, **rows):
    outputs = runner.run(served, pack(CELL, runner.limits, [RankRows(**rows)]))
    return type(outputs)(*(np.asarray(array)[0] for array in outputs))


def _chunk(slot, start, stop):
    following = np.append(TOKENS[start + 1 : stop + 1], 0)[: stop - start].astype(np.int32)
    return Chunk(slot, TOKENS[start:stop], following, stop == PROMPT)


def _generate(runner, served, chunks):
    """Hidden rows of the prompt in chunks of these sizes, and the tokens drawn after it."""
    runner.reset()
    hidden, start = [], 0
    for size in chunks:
        # Pages in descending order: positions and pages are different things.
        resets = [SlotReset(1, range(13, 7, -1), 0, GREEDY)] if start == 0 else []
        outputs = _step(runner, served, chunks=[_chunk(1, start, start + size)], resets=resets)
        hidden.append(outputs.hidden[:size])
        start += size
    tokens = [int(outputs.chunk_tokens[0])]
    for _ in range(DECODED):
        outputs = _step(runner, served, groups=[Group(1, True, 1, 0, None, None, True)])
        tokens.append(int(outputs.group_tokens[0, 0]))
    return np.concatenate(hidden), tokens


@pytest.fixture(scope="module")
def whole(runner):
    return _generate(runner, FULL, (16, 12))


@pytest.mark.parametrize("size", [1, 5, 8])
def test_fp8_cache_gives_the_same_rows_for_every_chunk_size(runner, whole, size):
    chunks = [min(size, PROMPT - start) for start in range(0, PROMPT, size)]
    hidden, tokens = _generate(runner, FULL, chunks)
    np.testing.assert_allclose(hidden, whole[0], atol=1e-5)
    assert tokens == whole[1]


def test_fp8_cache_gives_the_same_rows_piece_by_piece(runner, whole):
    hidden, tokens = _generate(runner, PIECEWISE, (16, 12))
    np.testing.assert_allclose(hidden, whole[0], atol=1e-5)
    assert tokens == whole[1]


def test_fp8_cache_keeps_page_zero_and_foreign_pages(runner):
    runner.reset()
    before = runner.snapshot()
    assert not any(array.any() for array in before)
    resets = [SlotReset(0, (3, 5), 0, GREEDY)]
    _step(runner, FULL, chunks=[_chunk(0, 0, 12)], resets=resets)
    latent, index_keys = runner.snapshot()
    assert latent.dtype == index_keys.dtype == np.uint8
    assert (latent.shape[-1], index_keys.shape[-1]) == (656, 132)
    for array in (latent, index_keys):
        written = np.unique(np.nonzero(array.any(axis=(-1, -2)))[2])
        assert written.tolist() == [3, 5]


def test_fp8_cache_has_the_same_bits_whatever_pads_hold(runner, monkeypatch):
    # Pads are rows of token 0, which nobody here has.
    tokens = np.arange(1, 8, dtype=np.int32)
    embedding = np.array(runner.model.embed[...])
    assert sum(np.array_equal(leaf, embedding) for leaf in runner._params) == 1

    def live(poison: float) -> list[np.ndarray]:
        changed = embedding.copy()
        changed[0] = poison
        leaves = [changed if np.array_equal(leaf, embedding) else leaf for leaf in runner._params]
        runner.reset()
        with monkeypatch.context() as patch:
            patch.setattr(runner, "_params", [jax.device_put(leaf) for leaf in leaves])
            outputs = _step(
                runner,
                FULL,
                chunks=[Chunk(0, tokens[:5], tokens[1:6], False)],
                groups=[Group(1, False, 1, 0, tokens[6:], tokens[6:], False)],
                resets=[SlotReset(0, (3,), 0, GREEDY), SlotReset(1, (5,), 0, GREEDY)],
            )
        rows = np.r_[:5, CELL.prefill]
        return [outputs.hidden[rows], *runner.snapshot()]

    clean = live(0.0)
    assert np.isfinite(clean[0]).all()
    for poison in (np.nan, np.inf, 1e30):
        for found, expected in zip(live(poison), clean, strict=True):
            assert found.tobytes() == expected.tobytes()
