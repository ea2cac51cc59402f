"""In one program every layer writes all rows before any is read: pages written in a step serve it.

The scheduler never plans this (pages are published at commit), but split steps rely on knowing it.
"""

import numpy as np
import pytest

from bucketing.grid import Cell
from bucketing.pack import Chunk, Group, RankRows, SlotReset, SlotSettings, pack
from glm_jax.engine.modes import full

SETTINGS = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
SHARED, DRAFTS = 16, 5
WRITER_PAGES, READER_PAGES = [1, 2, 3], [1, 2, 4]


@pytest.fixture
def prompts(tiny_llm):
    """The writer's prompt, and the reader's, which begins with its first two pages."""
    rng = np.random.default_rng(6)
    writer = rng.integers(0, tiny_llm.model_config.vocab_size, 22).astype(np.int32)
    # The token after the shared pages is the same: the drafter's last shared entry is made of it.
    reader = np.concatenate([writer[: SHARED + 1], writer[3:6]])
    return writer, reader


def step(llm, cell, rows):
    """Run one step; its tokens, drafts and hidden rows."""
    inputs = pack(cell, llm.config.limits(), (rows._replace(drafter=True),))
    outputs = llm.runner.run(full(cell), inputs)
    return [np.asarray(array)[0] for array in (outputs.chunk_tokens, outputs.drafts)] + [
        np.asarray(outputs.group_tokens)[0],
        np.asarray(outputs.hidden)[0],
    ]


def chunk(slot, tokens, start):
    rows = tokens[start:]
    return Chunk(slot, rows, np.append(rows[1:], 0).astype(np.int32), True, DRAFTS)


@pytest.mark.parametrize("as_group", [False, True])
def test_a_reader_finds_what_the_same_step_writes(tiny_llm, prompts, as_group):
    writer, reader = prompts
    cell = Cell(64, 4, 6)
    write = chunk(1, writer, 0)
    written = SlotReset(1, WRITER_PAGES, 0, SETTINGS)
    read = chunk(0, reader, SHARED)
    begins = SlotReset(0, READER_PAGES, SHARED, SETTINGS)
    if as_group:
        group = Group(0, False, len(read.tokens), 0, read.tokens, read.next_tokens, True, DRAFTS)

    tiny_llm.runner.reset()
    step(tiny_llm, cell, RankRows([write], (), [written]))
    alone = RankRows((), [group], [begins]) if as_group else RankRows([read], (), [begins])
    expected = step(tiny_llm, cell, alone)

    tiny_llm.runner.reset()
    if as_group:
        rows = RankRows([write], [group], [written, begins])
    else:
        # The reader's rows stand before the writer's.
        rows = RankRows([read, write], (), [begins, written])
    got = step(tiny_llm, cell, rows)

    count, chunks = len(read.tokens), got[0].shape[0]
    if as_group:
        first, line, token = cell.prefill, chunks, (2, (0, count - 1))
    else:
        first, line, token = 0, 0, (0, 0)
    assert got[token[0]][token[1]] == expected[token[0]][token[1]]
    np.testing.assert_array_equal(got[1][line], expected[1][line], err_msg="drafts")
    mine = slice(first, first + count)
    np.testing.assert_allclose(got[3][mine], expected[3][mine], atol=1e-5)
    tiny_llm.runner.reset()
