"""Causes planted in made-up logs are found, and mixing is not blamed by accident."""

from random import Random

import pytest
from observe.planted_log import CHUNK, GROUPS, PER_ROW, PlantedLog

from bucketing.cell import Cell
from glm_jax.observe.cause import ADVICE, Cause
from glm_jax.observe.explanation import Explanation, Spike, explain

SEEDS = 8
STALL = 8e-3


def settled(seed, **options) -> PlantedLog:
    """A log whose usual steps are known: decodes, and a prompt of some chunks."""
    log = PlantedLog(seed, **options)
    log.decode(log.random.randint(20, 60))
    log.chunks(log.random.randint(4, 8))
    log.decode(log.random.randint(10, 30))
    return log


def told(log: PlantedLog, **options) -> Explanation:
    explanation = explain(log.records, log.compiles, **options)
    for spike in explanation.spikes:
        total = sum(share.seconds for share in spike.told.shares)
        assert total == pytest.approx(spike.told.excess, abs=1e-12), "shares are all of the excess"
        assert spike.told.gap.seconds > 1.5 * spike.told.expected
    return explanation


def spike_at(log: PlantedLog, explanation: Explanation, place: int = -1) -> Spike:
    """The spike that ended in a step, by default the last but for what follows it."""
    place %= len(log.records)
    (spike,) = (one for one in explanation.spikes if one.told.gap.last == place)
    return spike


def causes(spike: Spike) -> set[Cause]:
    """Those that matter: a tenth of the excess."""
    return {s.cause for s in spike.told.shares if s.seconds > 0.1 * spike.told.excess}


def check(log: PlantedLog, planted: dict[Cause, float]) -> Spike:
    """The last step must be a spike of these causes, each of about so many seconds."""
    place = len(log.records) - 1
    log.decode(5)
    explanation = told(log)
    spike = spike_at(log, explanation, place)
    assert causes(spike) == set(planted)
    for cause, seconds in planted.items():
        # Noise of a step and of the median beside it.
        assert spike.told.seconds(cause) == pytest.approx(seconds, rel=0.15, abs=0.3e-3)
    assert spike.told.cause is max(planted, key=lambda cause: planted[cause])
    return spike


def compiled(log: PlantedLog, **planted) -> None:
    log.step(**planted)
    log.compile()


PLANTS = {
    Cause.COMPILE: (lambda log, s: compiled(log, device=s), {}),
    Cause.HOST: (lambda log, s: log.step(host=s), {}),
    Cause.EXPERTS: (lambda log, s: log.step(device=s, experts=6.0), {}),
    Cause.PIECEWISE: (lambda log, s: log.step(device=s, mode="PIECEWISE"), {}),
    Cause.UNKNOWN: (lambda log, s: log.step(device=s), {}),
}


@pytest.mark.parametrize("cause", PLANTS)
def test_a_slow_step_is_put_down_to_what_its_line_shows(cause):
    plant, _ = PLANTS[cause]
    for seed in range(SEEDS):
        log = settled(seed)
        seconds = log.random.uniform(4e-3, 40e-3)
        plant(log, seconds)
        spike = check(log, {cause: seconds})
        assert spike.mixing == ""
        assert len(spike.requests) == len(log.lengths)


def test_a_pause_between_steps_is_the_hosts():
    for seed in range(SEEDS):
        log = settled(seed)
        log.step(pause=STALL)
        spike = check(log, {Cause.HOST: STALL})
        assert "before step" in spike.told.shares[0].evidence


def test_a_compilation_within_a_step_is_no_host_stall():
    for seed in range(SEEDS):
        log = settled(seed)
        log.step(host=30e-3)
        log.compile(before=-1e-3, after=-1e-3)
        check(log, {Cause.COMPILE: 30e-3})


def test_chunks_are_blamed_for_what_they_add():
    for seed in range(SEEDS):
        log = settled(seed)
        log.chunks()
        spike = check(log, {Cause.PREFILL: log.mixing_cost()})
        assert spike.mixing == "yes"
        assert spike.told.prefill_rows == CHUNK


def test_one_chunk_without_another_like_it_is_judged_by_the_prediction():
    log = PlantedLog(0)
    log.decode(30)
    log.chunks()
    check(log, {Cause.PREFILL: log.mixing_cost()})


def test_without_a_prediction_a_line_through_the_other_cells_judges():
    log = PlantedLog(0)
    log.decode(30, predicted=0.0)
    log.decode(30, predicted=0.0, groups=4 * GROUPS)
    log.decode(10, predicted=0.0)
    log.chunks(predicted=0.0)
    place = len(log.records) - 1
    spike = spike_at(log, told(log), place)
    assert spike.told.cause is Cause.PREFILL
    assert "line" in spike.told.shares[0].evidence


