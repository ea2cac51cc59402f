"""The sampler in one compiled program: what it keeps, what it draws, what it must not notice."""

import math

import jax
import numpy as np
import pytest

from glm_jax.sampling import sampler
from glm_jax.sampling.sampler import RowSettings, sample

ROWS, VOCABULARY, STOP_IDS = 64, 40, 4
NO_STOP_ID = 2**31 - 1
FLOOR = -50.0  # a token that is never drawn
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def program():
    """`sample`, compiled once for the shapes above."""
    shapes = settings()
    logits = np.zeros((ROWS, VOCABULARY), np.float32)
    return jax.jit(sample).lower(logits, shapes).compile()


def settings(**changes) -> RowSettings:
    """Greedy rows with everything off, but for the changes: one value for all rows or one each."""
    neutral = {
        "temperature": np.float32(0),
        "top_k": np.int32(0),
        "top_p": np.float32(1),
        "min_p": np.float32(0),
        "seed": np.zeros(2, np.uint32),
        "position": np.int32(9),
        "min_length": np.int32(0),
        "stop_ids": np.full(STOP_IDS, NO_STOP_ID, np.int32),
    }
    arrays = {}
    for name, value in neutral.items():
        new = np.asarray(changes.pop(name, value), value.dtype)
        arrays[name] = np.ascontiguousarray(np.broadcast_to(new, (ROWS, *value.shape)))
    assert not changes
    return RowSettings(**arrays)


def rows_of(*values) -> np.ndarray:
    """Row 0 as given, FLOOR where nothing is given; the same in every row."""
    line = np.full(VOCABULARY, FLOOR, np.float32)
    line[: len(values)] = values
    return np.tile(line, (ROWS, 1))


def drawn_set(program, logits, calls=6, **changes) -> set[int]:
    """Every token drawn over many positions."""
    found: set[int] = set()
    for call in range(calls):
        position = 1000 * call + np.arange(ROWS)
        found |= set(np.asarray(program(logits, settings(position=position, **changes))).tolist())
    return found


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals(program):
    logits = RNG.normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    logits[0, [7, 30]] = 9.0
    logits[1] = 0.0
    logits[2, [39, 38]] = 9.0
    expected = logits.argmax(axis=1)
    assert expected[:3].tolist() == [7, 0, 38]
    np.testing.assert_array_equal(program(logits, settings()), expected)


def test_greedy_ignores_the_settings_of_sampling(program):
    logits = RNG.normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    odd = settings(top_k=3, top_p=0.1, min_p=0.9, seed=[5, 6])
    np.testing.assert_array_equal(program(logits, odd), logits.argmax(axis=1))


def test_greedy_rows_stay_greedy_beside_sampled_ones(program):
    logits = RNG.normal(size=(ROWS, VOCABULARY)).astype(np.float32)
    warm = np.arange(ROWS) % 2
    drawn = np.asarray(program(logits, settings(temperature=warm * 5.0)))
    np.testing.assert_array_equal(drawn[::2], logits.argmax(axis=1)[::2])
    assert (drawn[1::2] != logits.argmax(axis=1)[1::2]).any()


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_nearly_even(program):
    logits = rows_of(2.0, 1.0, 0.0)
    assert drawn_set(program, logits, temperature=0.01) == {0}
    assert drawn_set(program, logits, temperature=2.0) == {0, 1, 2}


@pytest.mark.parametrize(
    ("k", "kept"),
    [(1, {0}), (2, {0, 1}), (3, {0, 1, 2}), (5, {0, 1, 2, 3, 4}), (99, set(range(6)))],
)
def test_top_k_keeps_exactly_k_tokens_also_among_equals(program, k, kept):
    # Four tokens tie for the places 1 to 4: the lowest ids stay.
    logits = rows_of(1.5, 1.0, 1.0, 1.0, 1.0, 0.5)
    assert drawn_set(program, logits, temperature=1.0, top_k=k, calls=12) == kept


