"""The account of 8192 prefill rows beside 32 x 6 decode rows at 131,072 tokens, recomputed."""

import pytest

from glm_jax.ledger.article import NOTES, article_items
from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.model.presets import PRESETS

GLM = PRESETS["glm-5.3"]


def items_of(shape):
    shapes = {"decode": shape.decode_alone(), "prefill": shape.prefill_alone(), "mixed": shape}
    return {
        item.name: item
        for item in article_items(GLM, make_formats(GLM), Layout.parse("tp8ep8dp8"), shapes)
    }


def load(prefill=8192, prefix=0, drafts=5):
    return StepShape.of_load(
        prefill=prefill, prefix=prefix, decode=32, drafts=drafts, context=131072
    )


ITEMS = items_of(load())


@pytest.mark.parametrize(
    ("name", "decode", "mixed", "ratio"),
    [
        ("hidden gather, one layer", 2.3593e6, 103.02e6, 43.667),
        ("hidden gather, all sparse layers", 0.17695e9, 7.7267e9, 43.667),
        ("dispatch, one layer", 9.4372e6, 412.09e6, 43.667),
        ("combine, one layer", 18.874e6, 824.18e6, 43.667),
        ("dispatch and combine, all sparse layers", 2.1234e9, 92.720e9, 43.667),
        ("attended pairs, one layer", 393_216, 15_074_304, 38.336),
        ("gathered entries, one layer", 257.95e6, 9.8887e9, 38.336),
        ("attention, one layer", 54.761e9, 2.0993e12, 38.336),
        ("scored pairs, one full layer", 25.166e6, 58.724e6, 2.3335),
        ("index scores, all full layers", 4.3293e12, 10.102e12, 2.3335),
        ("cache written", 10.356e6, 452.23e6, 43.667),
        ("sampled rows", 192, 193, 193 / 192),
    ],
)
def test_items_have_the_recomputed_values(name, decode, mixed, ratio):
    item = ITEMS[name]
    assert item.values["decode"] == pytest.approx(decode, rel=1e-3)
    assert item.values["mixed"] == pytest.approx(mixed, rel=1e-3)
    assert item.ratio == pytest.approx(ratio, rel=1e-3)


def test_a_prompts_rows_attend_to_far_fewer_keys_than_the_triangle():
    assert ITEMS["attended pairs, one layer"].values["prefill"] == 14_681_088
    assert ITEMS["scored pairs, one full layer"].values["prefill"] == 8192 * 8193 // 2


def test_beyond_2048_tokens_a_row_attends_to_2048_whatever_its_prefix():
    for prefix in (2048, 131072):
        attended = items_of(load(prefix=prefix))["attended pairs, one layer"]
        assert attended.values["prefill"] == 8192 * 2048


@pytest.mark.parametrize(
    ("prefix", "mixed", "ratio"), [(131072, 1.1325e9, 45.0), (2**20 - 8192, 8.5814e9, 341.0)]
)
def test_a_prefix_rules_the_scored_pairs_of_later_chunks(prefix, mixed, ratio):
    scored = items_of(load(prefix=prefix))["scored pairs, one full layer"]
    assert scored.values["mixed"] == pytest.approx(mixed, rel=1e-3)
    assert scored.ratio == pytest.approx(ratio, rel=1e-3)


def test_one_copy_a_device_is_what_really_travels():
    item = ITEMS["the same, one copy a device, to others only"]
    assert item.values["decode"] == pytest.approx(1.23e9, abs=0.005e9)
    assert item.values["mixed"] == pytest.approx(53.7e9, abs=0.05e9)
    scales = ITEMS["scales of the dispatch, one layer"].values["mixed"]
    assert scales / ITEMS["dispatch, one layer"].values["mixed"] == pytest.approx(0.03125)


def test_a_requests_rows_share_one_reading_of_its_index_keys():
    item = ITEMS["index keys read, one full layer"]
    assert item.values["decode"] == 32 * 131072 * 132  # 554 MB; row by row 3.32 GB
    assert item.values["mixed"] == item.values["decode"] + 8192 * 132


def test_a_step_that_gives_up_its_drafts_is_another():
    mixed = items_of(load(drafts=0))["dispatch and combine, all sparse layers"]
    assert load(drafts=0).rows == 8224
    assert mixed.values["mixed"] == pytest.approx(91.0e9, rel=1e-3)
    assert mixed.values["decode"] == pytest.approx(0.3539e9, rel=1e-3)
    assert mixed.ratio == pytest.approx(257, rel=1e-3)


@pytest.mark.parametrize(("rows", "pairs"), [(32768, 5.369e8), (131072, 8.590e9)])
def test_the_square_of_a_prompt(rows, pairs):
    assert ChunkShape(rows).pairs == pytest.approx(pairs, rel=1e-3)


def test_what_is_published_wrongly_has_a_note():
    wrong = {name for name, item in ITEMS.items() if item.published and item.note}
    assert "dispatch and combine, all sparse layers" in wrong
    assert "attended pairs, one layer" in wrong
    assert "dispatch, one layer" not in wrong
    assert len(NOTES) >= 5


def test_pairs_are_those_of_every_row():
    for prefix, rows in ((0, 5000), (100, 40), (2040, 20), (3000, 7)):
        chunk = ChunkShape(rows, prefix)
        seen = [prefix + row + 1 for row in range(rows)]
        assert chunk.pairs == sum(seen)
        assert chunk.pairs_within(2048) == sum(min(keys, 2048) for keys in seen)
        group = GroupShape(prefix + rows, 1, rows - 1)
        assert (group.pairs, group.pairs_within(2048)) == (
            chunk.pairs,
            chunk.pairs_within(2048),
        )