def test_pads_of_a_chunks_bucket_are_padding():
    for seed in range(SEEDS):
        log = settled(seed)
        rows = log.random.randint(1, 8)
        log.step(prefill=rows, bucket=CHUNK)
        planted = {Cause.PADDING: PER_ROW * (CHUNK - rows), Cause.PREFILL: PER_ROW * rows}
        place = len(log.records) - 1
        log.decode(3)
        spike = spike_at(log, told(log), place)
        assert spike.told.cause is Cause.PADDING
        for cause, seconds in planted.items():
            assert spike.told.seconds(cause) == pytest.approx(seconds, abs=0.3e-3)


def test_a_cell_of_too_many_groups_is_padding():
    for seed in range(SEEDS):
        log = settled(seed)
        log.step(groups=16 * GROUPS)
        check(log, {Cause.PADDING: PER_ROW * 15 * GROUPS})


def test_refused_drafts_are_the_cause_where_fewer_tokens_came_in_the_usual_time():
    for seed in range(SEEDS):
        log = settled(seed, drafts=3)
        log.step(accept=0)
        usual = log.usual(Cell(0, GROUPS, 4), log.last.pairs)
        # 3.5 tokens are usual, one came.
        spike = check(log, {Cause.DRAFTS: usual * (1 - 1 / 3.5)})
        assert "0 of 3 drafts" in spike.told.shares[0].evidence


def test_preemption_is_charged_with_what_is_computed_again():
    for seed in range(SEEDS):
        log = settled(seed)
        log.preempt("r1", chunks=3)
        place = len(log.records) - 1
        log.decode(5)
        # The others see mixed steps.
        own = spike_of(log, "r1", place)
        assert own.told.cause is Cause.PREEMPTION
        assert own.told.seconds(Cause.PREEMPTION) > 0.95 * own.told.excess


@pytest.mark.parametrize(
    ("waits", "cause"),
    [
        ({"pages": 12}, Cause.PAGE_WAIT),
        ({"writing": 12}, Cause.PAGE_WAIT),
        ({"queue": 12}, Cause.QUEUE),
    ],
)
def test_a_request_that_lost_its_pages_waits_for_a_reason(waits, cause):
    for seed in range(SEEDS):
        log = settled(seed)
        log.preempt("r1", **waits, chunks=1)
        place = len(log.records) - 1
        log.decode(5)
        own = spike_of(log, "r1", place)
        assert own.told.cause is cause
        assert causes(own) >= {cause, Cause.PREEMPTION}
        step = log.usual(Cell(0, GROUPS, 1), log.last.pairs) + 0.1e-3
        assert own.told.seconds(cause) == pytest.approx(12 * step, rel=0.05)


def spike_of(log: PlantedLog, name: str, place: int) -> Spike:
    (spike,) = (
        one for one in told(log).spikes if name in one.requests and one.told.gap.last == place
    )
    return spike


def test_prefill_steps_that_decodes_must_wait_for_are_prefill():
    for seed in range(SEEDS):
        log = settled(seed)
        for _ in range(3):
            log.step(prefill=CHUNK, bucket=CHUNK, groups=0, out=list(log.lengths))
        log.step()
        spike = check(log, {Cause.PREFILL: 3 * (4e-3 + PER_ROW * CHUNK + 0.1e-3)})
        assert spike.mixing == "", "no step of it was mixed"


# What one step can have besides a chunk: how it is planted, and the cause.
BESIDE = {
    Cause.HOST: {"host": STALL},
    Cause.EXPERTS: {"device": STALL, "experts": 6.0},
    Cause.COMPILE: {"device": STALL},
    Cause.PIECEWISE: {"device": STALL, "mode": "PIECEWISE"},
    Cause.UNKNOWN: {"device": STALL},
}


@pytest.mark.parametrize("cause", BESIDE)
def test_a_chunk_and_something_else_share_a_spike(cause):
    for seed in range(SEEDS):
        log = settled(seed)
        log.chunks(**BESIDE[cause])
        if cause is Cause.COMPILE:
            log.compile()
        spike = check(log, {cause: STALL, Cause.PREFILL: log.mixing_cost()})
        assert spike.mixing == "partly"


@pytest.mark.parametrize("cause", BESIDE)
def test_mixing_is_not_blamed_where_chunks_cost_nothing(cause):
    for seed in range(SEEDS):
        log = settled(seed, mixing=False)
        log.chunks(**BESIDE[cause])
        if cause is Cause.COMPILE:
            log.compile()
        spike = check(log, {cause: STALL})
        assert spike.mixing == "no"


@pytest.mark.parametrize("cause", BESIDE)
def test_mixing_is_not_blamed_where_the_only_chunk_was_predicted_to_cost_nothing(cause):
    for seed in range(SEEDS):
        log = PlantedLog(seed, mixing=False)
        log.decode(30)
        log.chunks(**BESIDE[cause])
        if cause is Cause.COMPILE:
            log.compile()
        assert check(log, {cause: STALL}).mixing == "no"


