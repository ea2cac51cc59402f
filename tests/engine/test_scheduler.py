"""What the scheduler promises about single steps: order, classes, sampling, policies, ends."""

import math
from random import Random

import pytest
from engine.harness import Loop, prompt_of

from glm_jax.engine.admission import RequestRefusedError
from glm_jax.engine.request import FinishReason, Request, RequestStatus, RowClass
from glm_jax.sampling.params import SamplingParams

SMALL = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (4, 16),
    "group_buckets": (1, 4),
    "num_pages": 65,
}
RNG = Random(0)


def loop_with(*lengths, **options) -> Loop:
    """A loop whose requests r0, r1, ... generate up to eight tokens each."""
    loop = Loop(**{**SMALL, **options})
    for n, length in enumerate(lengths):
        loop.add(f"r{n}", prompt_of(RNG, length), max_tokens=8)
    return loop


def rows_by_class(plan) -> dict[str, list[tuple[str, int]]]:
    found: dict[str, list[tuple[str, int]]] = {"prefill": [], "decode": []}
    for entry in plan.entries:
        found[entry.row_class.value].append((entry.request_id, entry.rows))
    return found


def test_a_request_is_prefilled_in_chunks_and_then_decodes():
    loop = loop_with(20)
    steps = []
    while (plan := loop.schedule()) is not None:
        steps.append((plan.kind, tuple(plan.cell), plan.entries[0].rows, plan.entries[0].sampled))
        loop.commit(plan, loop.run(plan))
    assert steps[:2] == [
        ("prefill", (16, 0, 1), 16, False),
        ("prefill", (4, 0, 1), 4, True),
    ]
    assert steps[2:] == [("decode", (0, 1, 1), 1, True)] * 7
    loop.check_tokens("r0")
    loop.check_idle()


def test_a_long_prompt_joins_decodes_without_stopping_them():
    loop = loop_with(3, 3, 3)
    loop.step()
    loop.add("long", prompt_of(RNG, 40), max_tokens=4)
    for _ in range(3):
        plan = loop.schedule()
        rows = rows_by_class(plan)
        assert plan.kind == "mixed"
        assert rows["decode"] == [("r0", 1), ("r1", 1), ("r2", 1)]
        assert [name for name, _ in rows["prefill"]] == ["long"]
        loop.commit(plan, loop.run(plan))
    loop.finish()
    for name in loop.requests:
        loop.check_tokens(name)


def test_decodes_are_not_charged_to_the_budget():
    loop = loop_with(3, 3, 3)
    loop.step()
    loop.add("long", prompt_of(RNG, 40), max_tokens=4)
    plan = loop.schedule()
    assert (plan.prefill_rows, plan.decode_rows) == (16, 3)
    assert (plan.prefill_pad_rows, plan.decode_pad_rows) == (0, 1)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", range(1, 9))
def test_any_chunking_gives_the_tokens_of_the_request_alone(budget, length):
    loop = Loop(**{**SMALL, "max_num_batched_tokens": budget, "decode_widths": (1, 3)})
    loop.add("other", prompt_of(RNG, 5), max_tokens=12)
    loop.step()
    loop.add("r", prompt_of(RNG, length), max_tokens=4)
    loop.finish()
    loop.check_tokens("r")
    loop.check_tokens("other")


def test_a_prompt_with_the_shape_of_a_decode_is_a_prefill():
    loop = loop_with(3)
    loop.step()
    loop.add("one", prompt_of(RNG, 1), max_tokens=2)
    plan = loop.schedule()
    assert plan.kind == "mixed"
    assert plan.cell == (0, 4, 1)
    assert [entry.row_class for entry in plan.group_entries] == [RowClass.DECODE, RowClass.PREFILL]
    (rows,) = plan.rows
    assert [group.decodes for group in rows.groups] == [True, False]
    loop.commit(plan, loop.run(plan))
    loop.finish()
    loop.check_tokens("one")


def test_prefill_first_keeps_decodes_waiting():
    loop = loop_with(3, step_policy="prefill_first")
    loop.step()
    loop.add("long", prompt_of(RNG, 40), max_tokens=4)
    kinds = [loop.schedule_and_run().kind for _ in range(5)]
    assert kinds == ["prefill", "prefill", "prefill", "decode", "decode"]


def test_alternate_takes_turns():
    loop = loop_with(3, step_policy="alternate")
    loop.step()
    loop.add("long", prompt_of(RNG, 40), max_tokens=4)
    kinds = [loop.schedule_and_run().kind for _ in range(7)]
    assert kinds == ["decode", "prefill", "decode", "prefill", "decode", "prefill", "decode"]


