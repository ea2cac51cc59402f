"""Decode loops on the fake device: when there is one, how long it is, and what it leaves behind."""

import itertools
from random import Random

import pytest
from engine.fake_executor import Story, character_tokenizer
from engine.harness import Loop, prompt_of

from bucketing.step_time import RowEquivalents
from glm_jax.engine.config import EngineConfig

STEPS = 8
OPTIONS = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (8,),
    "group_buckets": (1,),
    "decode_loop_steps": STEPS,
}


def decoding(count: int, *, max_tokens: int = 40, **options) -> Loop:
    """Requests that have all drawn their first token."""
    loop = Loop(**{**OPTIONS, **options})
    for n in range(count):
        add(loop, f"r{n}", max_tokens=max_tokens)
    while not all(request.decoding for request in loop.requests.values()):
        loop.step()
    return loop


def add(loop: Loop, name: str, length: int = 5, **params) -> None:
    loop.add(name, prompt_of(Random(name), length), seed=3, **{"ignore_eos": True, **params})


def finish(loop: Loop) -> None:
    loop.finish()
    for name in loop.requests:
        loop.check_tokens(name)
    loop.check_idle()


@pytest.mark.parametrize("drafts", [0, 3])
def test_groups_decode_several_steps_in_one_dispatch(drafts):
    loop = decoding(3, num_speculative_tokens=drafts)
    before = {name: len(tokens) for name, tokens in loop.outputs.items()}
    plan = loop.schedule_and_run()
    assert plan.loop_steps == STEPS
    gained = [len(tokens) - before[name] for name, tokens in loop.outputs.items()]
    # As long as their pages reach: at least a page further.
    assert min(gained) >= 4
    assert loop.loop_steps >= 2
    finish(loop)
    assert len(loop.plans) < 40


def test_without_the_option_there_is_no_loop_and_no_word_of_it():
    loop = decoding(1, decode_loop_steps=0)
    plan = loop.schedule_and_run()
    assert (plan.loop_steps, plan.loop_reason) == (1, "")


def reason(loop: Loop) -> str:
    plan = loop.schedule_and_run()
    assert plan.loop_steps == 1
    return plan.loop_reason


def test_prefill_rows_keep_a_step_single():
    loop = decoding(1)
    add(loop, "new")
    assert reason(loop) == "prefill rows"
    finish(loop)


def test_a_request_that_waits_for_a_slot_keeps_a_step_single():
    loop = decoding(1, max_num_seqs=1)
    add(loop, "new")
    assert reason(loop) == "a request waits"
    finish(loop)


def test_stop_strings_keep_a_step_single():
    loop = decoding(1)
    add(loop, "texts", stop=["x"], max_tokens=9)
    loop.step()
    assert reason(loop) == "stop strings"


def test_more_end_tokens_than_the_device_holds_keep_a_step_single():
    loop = decoding(1)
    ids = list(range(loop.scheduler.limits.stop_ids + 1))
    add(loop, "ends", stop_token_ids=ids, max_tokens=9)
    loop.step()
    assert reason(loop) == "more than 16 end ids"


@pytest.mark.parametrize("drafts", [0, 5])
def test_a_loop_ends_with_the_first_group_that_ends(drafts):
    loop = decoding(1, num_speculative_tokens=drafts)
    add(loop, "short", max_tokens=3)
    loop.step()
    loop.schedule_and_run()
    assert loop.requests["short"].finished or len(loop.outputs["short"]) >= 2
    finish(loop)
    assert loop.requests["short"].num_output_tokens == 3


def test_end_tokens_end_a_loop_at_their_step():
    ended = 0
    for seed in range(30):
        loop = Loop(**OPTIONS, num_speculative_tokens=3)
        add(loop, f"s{seed}", eos=[3, 30, 60, 90], ignore_eos=False, min_tokens=2, max_tokens=40)
        add(loop, f"t{seed}", max_tokens=40)
        finish(loop)
        ended += loop.requests[f"s{seed}"].finish_reason == "stop"
    assert ended >= 10