def test_top_p_keeps_the_fewest_tokens_that_reach_it(program):
    logits = rows_of(*np.log([0.5, 0.3, 0.15, 0.05]))
    for top_p, kept in (
        (1e-6, {0}),
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.79, {0, 1}),
        (0.81, {0, 1, 2}),
    ):
        assert drawn_set(program, logits, temperature=1.0, top_p=top_p, calls=10) == kept, top_p


def test_min_p_keeps_tokens_by_their_ratio_to_the_best(program):
    logits = rows_of(*np.log([0.5, 0.3, 0.15, 0.05]))
    for min_p, kept in ((0.09, {0, 1, 2, 3}), (0.2, {0, 1, 2}), (0.5, {0, 1}), (1.0, {0})):
        assert drawn_set(program, logits, temperature=1.0, min_p=min_p, calls=16) == kept, min_p


def test_min_p_and_top_p_come_after_temperature(program):
    # At temperature 2 the ratio of the two is 0.5: min_p 0.4 keeps both, at temperature 1 one.
    logits = rows_of(0.0, math.log(0.25))
    assert drawn_set(program, logits, temperature=1.0, min_p=0.4) == {0}
    assert drawn_set(program, logits, temperature=2.0, min_p=0.4) == {0, 1}


def test_top_p_counts_what_top_k_left(program):
    # Of the two kept by top-k the first has 5/8 of the mass.
    logits = rows_of(*np.log([0.5, 0.3, 0.15, 0.05]))
    assert drawn_set(program, logits, temperature=1.0, top_k=2, top_p=0.6) == {0}
    assert drawn_set(program, logits, temperature=1.0, top_k=2, top_p=0.65) == {0, 1}


def test_stop_ids_are_banned_below_the_minimum_length_only(program):
    logits = rows_of(3.0, 2.0, 1.0)
    position = np.where(np.arange(ROWS) < 5, 11, 12)
    ids = np.array([0, 2, NO_STOP_ID, NO_STOP_ID])
    banned = settings(position=position, min_length=12, stop_ids=ids)
    drawn = np.asarray(program(logits, banned))
    assert drawn[:5].tolist() == [1] * 5
    assert drawn[5:].tolist() == [0] * (ROWS - 5)
    assert drawn_set(program, logits, temperature=1.0, min_length=10**6, stop_ids=ids) == {1}
    assert drawn_set(program, logits, temperature=1.0, min_length=0, stop_ids=ids) == {0, 1, 2}


def test_a_stop_id_beyond_the_vocabulary_bans_nothing(program):
    logits = rows_of(0.0, 3.0)
    logits[:, -1] = 5.0
    far = settings(min_length=99, stop_ids=[VOCABULARY, VOCABULARY + 1, 2**30, NO_STOP_ID])
    assert set(np.asarray(program(logits, far)).tolist()) == {VOCABULARY - 1}


def test_a_seed_gives_the_same_draw_in_every_row(program):
    logits = rows_of(*RNG.normal(size=VOCABULARY))
    drawn = np.asarray(program(logits, settings(temperature=1.5, seed=[3, 4], position=77)))
    assert len(set(drawn.tolist())) == 1


