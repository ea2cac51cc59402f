"""The step program itself, driven by hand-made rows: chunking, pages, mixing, slots."""

import numpy as np
import pytest

from bucketing.grid import Cell
from bucketing.pack import Chunk, Group, PageUpdate, RankRows, SlotReset, SlotSettings, pack
from glm_jax.engine.modes import full

PREFILL, MIXED, DECODE = Cell(64, 0, 1), Cell(64, 4, 1), Cell(0, 4, 1)
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
PROMPT_ROWS = 48  # three times the model's index_topk


@pytest.fixture
def step(tiny_llm):
    """Run one step of hand-made rows on fresh pages."""
    tiny_llm.runner.reset()

    def run(cell, **rows):
        inputs = pack(cell, tiny_llm.runner.limits, [RankRows(**rows)])
        outputs = tiny_llm.runner.run(full(cell), inputs)
        return type(outputs)(*(np.asarray(array)[0] for array in outputs))

    yield run
    tiny_llm.runner.reset()


@pytest.fixture(scope="module")
def tokens(tiny_llm):
    vocab_size = tiny_llm.model_config.vocab_size
    return np.random.default_rng(7).integers(0, vocab_size, PROMPT_ROWS).astype(np.int32)


def _chunk(slot, tokens, start, stop):
    following = np.append(tokens[start + 1 : stop + 1], 0)[: stop - start].astype(np.int32)
    return Chunk(slot, tokens[start:stop], following, stop == len(tokens))


def _reset(slot, pages):
    return SlotReset(slot, pages, 0, GREEDY)


def _decode(slot):
    return Group(slot, True, 1, 0, None, None, True)


def _prefill_in_chunks(step, tokens, size, pages):
    hidden = []
    for start in range(0, len(tokens), size):
        stop = min(start + size, len(tokens))
        resets = [_reset(1, pages)] if start == 0 else []
        outputs = step(PREFILL, chunks=[_chunk(1, tokens, start, stop)], resets=resets)
        hidden.append(outputs.hidden[: stop - start])
    return np.concatenate(hidden), int(outputs.chunk_tokens[0])


@pytest.fixture
def one_shot(step, tokens):
    outputs = step(
        PREFILL, chunks=[_chunk(0, tokens, 0, PROMPT_ROWS)], resets=[_reset(0, range(1, 8))]
    )
    return outputs.hidden[:PROMPT_ROWS], int(outputs.chunk_tokens[0])


@pytest.mark.parametrize("size", [*range(1, 18), 23, 24, 31, 32, 33, 47])
def test_step_gives_the_same_rows_for_every_chunk_size(step, tokens, one_shot, size):
    # Pages in descending order: positions and pages are different things.
    hidden, drawn = _prefill_in_chunks(step, tokens, size, range(17, 10, -1))
    np.testing.assert_allclose(hidden, one_shot[0], atol=1e-5)
    assert drawn == one_shot[1]


def test_step_decodes_as_it_prefills(step, tokens, one_shot):
    # The last 20 prompt rows as groups of the decode segment equal the one-shot rows.
    split = PROMPT_ROWS - 20
    step(PREFILL, chunks=[_chunk(2, tokens, 0, split)], resets=[_reset(2, range(20, 27))])
    for position in range(split, PROMPT_ROWS):
        last = position == PROMPT_ROWS - 1
        own = tokens[position : position + 1]
        outputs = step(DECODE, groups=[Group(2, False, 1, 0, own, 0 * own, last)])
        np.testing.assert_allclose(outputs.hidden[0], one_shot[0][position], atol=1e-5)
    assert int(outputs.group_tokens[0, 0]) == one_shot[1]


def test_step_places_a_rest_in_a_wide_group(step, tokens, one_shot):
    step(PREFILL, chunks=[_chunk(2, tokens, 0, PROMPT_ROWS - 3)], resets=[_reset(2, range(20, 27))])
    rest = tokens[-3:]
    following = np.append(rest[1:], 0).astype(np.int32)
    wide = Cell(0, 4, 6)
    outputs = step(wide, groups=[Group(2, False, 3, 0, rest, following, True)])
    np.testing.assert_allclose(outputs.hidden[:3], one_shot[0][-3:], atol=1e-5)
    assert int(outputs.group_tokens[0, 2]) == one_shot[1]


def test_step_serves_prefill_and_decode_together_as_apart(step, tokens):
    other = tokens[::-1].copy()
    step(PREFILL, chunks=[_chunk(0, tokens, 0, PROMPT_ROWS)], resets=[_reset(0, range(1, 9))])
    mixed = step(
        MIXED,
        chunks=[_chunk(1, other, 0, PROMPT_ROWS)],
        groups=[_decode(0)],
        resets=[_reset(1, range(20, 28))],
    )
    step(PREFILL, chunks=[_chunk(2, tokens, 0, PROMPT_ROWS)], resets=[_reset(2, range(30, 38))])
    decode_alone = step(MIXED, groups=[_decode(2)])
    prefill_alone = step(
        MIXED, chunks=[_chunk(3, other, 0, PROMPT_ROWS)], resets=[_reset(3, range(40, 48))]
    )
    # In one cell the rows are equal to the bit, whatever shares the step.
    np.testing.assert_array_equal(mixed.hidden[:PROMPT_ROWS], prefill_alone.hidden[:PROMPT_ROWS])
    np.testing.assert_array_equal(mixed.hidden[64], decode_alone.hidden[64])
    assert mixed.chunk_tokens[0] == prefill_alone.chunk_tokens[0]
    assert mixed.group_tokens[0, 0] == decode_alone.group_tokens[0, 0]


def test_step_grows_a_page_table_by_differences(step, tokens):
    step(PREFILL, chunks=[_chunk(0, tokens, 0, PROMPT_ROWS)], resets=[_reset(0, range(1, 8))])
    step(PREFILL, chunks=[_chunk(1, tokens, 0, PROMPT_ROWS)], resets=[_reset(1, range(20, 26))])
    # Slot 1 has six full pages; its next row needs a seventh, which comes with the step.
    growth = [PageUpdate(1, 6, 44)]
    outputs = step(DECODE, groups=[_decode(0), _decode(1)], pages=growth)
    np.testing.assert_array_equal(outputs.hidden[0], outputs.hidden[1])


def test_step_leaves_page_zero_and_foreign_pages_alone(step, tiny_llm, tokens):
    step(PREFILL, chunks=[_chunk(0, tokens, 0, PROMPT_ROWS)], resets=[_reset(0, range(1, 8))])
    before = tiny_llm.runner.snapshot()
    step(MIXED, chunks=[_chunk(1, tokens, 0, 20)], resets=[_reset(1, range(30, 37))])
    after = tiny_llm.runner.snapshot()
    for old, new in zip(before, after, strict=True):
        assert not new[:, :, 0].any()
        written = np.unique(np.nonzero((old != new).any(axis=-1))[2])
        assert written.tolist() == [30, 31, 32]