def test_a_loop_stops_where_the_pages_end():
    loop = decoding(2, num_pages=1 + 2 * 3, max_model_len=24, max_tokens=9, watermark=0)
    plan = loop.schedule_and_run()
    assert plan.loop_steps == STEPS
    assert loop.loop_steps < STEPS
    assert loop.pool.free == 0
    finish(loop)


def test_a_request_aborted_during_a_loop_drops_out_of_it():
    loop = decoding(2, num_speculative_tokens=3)
    plan = loop.schedule()
    assert plan is not None
    outputs = loop.run(plan)
    loop.scheduler.abort("r0")
    updates = loop.commit(plan, outputs)
    assert {update.request_id for update in updates} == {"r1"}
    loop.finish()
    loop.check_tokens("r1")
    loop.check_idle()


@pytest.mark.parametrize(("target", "steps"), [(None, 8), (9.0, 8), (3.0, 4), (0.7, 1), (0.1, 1)])
def test_the_tbt_target_bounds_the_steps_by_their_predicted_time(target, steps):
    loop = decoding(1, tbt_target_ms=target)
    plan = loop.schedule_and_run()
    seconds = RowEquivalents().predict(plan.cell, 0)
    assert plan.loop_steps == steps
    assert steps == 1 or target is None or steps * seconds <= target / 1e3
    assert (plan.loop_reason != "") == (steps == 1)


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_arrival_during_a_loop_waits_at_most_the_target(drafts):
    """A clock that only steps move: each takes what the step-time model predicts."""
    target = 3.0
    rng, waits, now = Random(4), [], 0.0
    loop = decoding(2, max_tokens=80, tbt_target_ms=target, num_speculative_tokens=drafts)
    names = itertools.count()
    for _ in range(12):
        due = now + rng.uniform(0, 12e-3)
        while now < due:
            plan = loop.schedule()
            if plan is None:
                now = due
                break
            start = now
            ran = loop.loop_steps
            loop.commit(plan, loop.run(plan))
            steps = max(1, loop.loop_steps - ran)
            now += steps * loop.scheduler.step_time.predict(plan.cell, plan.pairs)
            if start <= due < now:
                waits.append(now - due)
        add(loop, f"late{next(names)}", max_tokens=30)
    assert len(waits) >= 6
    assert max(waits) <= target / 1e3
    assert loop.loops >= 5
    finish(loop)


def test_the_record_of_a_step_tells_of_its_loop():
    story = Story(tokenizer=character_tokenizer(), decode_loop_steps=6, num_speculative_tokens=2)
    story.add("a", [1, 2, 3], max_tokens=20)
    story.finish()
    loops = [record for record in story.records if record.loop_steps > 1]
    assert loops
    assert all(record.kind == "decode" and record.loop_reason == "" for record in loops)
    assert {record.loop_reason for record in story.records if record.kind == "prefill"} == {
        "prefill rows"
    }
    drafts = [group for record in story.records for group in record.drafts]
    output = story.output("a")
    assert output.outputs[0].token_ids == story.alone([1, 2, 3], max_tokens=20)
    assert output.drafts.draft_tokens == sum(len(group.draft_token_ids) for group in drafts)
    assert output.drafts.accepted_tokens == sum(group.accepted for group in drafts)
    assert output.drafts.verified_groups == len(drafts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_loop_steps": -1}, "decode_loop_steps is -1; allowed: an integer >= 0"),
        ({"tbt_target_ms": 0}, r"tbt_target_ms is 0; allowed: None \(off\) or milliseconds"),
        ({"num_speculative_tokens": 6}, "num_speculative_tokens is 6; allowed: 0 to 5, or 'auto'"),
        ({"num_speculative_tokens": "on"}, "num_speculative_tokens is 'on'"),
        ({"num_speculative_tokens": 3, "decode_widths": (1, 3)}, "needs a group of 4 rows"),
        ({"num_speculative_tokens": "auto", "decode_widths": (1,)}, "needs a group of 2 rows"),
    ],
)
def test_bad_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
