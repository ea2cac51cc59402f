"""Random lives of an engine: odd limits, arrivals, aborts and faults at random moments.

`python -m engine.random_schedule FIRST COUNT` runs many of them and prints what they reached.
"""

import json
import sys
from collections import Counter
from random import Random

from engine.harness import Loop, prompt_of

from glm_jax.engine.admission import RequestRefusedError
from glm_jax.engine.request import RowClass

# Draft lengths and widths that go together.
SPECULATION = (
    {"decode_widths": (1,)},
    {"decode_widths": (2,)},
    {"decode_widths": (1, 3)},
    {"num_speculative_tokens": 1},
    {"num_speculative_tokens": 3},
    {"num_speculative_tokens": 5, "writes_ahead": True},
    {"num_speculative_tokens": 2, "decode_widths": (1, 4), "writes_ahead": True},
    {"num_speculative_tokens": "auto"},
)
BEGINNING = prompt_of(Random(5), 20)
POLICIES = ("mixed", "mixed", "mixed", "prefill_first", "alternate")


def random_options(rng: Random) -> dict:
    """Draw engine options: tiny pages, budgets below a page, pools that force preemption."""
    page_size = rng.choice([1, 2, 4])
    max_model_len = rng.randint(4, 20)
    longest = -(-(max_model_len - 1) // page_size)
    threshold = rng.choice([0, 0, page_size, page_size + 2])
    return {
        "max_model_len": max_model_len,
        "max_num_seqs": rng.choice([1, 2, 3, 4, 4]),
        "max_num_batched_tokens": rng.randint(1, 12),
        "page_size": page_size,
        "num_pages": 1 + max(1, longest + rng.randint(-1, 4)),
        "prefill_buckets": [rng.randint(1, 12) for _ in range(rng.randint(1, 2))],
        "group_buckets": [rng.randint(1, 3) for _ in range(rng.randint(0, 1))],
        **rng.choice(SPECULATION),
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": threshold > 0 and rng.random() < 0.5,
        "max_num_partial_prefills": rng.randint(1, 3),
        "watermark": rng.choice([0.0, 0.0, 0.3]),
        "step_policy": rng.choice(POLICIES),
        "decode_loop_steps": rng.choice([0, 0, 2, 7]),
        "tbt_target_ms": rng.choice([None, None, 3.0]),
        "seed": rng.randint(0, 99),
        "enable_prefix_caching": rng.random() < 0.8,
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "priority"]),
        "max_overtakes": rng.choice([0, 0, 2]),
        # In milliseconds of the prior: from less than any step to more than most.
        "max_step_ms": rng.choice([None, None, 0.6, 0.7]),
    }


def add_random(loop: Loop, rng: Random, name: str) -> bool:
    """Add a random request; False when it was rightly refused."""
    longest = loop.config.max_model_len - 1
    length = min(rng.randint(1, longest), rng.randint(1, longest))
    # Many begin alike, and some go on as another one did.
    prompt = BEGINNING[: rng.choice([0, rng.randint(0, longest)])] + prompt_of(rng, longest)
    if loop.requests and rng.random() < 0.2:
        prompt = rng.choice(list(loop.requests.values())).tokens.tolist() + prompt
    max_tokens = rng.randint(1, 8)
    try:
        loop.add(
            name,
            prompt[:length],
            eos=prompt_of(rng, rng.randint(0, 7)),
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, 1, max_tokens]),
            ignore_eos=rng.random() < 0.2,
            stop_token_ids=prompt_of(rng, rng.randint(0, 3)),
            temperature=rng.choice([0.0, 0.7]),
            top_k=rng.randint(-1, 4),
            top_p=rng.choice([0.5, 1.0]),
            min_p=rng.choice([0.0, 0.25]),
            seed=rng.choice([None, rng.randint(-5, 2**40)]),
            **random_controls(rng),
            priority=rng.choice([0, 0, -1, 5]),
            salt=rng.choice([None, None, None, "a"]),
        )
    except RequestRefusedError:
        rows = min(length + max_tokens, loop.config.max_model_len) - 1
        assert -(-rows // loop.config.page_size) > loop.pool.capacity
        return False
    return True


def random_controls(rng: Random) -> dict:
    """Draw penalties, biases, words and a thinking budget; most requests have none."""
    if rng.random() < 0.85:
        return {}
    words = [prompt_of(rng, rng.randint(1, 3)) for _ in range(rng.choice([0, 0, 2, 30]))]
    # Few tokens, so that words and thinking parts happen.
    allowed = [7, 8, *prompt_of(rng, 4)]
    return {
        "presence_penalty": rng.choice([0.0, 0.0, 1.5]),
        "frequency_penalty": rng.choice([0.0, 0.0, -1.0]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3]),
        "logit_bias": dict.fromkeys(prompt_of(rng, rng.choice([0, 3])), 1.0),
        "allowed_token_ids": rng.choice([None, allowed]),
        "bad_words": [word for word in words if word[-1] not in allowed[:2]],
        "thinking_token_budget": rng.choice([None, None, 0, 1, 2]),
    }