@pytest.mark.parametrize("mates", ["greedy", "warm", "truncated", "banned"])
def test_a_draw_does_not_depend_on_who_shares_the_batch(program, mates):
    # Nearly even logits: rounding in a mate's truncation would drop the last of these tokens.
    logits = RNG.normal(scale=0.01, size=(ROWS, VOCABULARY)).astype(np.float32)
    seeds = RNG.integers(0, 2**32, size=(ROWS, 2), dtype=np.uint32)
    position = RNG.integers(1, 1000, size=ROWS)
    alone = np.asarray(program(logits, settings(temperature=1.0, seed=seeds, position=position)))
    watched = np.arange(ROWS) < ROWS // 2
    changes = {
        "greedy": {"temperature": np.where(watched, 1.0, 0.0)},
        "warm": {"temperature": np.where(watched, 1.0, 3.0)},
        "truncated": {
            "top_k": np.where(watched, 0, 2),
            "top_p": np.where(watched, 1.0, 0.3),
            "min_p": np.where(watched, 0.0, 0.5),
        },
        "banned": {
            "min_length": np.where(watched, 0, 2000),
            "stop_ids": [0, 1, 2, 3],
        },
    }[mates]
    mixed = settings(**{"temperature": 1.0, "seed": seeds, "position": position, **changes})
    np.testing.assert_array_equal(np.asarray(program(logits, mixed))[watched], alone[watched])
    # Other rows, other order: the draw follows its row.
    order = RNG.permutation(ROWS)
    moved = settings(temperature=1.0, seed=seeds[order], position=position[order])
    np.testing.assert_array_equal(program(logits[order], moved), alone[order])


def test_what_is_off_drops_nothing_where_a_mate_truncates():
    # In float32 the mass before the last tokens may round up to 1: off must not mean "below 1".
    scaled = RNG.normal(scale=6.0, size=(ROWS, VOCABULARY)).astype(np.float32)
    mate = np.arange(ROWS) == 0
    rows = settings(temperature=1.0, top_k=np.where(mate, 1, 0))
    kept = np.asarray(jax.jit(sampler._truncate).lower(scaled, rows).compile()(scaled, rows))
    assert np.isfinite(kept[0]).sum() == 1
    np.testing.assert_array_equal(kept[1:], scaled[1:])


def test_both_words_of_the_seed_and_the_position_change_the_draw(program):
    logits = rows_of(*np.zeros(VOCABULARY))
    seeds = np.zeros((ROWS, 2), np.uint32)
    base = np.asarray(program(logits, settings(temperature=1.0, seed=seeds)))
    assert len(set(base.tolist())) == 1
    numbers = np.arange(ROWS, dtype=np.uint32)
    for change in (
        {"seed": np.stack([numbers, 0 * numbers], axis=1)},
        {"seed": np.stack([0 * numbers, numbers], axis=1)},
        {"seed": seeds, "position": np.arange(ROWS)},
    ):
        drawn = np.asarray(program(logits, settings(temperature=1.0, **change)))
        assert len(set(drawn.tolist())) > VOCABULARY / 2


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, 40), ({"top_k": 6}, 6), ({"top_p": 0.8}, None), ({"temperature": 2.5}, 40)],
)
def test_draws_over_positions_follow_the_distribution(program, changes, kept):
    line = np.random.default_rng(8).normal(size=VOCABULARY).astype(np.float32)
    expected = expected_distribution(line.astype(np.float64), **changes)
    if kept is not None:
        assert np.count_nonzero(expected) == kept
    calls = 150
    counts = np.zeros(VOCABULARY)
    logits = np.tile(line, (ROWS, 1))
    for call in range(calls):
        # The positions of one request, then those of another.
        position, seed = ROWS * (call % 10) + np.arange(ROWS), [call // 10, 7]
        row = settings(**{"temperature": 1.0, "seed": seed, "position": position, **changes})
        counts += np.bincount(np.asarray(program(logits, row)), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    wanted = expected[expected > 0] * calls * ROWS
    assert wanted.min() >= 5
    chi_square = ((counts[expected > 0] - wanted) ** 2 / wanted).sum()
    # Mean n and deviation sqrt(2n) for n degrees of freedom: five deviations are one in millions.
    freedom = len(wanted) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def expected_distribution(line, *, temperature=1.0, top_k=VOCABULARY, top_p=1.0) -> np.ndarray:
    order = np.argsort(-line)
    weights = np.exp((line - line.max()) / temperature)
    kept = np.zeros(VOCABULARY)
    mass, total = 0.0, weights[order[:top_k]].sum()
    for token in order[:top_k]:
        if mass / total >= top_p:
            break
        kept[token] = weights[token]
        mass += weights[token]
    return kept / kept.sum()
