import pytest

from bucketing.grid import Cell
from bucketing.pack import RankRows
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RowClass
from glm_jax.sampling.params import SamplingParams


def entry(name, row_class, known=1, drafts=0) -> PlanEntry:
    return PlanEntry(Request(name, [1], SamplingParams()), row_class, known, [7] * drafts, True)


PREFILL, DECODE = RowClass.PREFILL, RowClass.DECODE


@pytest.mark.parametrize(
    ("chunks", "groups", "kind"),
    [
        ([PREFILL], [], "prefill"),
        ([], [DECODE], "decode"),
        ([PREFILL], [DECODE], "mixed"),
        ([], [DECODE, PREFILL], "mixed"),
        ([], [PREFILL], "prefill"),
    ],
)
def test_kind_follows_the_classes_not_the_places(chunks, groups, kind):
    plan = StepPlan(
        Cell(8, 4, 1),
        (RankRows(),),
        tuple(entry("c", row_class) for row_class in chunks),
        tuple(entry("g", row_class) for row_class in groups),
        pairs=0,
    )
    assert plan.kind == kind


def test_rows_are_counted_per_segment():
    plan = StepPlan(
        Cell(16, 4, 3),
        (RankRows(),),
        (entry("a", PREFILL, known=5), entry("b", PREFILL, known=6)),
        (entry("c", DECODE, drafts=2), entry("d", PREFILL, known=2)),
        pairs=0,
    )
    assert (plan.prefill_rows, plan.prefill_pad_rows) == (11, 5)
    assert (plan.decode_rows, plan.decode_pad_rows) == (5, 7)
    assert plan.request_ids == ("a", "b", "c", "d")
    assert plan.entries == plan.chunk_entries + plan.group_entries
