import numpy as np
import pytest

from glm_jax.engine.acceptance import Acceptance, RequestAcceptance, Tally


def draw(rng, rates) -> int:
    """Accepted drafts of a group with one draft per rate."""
    refused = rng.random(len(rates)) >= rates
    return int(refused.argmax()) if refused.any() else len(rates)


def feed(acceptance, rng, rates, groups, *, refresh=8) -> None:
    """Observe groups that accept by `rates`, one per step."""
    for step in range(groups):
        acceptance.observe(len(rates), draw(rng, np.array(rates)))
        if step % refresh == refresh - 1:
            acceptance.refresh(refresh)


def test_a_tally_counts_drafts_and_accepted_per_position():
    tally = Tally()
    for drafts, accepted in [(3, 3), (3, 1), (1, 0), (5, 2)]:
        tally.observe(drafts, accepted)
    assert tally.steps == 4
    assert tally.drafts == 12
    assert tally.accepted == 6
    assert tally.offered_at == (4, 3, 3, 1, 1)
    assert tally.accepted_at == (3, 2, 1, 0, 0)
    assert tally.per_position == pytest.approx((3 / 4, 2 / 3, 1 / 3, 0, 0))
    assert tally.mean_length == 1 + 6 / 4


def test_a_group_without_drafts_is_not_counted():
    tally = Tally()
    tally.observe(0, 0)
    assert (tally.steps, tally.drafts, tally.mean_length) == (0, 0, 1.0)
    assert tally.per_position == (0.0,) * 5


def test_expected_tokens_are_the_sum_of_the_chances_to_reach_each_draft():
    acceptance = Acceptance()
    rates = [acceptance.rate(position) for position in range(5)]
    for drafts in range(6):
        expected = 1 + np.cumprod(rates[:drafts]).sum()
        assert acceptance.expected_tokens(drafts) == pytest.approx(expected)


def test_rates_approach_what_was_accepted():
    acceptance = Acceptance()
    true = (0.8, 0.6, 0.7, 0.3, 0.9)
    feed(acceptance, np.random.default_rng(0), true, 4000)
    near = [acceptance.rate(position) for position in range(5)]
    # About 370 groups count; the last positions are reached by few of them.
    np.testing.assert_allclose(near[:3], true[:3], atol=0.08)
    np.testing.assert_allclose(near[3:], true[3:], atol=0.2)


def test_rates_change_only_at_a_refresh():
    acceptance = Acceptance()
    before = acceptance.rate(0)
    acceptance.observe(1, 0)
    assert acceptance.rate(0) == before
    acceptance.refresh()
    assert acceptance.rate(0) < before


def test_old_text_is_forgotten():
    acceptance = Acceptance()
    rng = np.random.default_rng(1)
    feed(acceptance, rng, [0.9] * 3, 2000)
    feed(acceptance, rng, [0.2] * 3, 1000)
    assert acceptance.rate(0) == pytest.approx(0.2, abs=0.1)
    assert acceptance.steps == 3000


def test_a_position_without_drafts_follows_the_one_before_it():
    acceptance = Acceptance()
    rng = np.random.default_rng(2)
    feed(acceptance, rng, [0.8, 0.8, 0.8], 1000)
    feed(acceptance, rng, [0.4], 600)
    assert acceptance.rate(0) == pytest.approx(0.5, abs=0.1)
    assert acceptance.rate(1) == pytest.approx(acceptance.rate(0), rel=0.15)


def test_long_drafts_of_good_requests_do_not_raise_the_rates_of_all():
    acceptance = Acceptance()
    rng = np.random.default_rng(3)
    for step in range(4000):
        good = step % 2 == 0
        rates = np.array([0.9, 0.9, 0.9] if good else [0.3])
        acceptance.observe(len(rates), draw(rng, rates))
        acceptance.refresh()
    assert acceptance.rate(0) == pytest.approx(0.6, abs=0.06)
    # The later positions are only seen with good requests, where they equal the first.
    assert acceptance.rate(1) == pytest.approx(acceptance.rate(0), abs=0.06)


def test_after_forget_few_groups_decide():
    rng = np.random.default_rng(4)
    kept, forgot = Acceptance(), Acceptance()
    for acceptance in (kept, forgot):
        feed(acceptance, rng, [0.1], 1000)
    forgot.forget(32)
    for acceptance in (kept, forgot):
        for _ in range(32):
            acceptance.observe(1, 1)
        acceptance.refresh(32)
    assert kept.rate(0) < 0.25
    assert forgot.rate(0) > 0.45


def test_a_request_starts_as_the_average_and_is_compared_without_being_counted():
    engine, request = Acceptance(), RequestAcceptance()
    assert request.skill == 1.0
    request.compare(3, 2, engine)
    assert request.skill > 1.0
    assert engine.steps == 0


@pytest.mark.parametrize("own", [0.35, 0.7])
def test_skill_is_a_requests_rate_over_the_engines(own):
    engine, request = Acceptance(), RequestAcceptance()
    rng = np.random.default_rng(5)
    feed(engine, rng, [0.7, 0.7, 0.7], 2000)
    for _ in range(400):
        request.compare(3, draw(rng, np.full(3, own)), engine)
    assert request.skill == pytest.approx(own / 0.7, abs=0.15)


def test_a_curve_of_half_the_skill_has_half_the_rates():
    acceptance = Acceptance()
    rates = [acceptance.rate(position) / 2 for position in range(5)]
    expected = 1 + np.concatenate([[0], np.cumsum(np.cumprod(rates))])
    np.testing.assert_allclose(acceptance.curve(0.5), expected)
