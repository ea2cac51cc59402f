"""The three accounts of a mixed step, and who pays for it."""

from dataclasses import replace

import pytest

from bucketing.cell import Cell
from glm_jax.ledger.accounts import make_accounts
from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.hardware import HARDWARE
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.shape import StepShape
from glm_jax.model.presets import PRESETS

GLM = PRESETS["glm-5.3"]
MIXED = StepShape.of_load(prefill=8192, prefix=0, decode=32, drafts=5, context=131072)


def accounts_of(shape=MIXED):
    return make_accounts(
        GLM,
        shape,
        formats=make_formats(GLM),
        hardware=HARDWARE["h200"]["attainable"],
        layout=Layout.parse("tp8ep8dp8"),
    )


ACCOUNTS = accounts_of()
BILLS = {bill.rule: bill for bill in ACCOUNTS.bills()}


def test_a_mixed_step_has_three_accounts_and_others_have_their_own():
    assert list(ACCOUNTS.ledgers) == ["decode", "prefill", "mixed"]
    alone = accounts_of(MIXED.decode_alone())
    assert list(alone.ledgers) == ["decode"]
    assert (alone.together, alone.stretch, alone.bills()) == (None, None, ())
    assert alone.step.seconds == ACCOUNTS.ledgers["decode"].seconds


def test_mixing_saves_the_second_reading_of_the_experts():
    assert ACCOUNTS.together == pytest.approx(0.809, abs=0.001)
    assert ACCOUNTS.stretch == pytest.approx(3.71, abs=0.01)
    read = {kind: one.total.demand.read for kind, one in ACCOUNTS.ledgers.items()}
    assert read["mixed"] < 1.02 * read["decode"]


def test_every_bill_is_the_whole_step():
    for bill in BILLS.values():
        assert bill.prefill + bill.decode == pytest.approx(ACCOUNTS.step.seconds)


def test_by_rows_decodes_pay_little_and_by_requests_nearly_all_that_is_shared():
    total = ACCOUNTS.step.seconds
    assert BILLS["by rows"].decode / total == pytest.approx(0.041, abs=0.001)
    assert BILLS["by requests"].decode / total == pytest.approx(0.72, abs=0.01)
    # 32 of 33 requests share all but the chunk's own attention, scores and gathers.
    chunk = sum(
        ACCOUNTS.step.times[stage.part] * ACCOUNTS.step.floor(stage).seconds
        for stage in ACCOUNTS.step.stages
        if stage.mark == "chunks"
    )
    assert BILLS["by requests"].decode < 32 / 33 * (total - chunk) + 0.002


def test_whoever_comes_second_pays_what_it_adds():
    decode, prefill = (ACCOUNTS.ledgers[kind].seconds for kind in ("decode", "prefill"))
    total = ACCOUNTS.step.seconds
    assert BILLS["decode pays what it adds"].decode == pytest.approx(total - prefill)
    assert BILLS["prefill pays what it adds"].prefill == pytest.approx(total - decode)


def test_halves_of_a_padded_step_stand_in_cells_of_their_own():
    accounts = accounts_of(replace(MIXED, cell=Cell(8192, 32, 6)))
    assert accounts.ledgers["decode"].shape.cell == Cell(0, 32, 6)
    assert accounts.ledgers["prefill"].shape.cell == Cell(8192, 0, 6)