def random_step(loop: Loop, rng: Random, faults: float) -> None:
    """Run one step, with a fault or an abort at some moment of it now and then."""
    plan = loop.schedule()
    if plan is None:
        return
    luck = rng.random()
    victim = rng.choice(list(loop.requests))
    if luck < faults:
        # A fault while packing: the plan is dropped, and perhaps one request with it.
        loop.scheduler.cancel(plan)
        if luck < faults / 2:
            loop.scheduler.fail([plan.request_ids[0]], "injected")
        loop.check_state()
        return
    outputs = loop.run(plan)
    if luck < 2 * faults:
        free = loop.pool.free
        loop.scheduler.abort(victim)
        assert loop.scheduler.abort(victim) is None
        assert loop.pool.free == free, "pages are free while a step still writes to them"
    elif luck < 2.5 * faults:
        loop.lose_pool()
        return
    loop.commit(plan, outputs)
    if 2.5 * faults <= luck < 3 * faults:
        loop.scheduler.finish(victim, "stop", stop_value="text")
        loop.check_state()


def run_random_schedule(seed: int) -> Loop:
    """Live one life, checked step by step; all tokens must be those of each request alone."""
    # A block of seeds shares its options: the neutral arrays of their cells are made only once.
    loop = Loop(**random_options(Random(seed // 20)))
    rng = Random(f"schedule {seed}")
    faults = rng.choice([0.0, 0.0, 0.06])
    for n in range(rng.randint(1, 4)):
        add_random(loop, rng, f"r{n}")
        for _ in range(rng.choice([0, 0, 1, 3])):
            random_step(loop, rng, faults)
    # Every request recomputes at most a few times: preemption must not thrash.
    rows = sum(request.max_length for request in loop.requests.values())
    limit = 20 + 4 * rows
    while loop.scheduler.has_unfinished:
        random_step(loop, rng, faults)
        assert len(loop.plans) < limit, "the schedule does not come to an end"
    loop.check_idle()
    for name in loop.requests:
        loop.check_tokens(name)
    return loop


def run_random_schedules(first: int, count: int) -> Counter[str]:
    """Run the lives of `count` seeds and count what they reached; an error names its seed."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            loop = run_random_schedule(seed)
        except Exception as error:  # raised again, with the seed
            error.add_note(f"in run_random_schedule({seed})")
            raise
        seen["drafts"] += loop.scheduler.drafting.policy.acceptance.drafts
        seen["accepted"] += loop.scheduler.drafting.policy.acceptance.accepted
        seen["loops"] += loop.loops
        seen["loop steps"] += loop.loop_steps
        seen["found tokens"] += loop.scheduler.prefix.counts.hit_tokens
        seen["waits for a page"] += sum(plan.prefix_waits for plan in loop.plans)
        seen["evictions"] += loop.pool.evictions
        seen["preemptions"] += loop.scheduler.preemptions
        seen["overtaken"] += sum(request.overtaken for request in loop.requests.values())
        seen["pool resets"] += loop.scheduler.pool_resets
        seen.update(str(request.finish_reason) for request in loop.requests.values())
        seen.update(plan.kind for plan in loop.plans)
        seen["rests as groups"] += sum(
            entry.row_class is RowClass.PREFILL
            for plan in loop.plans
            for entry in plan.group_entries
        )
    return seen


if __name__ == "__main__":
    print(json.dumps(run_random_schedules(*map(int, sys.argv[1:3]))))  # noqa: T201 - its output
