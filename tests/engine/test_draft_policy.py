import pytest
from engine.draft_device import GRID, Batch, Device, FakeRequest

from bucketing.step_time import RowEquivalents
from glm_jax.engine.draft_policy import AutoDrafts, DraftPolicy, FixedDrafts

# Rows cost little and everything is accepted: long drafts.
EAGER = Device(10e-3, 1e-5, 0.1, 2e-4, (0.85,) * 5)
# Rows cost so much that the best length falls with the batch: 3 at batch 1, 1 at batch 8.
ROWS = Device(5e-3, 6e-4, 0.1, 6e-4, (0.8, 0.75, 0.7, 0.65, 0.6))
# 1 at batch 1, none at batch 8.
DENSE = Device(4e-3, 2e-3, 0.12, 4e-4, (0.8, 0.6, 0.5, 0.5, 0.5))
# Nothing is accepted.
STRANGE = Device(10e-3, 1e-4, 0.12, 1e-3, (0.08, 0.05, 0.05, 0.05, 0.05))


class PairTimes:
    """A step costs a nominal time and so much per scored pair."""

    def __init__(self, per_pair):
        self.per_pair = per_pair

    def predict(self, cell, pairs):
        return 0.01 + self.per_pair * pairs


def auto(step_time=None) -> AutoDrafts:
    return AutoDrafts(5, GRID, step_time or RowEquivalents())


def speculating(policy, count) -> list[FakeRequest]:
    requests = [FakeRequest(1000) for _ in range(count)]
    for request in requests:
        policy.admit(request, count)
    return requests


def main_use(batch):
    """The commonest (drafts, drafter) and its share of the steps."""
    (use, steps), *_ = batch.used.most_common(1)
    return *use, steps / batch.used.total()


def test_both_are_policies():
    assert isinstance(FixedDrafts(3), DraftPolicy)
    assert isinstance(auto(), DraftPolicy)


def test_fixed_drafts_are_cut_to_the_room():
    policy = FixedDrafts(3)
    requests = speculating(policy, 4)
    assert policy.new_drafts(requests, [9, 3, 1, 0]) == [3, 3, 1, 0]
    assert policy.drafter(requests)


def test_no_fixed_drafts_never_run_the_drafter():
    policy = FixedDrafts(0)
    requests = speculating(policy, 2)
    assert policy.new_drafts(requests, [9, 9]) == [0, 0]
    assert not policy.drafter(requests)


def test_verified_groups_are_counted():
    for policy in (FixedDrafts(3), auto()):
        first, second = speculating(policy, 2)
        policy.observe(first, 3, 2)
        policy.observe(second, 1, 0)
        assert (policy.acceptance.drafts, policy.acceptance.accepted) == (4, 2)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("device", [EAGER, ROWS, DENSE, STRANGE])
def test_auto_is_within_three_percent_of_the_best_fixed_length(device, size):
    best = device.best_length(size)
    batch = Batch(auto(), device, size).run(500)
    batch.start_count()
    batch.run(1000)
    assert batch.tokens / batch.seconds > 0.97 * device.fixed_rate(best, size)
    assert main_use(batch)[:2] == (best, best > 0)


def test_the_devices_of_this_file_cover_every_length():
    lengths = {(d.best_length(1), d.best_length(8)) for d in (EAGER, ROWS, DENSE, STRANGE)}
    assert lengths == {(5, 5), (3, 1), (1, 0), (0, 0)}


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.3), (0.3, 0.9)])
def test_the_length_follows_the_acceptance(before, after):
    device = Device(10e-3, 2e-4, 0.02, 5e-4, (before,) * 5)
    batch = Batch(auto(), device, 8, length=1000).run(600)
    batch.start_count()
    first = main_use(batch.run(200))
    batch.device = device = device._replace(rates=(after,) * 5)
    batch.run(800)
    batch.start_count()
    second = main_use(batch.run(400))
    assert first[0] != second[0]
    assert second[0] == device.best_length(8)


def test_speculation_is_tried_again_after_a_time_without():
    batch = Batch(auto(), STRANGE, 1, length=60).run(1000)
    batch.start_count()
    assert main_use(batch.run(200))[:2] == (0, False)
    batch.device = STRANGE._replace(rates=(0.9,) * 5)
    batch.run(4000)
    batch.start_count()
    assert main_use(batch.run(200))[:2] == (5, True)


def test_where_speculation_does_not_pay_trials_are_rare():
    batch = Batch(auto(), STRANGE, 1, length=60).run(1000)
    batch.start_count()
    batch.run(4000)
    assert 0.985 * 4000 < batch.used[0, False] < 4000


def test_other_lengths_are_visited_in_under_one_step_of_a_hundred():
    batch = Batch(auto(), ROWS, 1, length=100_000).run(600)
    batch.start_count()
    batch.run(8000)
    drafts, _, share = main_use(batch)
    assert (drafts, share > 0.99) == (3, True)
    # But every one is.
    assert {drafts for drafts, _ in batch.used} == {0, 1, 3, 5}


def test_the_same_steps_give_the_same_choices():
    runs = [Batch(auto(), ROWS, 8).run(700) for _ in range(2)]
    assert runs[0].used == runs[1].used
    assert runs[0].tokens == runs[1].tokens


def test_lengths_whose_steps_are_never_timed_are_chosen_by_the_prediction():
    batch = Batch(auto(), EAGER, 1, timed=False).run(300)
    batch.start_count()
    # A row is 1/64 of the prior's overhead, so the longest drafts look best.
    assert main_use(batch.run(1000))[0] == 5


def test_requests_that_do_not_speculate_get_no_drafts():
    policy = auto()
    requests = speculating(policy, 3)
    requests[1].speculates = False
    drafts = policy.new_drafts(requests, [9, 9, 2])
    assert drafts == [5, 0, 2]
    assert policy.drafter(requests)
    assert not policy.drafter(requests[1:2])


def test_a_request_without_room_makes_no_draft():
    policy = auto()
    assert policy.new_drafts(speculating(policy, 2), [0, 9]) == [0, 5]


def test_a_request_that_accepts_little_makes_fewer_drafts_where_rows_are_dear():
    policy = auto(PairTimes(1e-8))
    requests = speculating(policy, 2)
    for request in requests:
        request.computed = 100_000
    for _ in range(200):
        drafts = policy.new_drafts(requests, [9, 9])
        policy.observe(requests[0], 5, 5)
        policy.observe(requests[1], 5, 0)
    assert drafts[1] < drafts[0]


def test_a_batch_that_grows_for_a_moment_does_not_end_speculation():
    policy = auto()
    Batch(policy, DENSE, 8).run(600)
    batch = Batch(policy, DENSE, 1, length=100_000).run(300)
    (request,) = batch.requests
    assert request.speculates
    others = speculating(policy, 7)
    for _ in range(10):
        policy.new_drafts([request, *others], [9] * 8)
    assert request.speculates
    for _ in range(100):
        policy.new_drafts([request, *others], [9] * 8)
    assert not request.speculates