PAIRS = [
    ({"host": STALL, "device": 5e-3, "experts": 6.0}, {Cause.HOST: STALL, Cause.EXPERTS: 5e-3}),
    ({"pause": STALL, "host": 3e-3}, {Cause.HOST: STALL + 3e-3}),
    (
        {"pause": 3e-3, "mode": "PIECEWISE", "device": STALL},
        {Cause.HOST: 3e-3, Cause.PIECEWISE: STALL},
    ),
    (
        {"host": 3e-3, "mode": "PIECEWISE", "device": STALL},
        {Cause.HOST: 3e-3, Cause.PIECEWISE: STALL},
    ),
]


@pytest.mark.parametrize(("planted", "expected"), PAIRS)
def test_causes_of_one_step_are_told_apart(planted, expected):
    for seed in range(SEEDS):
        log = settled(seed)
        log.step(**planted)
        check(log, expected)


def test_an_uneven_step_beside_a_compilation_has_what_uneven_steps_usually_cost():
    for seed in range(SEEDS):
        log = settled(seed)
        for _ in range(5):
            log.step(device=5e-3, experts=6.0)
            log.decode(3)
        compiled(log, device=5e-3 + STALL, experts=6.0)
        check(log, {Cause.COMPILE: STALL, Cause.EXPERTS: 5e-3})


def test_a_piecewise_step_slower_than_others_has_a_second_cause():
    for seed in range(SEEDS):
        log = settled(seed)
        log.decode(5, mode="PIECEWISE", device=5e-3)
        compiled(log, mode="PIECEWISE", device=5e-3 + STALL)
        check(log, {Cause.COMPILE: STALL, Cause.PIECEWISE: 5e-3})


def test_refused_drafts_and_a_stall_add_up():
    for seed in range(SEEDS):
        log = settled(seed, drafts=3)
        log.step(accept=0, host=STALL)
        usual = log.usual(Cell(0, GROUPS, 4), log.last.pairs)
        check(log, {Cause.DRAFTS: usual * (1 - 1 / 3.5), Cause.HOST: STALL})


def test_waits_of_several_kinds_are_told_apart():
    for seed in range(SEEDS):
        log = settled(seed)
        log.preempt("r2", pages=8, queue=8, chunks=2, host=3e-3)
        place = len(log.records) - 1
        log.decode(5)
        own = spike_of(log, "r2", place)
        assert causes(own) == {Cause.PAGE_WAIT, Cause.QUEUE, Cause.HOST, Cause.PREEMPTION}
        assert own.told.seconds(Cause.HOST) == pytest.approx(16 * 3e-3, rel=0.05)


def test_random_logs_with_random_plants():
    """Any number of plants in one log, in any order: each is found where it is."""
    for seed in range(SEEDS):
        log = settled(seed)
        random = Random(seed)
        planted: dict[int, Cause] = {}
        for _ in range(random.randint(1, 12)):
            cause = random.choice(list(BESIDE))
            mixed = random.random() < 0.4
            # Above what a chunk adds, so that it stays the main cause.
            log.step(
                prefill=CHUNK * mixed,
                bucket=CHUNK * mixed,
                **{**BESIDE[cause], **({"host": 2 * STALL} if cause is Cause.HOST else {})},
            )
            if cause is Cause.COMPILE:
                log.compile(before=0.0, after=0.0)
            planted[len(log.records) - 1] = cause
            log.decode(random.randint(5, 15))
            log.chunks(random.randint(0, 2))
        explanation = told(log)
        found = {spike.told.gap.last: spike.told.cause for spike in explanation.spikes}
        for place, cause in planted.items():
            assert found[place] is cause, (seed, place)
        others = {cause for place, cause in found.items() if place not in planted}
        assert others <= {Cause.PREFILL}
        assert explanation.gaps == sum(len(one.tokens) for one in log.records) - len(log.lengths)


def test_every_cause_has_advice():
    assert set(ADVICE) == set(Cause)


def test_a_step_that_got_fewer_cores_than_usual_is_no_riddle():
    for seed in range(SEEDS):
        log = settled(seed)
        log.step(device=STALL, starved=True)
        spike = check(log, {Cause.HOST: STALL})
        assert "usual are 2.0: something else ran" in spike.told.shares[0].evidence


def test_an_uneven_load_that_costs_nothing_elsewhere_is_not_blamed():
    for seed in range(SEEDS):
        log = settled(seed)
        for _ in range(5):
            log.step(experts=6.0)
            log.decode(3)
        log.step(device=STALL, experts=6.0)
        check(log, {Cause.UNKNOWN: STALL})
