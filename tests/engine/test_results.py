import dataclasses

import numpy as np
import pytest

from bucketing.grid import Cell
from bucketing.pack import RankRows
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RowClass
from glm_jax.engine.results import read_results
from glm_jax.sampling.params import SamplingParams


def entry(name, row_class, known=1, drafts=0, sampled=True) -> PlanEntry:
    return PlanEntry(Request(name, [1], SamplingParams()), row_class, known, [7] * drafts, sampled)


PLAN = StepPlan(
    Cell(8, 4, 3),
    (RankRows(),),
    (
        entry("partial", RowClass.PREFILL, known=5, sampled=False),
        entry("final", RowClass.PREFILL, known=3),
    ),
    (
        entry("decode", RowClass.DECODE, drafts=2),
        entry("rest", RowClass.PREFILL, known=2),
        entry("cut rest", RowClass.PREFILL, known=3, sampled=False),
    ),
    pairs=0,
)
CHUNKS = np.array([[90, 91, 92, 93]])
GROUPS = np.array([[[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]]])


def results(accepted) -> dict:
    read = read_results(PLAN, CHUNKS, GROUPS, np.array([accepted]))
    return {result.entry.request_id: (result.advance, result.tokens) for result in read}


def test_each_request_gets_the_tokens_of_its_own_rows():
    assert results([0, 7, 7, 7]) == {
        "partial": (5, []),
        "final": (3, [91]),
        "decode": (1, [10]),
        "rest": (2, [21]),
        "cut rest": (3, []),
    }


def test_accepted_drafts_are_emitted_with_the_token_after_them():
    assert results([1, 0, 0, 0])["decode"] == (2, [10, 11])
    assert results([2, 0, 0, 0])["decode"] == (3, [10, 11, 12])


@pytest.mark.parametrize("accepted", [3, -1])
def test_impossible_acceptance_is_an_error(accepted):
    with pytest.raises(RuntimeError, match="'decode' had 2 drafts, but the device accepted"):
        results([accepted, 0, 0, 0])


def test_each_request_gets_the_drafts_behind_its_own_rows():
    entries = [(PLAN.chunk_entries, {"final": 2}), (PLAN.group_entries, {"decode": 1, "rest": 3})]
    chunks, groups = (
        tuple(e._replace(new_drafts=wanted.get(e.request_id, 0)) for e in listed)
        for listed, wanted in entries
    )
    plan = dataclasses.replace(PLAN, chunk_entries=chunks, group_entries=groups, drafter=True)
    drafts = np.arange(8 * 3).reshape(1, 8, 3)
    read = read_results(plan, CHUNKS, GROUPS, np.array([[0, 7, 7, 7]]), drafts)
    made = {result.entry.request_id: result.drafts for result in read if result.drafts}
    # Four lines for chunks, then those of groups.
    assert made == {"final": [3, 4], "decode": [12], "rest": [15, 16, 17]}


def test_negative_tokens_are_an_error():
    with pytest.raises(RuntimeError, match=r"'final' drew token ids \[-1\]"):
        read_results(PLAN, np.array([[0, -1, 0, 0]]), GROUPS, np.zeros((1, 4), int))


def test_a_negative_token_of_a_row_that_is_not_sampled_does_not_matter():
    read_results(PLAN, np.array([[-1, 5, -1, -1]]), GROUPS, np.zeros((1, 4), int))


@pytest.mark.parametrize(
    ("chunks", "groups", "accepted"),
    [((1, 1), (1, 4, 3), (1, 4)), ((1, 4), (1, 4, 1), (1, 4)), ((1, 4), (1, 2, 3), (1, 2))],
)
def test_outputs_of_another_cell_are_an_error(chunks, groups, accepted):
    arrays = (np.zeros(shape, int) for shape in (chunks, groups, accepted))
    with pytest.raises(RuntimeError, match="do not belong to a step of cell"):
        read_results(PLAN, *arrays)
