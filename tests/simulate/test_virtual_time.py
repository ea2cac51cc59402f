import pytest

from bucketing.axis import Axis
from bucketing.grid import Grid
from bucketing.waste import measure_waste
from glm_jax.engine.config import EngineConfig
from glm_jax.grid_plan import Limits, Served, fit_served, simulate
from glm_jax.simulate.step_time import H200StepTime
from glm_jax.simulate.traces import AZURE_CONV, Arrival, generate, halves, speed_up
from glm_jax.simulate.virtual_time import Speculation, VirtualTime

MODEL = H200StepTime()
OPTIONS = {
    "max_model_len": 400,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 16,
    "prefill_buckets": (16, 64),
    "group_buckets": (1, 2, 4),
    "decode_widths": (1, 6),
}


def served(arrivals, speculation=None, **options):
    config = EngineConfig(**{**OPTIONS, **options})
    return VirtualTime(config, config.grid(), MODEL, speculation).run(arrivals)


def requests(count=12, gap=0.01):
    return [Arrival(n * gap, 5 + 29 * n % 200, 1 + 7 * n % 40) for n in range(count)]


@pytest.mark.parametrize("speculation", [None, Speculation(5, 3), Speculation(5, 2.5)])
def test_every_token_is_emitted_and_every_prompt_computed_once(speculation):
    arrivals = requests()
    run = served(arrivals, speculation)
    assert run.tokens == sum(arrival.output for arrival in arrivals)
    assert len(run.ttft) == len(arrivals)
    groups = sum(step.groups for step in run.steps)
    width = 6 if speculation else 1
    prompt = sum(arrival.prompt for arrival in arrivals)
    # Rests of prompts may sit in groups, so both segments are counted together.
    useful = sum(step.useful_rows for step in run.steps)
    assert prompt <= useful <= prompt + groups * width
    assert run.preemptions == 0


def test_time_is_the_sum_of_the_steps_and_idle_time_is_skipped():
    run = served([Arrival(0.0, 16, 1), Arrival(1000.0, 16, 3)])
    assert len(run.steps) == 1 + 3
    assert run.now == pytest.approx(1000.0 + sum(run.seconds[1:]))
    assert run.ttft == pytest.approx(run.seconds[:2])
    assert run.tbt == pytest.approx(run.seconds[2:])


def test_a_group_emits_the_accepted_tokens_and_one():
    run = served([Arrival(0.0, 16, 1 + 3 * 5)], Speculation(5, 3))
    assert [step.decode_rows for step in run.steps] == [0] + [6] * 5
    assert served([Arrival(0.0, 16, 16)]).steps[-1].decode_rows == 1
    halves_a_token = served([Arrival(0.0, 16, 1 + 5 * 4)], Speculation(5, 2.5))
    assert len(halves_a_token.steps) == 1 + 8


def test_pools_that_are_too_small_preempt_and_still_finish():
    arrivals = [Arrival(0.0, 40, 60)] * 4
    run = served(arrivals, num_pages=17)
    assert run.preemptions > 0
    assert run.tokens == 4 * 60


def test_the_same_trace_gives_the_same_run():
    one, other = (served(requests(), Speculation(5, 3)) for _ in range(2))
    assert one.steps == other.steps
    assert one.quantiles("tbt") == other.quantiles("tbt")


LONG = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "page_size": 512,
    "prefill_buckets": (512, 4096, 8192),
}


def test_two_equal_prompts_of_4096_tokens_in_one_step_cost_one_prefill():
    arrivals = [Arrival(0.0, 4096, 8, tuple(range(8)))] * 2
    run = served(arrivals, **{**LONG, "page_size": 64, "prefill_buckets": (64, 4096)})
    # The second waits a step, and computes the page that its last token ends.
    assert [step.prefill_rows for step in run.steps[:2]] == [4096, 64]
    assert (run.cached, run.prefix_waits) == ([0, 4032], 1)
    assert sum(step.prefill_rows for step in run.steps) == 4096 + 64


def test_prompts_share_what_their_blocks_share_and_nothing_where_none_are_known():
    shared = [Arrival(9.0 * n, 2048, 4, (1, 2, 10 + n, 20 + n)) for n in range(3)]
    assert served(shared, **LONG).cached == [0, 1024, 1024]
    assert served(shared, enable_prefix_caching=False, **LONG).cached == [0, 0, 0]
    assert served([Arrival(9.0 * n, 2048, 4) for n in range(3)], **LONG).cached == [0, 0, 0]


def test_what_follows_equal_prompts_is_not_alike():
    # The page that the second block begins ends among generated tokens: it is another one.
    blocks = (5, 6)
    again = [Arrival(0.0, 600, 500, blocks), Arrival(900.0, 1800, 1, (*blocks, 7, 8))]
    assert served(again, **LONG).cached == [0, 512]


@pytest.mark.parametrize("speculation", [Speculation(6, 3), Speculation(5, 7), Speculation(5, 0.5)])
def test_impossible_speculation_is_refused(speculation):
    with pytest.raises(ValueError, match="tokens per step are from 1"):
        served([], speculation)


def test_no_quantiles_without_requests():
    assert served([]).quantiles("ttft") == [0.0, 0.0]


@pytest.mark.parametrize("budget", [317, 1000, 16640])
def test_odd_budgets_serve_a_trace(budget):
    limits = Limits(budget=budget, max_num_seqs=32)
    arrivals = generate(AZURE_CONV, 40)
    run = simulate(limits, limits.fine((64, 256)), MODEL, arrivals)
    assert run.tokens == sum(arrival.output for arrival in arrivals)
    assert max(step.prefill_rows for step in run.steps) <= budget


def test_a_fitted_grid_wastes_little_of_a_generated_trace():
    limits = Limits(max_num_seqs=64)
    first, second = halves(speed_up(generate(AZURE_CONV, 120), 4))
    seen = Served(limits, MODEL, first)
    grid = fit_served(limits, MODEL, [seen], 40, [(128, 256, 512, 1024, 2048, 4096)])
    assert len(grid.cells()) <= 40
    assert grid.complete
    wasted = [
        measure_waste(simulate(limits, cells, MODEL, second).steps, MODEL).time
        for cells in (grid, powers_of_two(limits))
    ]
    assert wasted[0] < 0.05
    assert wasted[0] < 0.7 * wasted[1]


def powers_of_two(limits):
    """A grid of as many programs, without traffic."""
    prefill = Axis("prefill rows", (0, 128, 512, 2048, limits.budget))
    return Grid(prefill, Axis("groups", (0, 1, 2, 4, 8, 16, 32, limits.max_num_seqs)), (6,))
