"""One random life of an engine: odd limits, arrivals, aborts and faults at random moments."""

import numpy as np
from engine.fake_program import VOCABULARY
from engine.harness import Loop, prompt_of
from glm_jax.engine.admission import RequestRefusedError

POLICIES = ("mixed", "mixed", "mixed", "prefill_first", "alternate")


def random_options(rng: np.random.Generator) -> dict:
    """Draw engine options: tiny pages, budgets below a page, pools that force preemption."""
    page_size = int(rng.choice([1, 2, 4]))
    max_model_len = int(rng.integers(4, 21))
    longest = -(-(max_model_len - 1) // page_size)
    threshold = int(rng.choice([0, 0, page_size, page_size + 2]))
    return {
        "max_model_len": max_model_len,
        "max_num_seqs": int(rng.choice([1, 2, 3, 4, 4])),
        "max_num_batched_tokens": int(rng.integers(1, 13)),
        "page_size": page_size,
        "num_pages": 1 + max(1, longest + int(rng.integers(-1, 5))),
        "prefill_buckets": [int(n) for n in rng.integers(1, 13, rng.integers(1, 3))],
        "group_buckets": [int(n) for n in rng.integers(1, 4, rng.integers(0, 2))],
        "decode_widths": [(1,), (1,), (2,), (1, 3)][rng.integers(4)],
        "long_prefill_token_threshold": threshold,
        "long_prefill_token_threshold_adaptive": bool(threshold and rng.random() < 0.5),
        "max_num_partial_prefills": int(rng.integers(1, 4)),
        "watermark": float(rng.choice([0.0, 0.0, 0.3])),
        "step_policy": POLICIES[rng.integers(len(POLICIES))],
        "seed": int(rng.integers(100)),
    }


def add_random(loop: Loop, rng: np.random.Generator, name: str) -> bool:
    """Add a random request; False when it was rightly refused."""
    longest = loop.config.max_model_len - 1
    length = 1 + int(min(rng.integers(longest), rng.integers(longest)))
    max_tokens = int(rng.integers(1, 9))
    min_tokens = int(rng.choice([0, 0, 1, max_tokens]))
    try:
        loop.add(
            name,
            prompt_of(rng, length),
            eos=prompt_of(rng, int(rng.integers(0, 8))),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=bool(rng.random() < 0.2),
            stop_token_ids=rng.integers(0, VOCABULARY, rng.integers(0, 4)).tolist(),
            temperature=float(rng.choice([0.0, 0.7])),
            top_k=int(rng.integers(-1, 5)),
            top_p=float(rng.choice([0.5, 1.0])),
            min_p=float(rng.choice([0.0, 0.25])),
            seed=[None, int(rng.integers(-5, 2**40))][rng.integers(2)],
        )
    except RequestRefusedError:
        rows = min(length + max_tokens, loop.config.max_model_len) - 1
        assert -(-rows // loop.config.page_size) > loop.pool.capacity
        return False
    return True


def random_step(loop: Loop, rng: np.random.Generator, faults: float) -> None:
    """Run one step, with a fault or an abort at some moment of it now and then."""
    plan = loop.schedule()
    if plan is None:
        return
    luck = rng.random()
    victim = list(loop.requests)[rng.integers(len(loop.requests))]
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
    loop = Loop(**random_options(np.random.default_rng(seed // 20)))
    rng = np.random.default_rng((seed, 1))
    faults = float(rng.choice([0.0, 0.0, 0.06]))
    for n in range(int(rng.integers(1, 5))):
        add_random(loop, rng, f"r{n}")
        for _ in range(int(rng.choice([0, 0, 1, 3]))):
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