def test_policies_give_the_same_tokens():
    outputs = []
    for policy in ("mixed", "prefill_first", "alternate"):
        loop = Loop(**{**SMALL, "step_policy": policy})
        rng = Random(5)
        for n, length in enumerate((3, 17, 30, 1, 9)):
            loop.add(f"r{n}", prompt_of(rng, length), max_tokens=6)
            loop.step()
        loop.finish()
        outputs.append(loop.outputs)
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_running_prefill_gets_rows_in_every_step_and_a_waiting_one_within_a_bound():
    for seed in range(50):
        rng = Random(seed)
        lengths = [rng.randint(1, 40) for _ in range(8)]
        loop = Loop(**{**SMALL, "max_num_seqs": 12, "num_pages": 400, "group_buckets": (4,)})
        first_rows: dict[str, int] = {}
        bound = {}
        rows_ahead = 0
        for n, length in enumerate(lengths):
            name = f"r{n}"
            loop.add(name, prompt_of(rng, length), max_tokens=8)
            # Each step computes at least the smallest bucket, or finishes four requests.
            bound[name] = math.ceil(rows_ahead / loop.grid.prefill.smallest) + n // 4 + 1
            rows_ahead += length
        step = 0
        while loop.scheduler.has_unfinished:
            running = [r for r in loop.scheduler.running if not r.decoding]
            plan = loop.schedule()
            step += 1
            if running:
                assert running[0].request_id in plan.request_ids
            for name in plan.request_ids:
                first_rows.setdefault(name, step)
            loop.commit(plan, loop.run(plan))
        late = {name for name in loop.requests if first_rows[name] > bound[name]}
        assert not late


def test_short_prompts_do_not_wait_for_a_whole_long_one():
    loop = loop_with(60, 3, 3, long_prefill_token_threshold=8)
    loop.step()
    assert [len(loop.outputs[name]) for name in ("r0", "r1", "r2")] == [0, 1, 1]
    # Beside two decodes the long one is cut to the bucket of four rows.
    for _ in range(13):
        loop.step()
    assert len(loop.outputs["r0"]) >= 1


# Ends.


@pytest.mark.parametrize("length", [1, 3, 16, 17, 62])
def test_max_tokens_one_ends_with_the_prefill(length):
    loop = loop_with()
    loop.add("r", prompt_of(RNG, length), max_tokens=1)
    loop.finish()
    assert loop.requests["r"].finish_reason is FinishReason.LENGTH
    assert len(loop.outputs["r"]) == 1
    assert "decode" not in {plan.kind for plan in loop.plans}
    loop.check_idle()


def test_a_prompt_one_below_max_model_len_yields_one_token():
    loop = loop_with()
    loop.add("r", prompt_of(RNG, 63), max_tokens=None)
    loop.finish()
    assert loop.requests["r"].finish_reason is FinishReason.LENGTH
    assert len(loop.outputs["r"]) == 1


def test_eos_as_the_first_token_ends_the_request():
    loop = loop_with()
    prompt = prompt_of(RNG, 5)
    loop.add("free", prompt, max_tokens=3, seed=4)
    loop.finish()
    loop.add("r", prompt, max_tokens=3, seed=4, eos=[loop.outputs["free"][0]])
    loop.finish()
    assert loop.requests["r"].finish_reason is FinishReason.STOP
    assert loop.outputs["r"] == loop.outputs["free"][:1]
    loop.check_idle()


def test_commit_reports_only_requests_that_drew_tokens():
    loop = loop_with(3, 40)
    updates = loop.step()
    assert [(update.request_id, len(update.new_token_ids)) for update in updates] == [("r0", 1)]
    assert updates[0].finish_reason is None


def test_finish_from_outside_frees_everything():
    loop = loop_with(3)
    loop.step()
    update = loop.scheduler.finish("r0", "stop", stop_value="</s>")
    assert (update.finish_reason, update.request.stop_value) == (FinishReason.STOP, "</s>")
    assert loop.scheduler.finish("r0", "stop") is None
    loop.check_idle()


# Refusals.


@pytest.mark.parametrize(
    ("length", "params", "message"),
    [
        (0, {}, "empty prompt"),
        (64, {}, "has a prompt of 64 tokens; at most 63"),
        (30, {"max_tokens": 11}, "needs 10 pages .* the pool has 9"),
        (40, {"max_tokens": 1}, "needs 10 pages"),
        (3, {"min_tokens": 1, "stop_token_ids": list(range(17))}, "17 EOS and stop ids"),
    ],
)
def test_a_request_that_can_never_run_is_refused(length, params, message):
    loop = loop_with(3, num_pages=10)
    with pytest.raises(RequestRefusedError, match=message):
        loop.add("bad", prompt_of(RNG, length), **params)
    assert loop.scheduler.num_unfinished == 1
    loop.finish()
    loop.check_tokens("r0")


def test_a_request_that_just_fits_the_pool_runs():
    loop = loop_with(num_pages=10)
    loop.add("r", prompt_of(RNG, 30), max_tokens=7)
    loop.finish()
    loop.check_tokens("r")


def test_an_id_in_use_is_refused_and_free_again_later():
    loop = loop_with(3)
    with pytest.raises(RequestRefusedError, match="'r0' is in use"):
        loop.add("r0", [1])
    loop.finish()
    loop.add("r0", [1], max_tokens=2)
    loop.finish()
    loop.check_tokens("r0")


def test_a_request_object_is_used_once():
    loop = loop_with(3)
    loop.finish()
    with pytest.raises(RequestRefusedError, match="its own id and object"):
        loop.scheduler.add(loop.requests["r0"])


def test_unseeded_requests_get_seeds_that_do_not_change():
    loop = loop_with(3, 3)
    first, second = loop.requests.values()
    assert first.seed != second.seed
    assert loop_with(3).requests["r0"].seed == first.seed
    assert loop_with(3, seed=1).requests["r0"].seed != first.seed
    wished = Request("r", [1], SamplingParams(seed=-1))
    loop.scheduler.add(wished)
    assert (wished.seed, wished.status) == (2**64 - 1, RequestStatus.WAITING)
