"""Nothing is compiled once the engine is warm, whatever the steps hold."""

from contextlib import suppress
from random import Random

import pytest

from glm_jax.engine.admission import RequestRefusedError
from glm_jax.engine.faults import PHASES
from scripts.fuzz_schedules import draw_asked, draw_schedule, make_engine

STEPS = 2000


@pytest.mark.slow
def test_2000_random_steps_compile_nothing(tiny_llm, compile_counter):
    rng = Random(4)
    # Warm is what LLM leaves behind; everything below is traffic.
    before = compile_counter.compiled
    steps, cells, kinds, lengths, number, logits = 0, set(), set(), set(), 0, 0
    while steps < STEPS:
        block = [draw_asked(rng, tiny_llm) for _ in range(12)]
        engine = make_engine(tiny_llm, draw_schedule(rng, tiny_llm, block))
        engine._fault_hook = _fault_now_and_then(rng)
        lengths.add(engine.scheduler.drafting.policy.most_drafts)
        for asked in block:
            number += 1
            with suppress(RequestRefusedError):  # its pool may be too small for it
                # Sampling features, stop ids and prompt logits come and go from step to step.
                wants_logits = rng.random() < 0.1
                engine.add_request(
                    f"r{number}", asked.prompt, asked.params, keep_logits=wants_logits
                )
                logits += wants_logits
            for _ in range(rng.randint(0, 3)):
                record = engine.step().record
                steps += 1
                cells.add(record.cell)
                kinds.add(record.kind)
            if rng.random() < 0.1:
                engine.abort(f"r{number}")
        while engine.has_unfinished:
            record = engine.step().record
            steps += 1
            cells.add(record.cell)
            kinds.add(record.kind)
    assert compile_counter.compiled == before
    assert logits >= STEPS / 50
    assert lengths == set(range(tiny_llm.config.num_drafts + 1))
    assert kinds == {"prefill", "decode", "mixed", "fault", "idle"}
    assert cells - {None} == set(tiny_llm.config.grid().cells())


def _fault_now_and_then(rng):
    """A lost cache is made anew by a program that is compiled already."""

    def hook(phase, plan):
        if rng.random() < 0.03 / len(PHASES):
            raise RuntimeError("injected")

    return hook
