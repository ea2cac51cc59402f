"""Faults at every phase of a step: the culprits pay, nobody else loses a token."""

from random import Random

import jax
import pytest
from engine.fake_executor import Story, character_tokenizer, text_of
from engine.harness import prompt_of

from glm_jax.engine.engine import Engine
from glm_jax.engine.faults import PHASES, POOL_LOST, RequestFaultError
from glm_jax.sampling.params import SamplingParams

TOKENIZER = character_tokenizer()
# Four requests for three slots: one waits while the others run.
LENGTHS = {"a": 13, "bad": 5, "c": 9, "waits": 6}
PROMPTS = {name: prompt_of(Random(name), length) for name, length in LENGTHS.items()}
MAX_TOKENS = 9


class Injector:
    """Raises in one phase of chosen steps.

    Attributes:
        raised: How often it raised.
    """

    def __init__(self, phase, error, *, times=1, after=3) -> None:
        self.phase, self.error = phase, error
        self.times, self.after = times, after
        self.steps = -1
        self.raised = 0

    def __call__(self, phase, plan) -> None:
        self.steps += phase == "schedule"
        if phase == self.phase and self.steps >= self.after and self.raised < self.times:
            self.raised += 1
            raise self.error


def run_story(hook=None, **options) -> Story:
    story = Story(tokenizer=TOKENIZER, hook=hook, **options)
    for name, prompt in PROMPTS.items():
        story.add(name, prompt, max_tokens=MAX_TOKENS)
    story.finish()
    story.check_idle()
    return story


def check_undisturbed(story, names) -> None:
    for name in names:
        completion = story.output(name).outputs[0]
        assert (completion.finish_reason, completion.error) == ("length", None)
        assert completion.token_ids == story.alone(PROMPTS[name], max_tokens=MAX_TOKENS)
        assert completion.text == text_of(completion.token_ids)


def check_failed(story, names, *words) -> None:
    for name in names:
        completion = story.output(name).outputs[0]
        assert completion.finish_reason == "error"
        for word in words:
            assert word in completion.error
        alone = story.alone(PROMPTS[name], max_tokens=MAX_TOKENS)
        assert completion.token_ids == alone[: len(completion.token_ids)]
        assert completion.text == text_of(completion.token_ids)


def check_resets(story, phase, count) -> None:
    expected = count if phase in POOL_LOST else 0
    assert story.engine.scheduler.pool_resets == expected
    assert story.executor.resets == expected


@pytest.mark.parametrize("after", [0, 1, 4, 7])
@pytest.mark.parametrize("phase", PHASES)
def test_a_transient_fault_of_nobody_costs_no_request(phase, after):
    hook = Injector(phase, RuntimeError("cosmic ray"), after=after)
    story = run_story(hook)
    check_undisturbed(story, PROMPTS)
    check_resets(story, phase, 1)
    faults = [record for record in story.records if record.fault]
    assert [record.fault for record in faults] == [f"{phase}: RuntimeError: cosmic ray"]
    assert faults[0].kind == "fault"
    assert faults[0].index == after


@pytest.mark.parametrize("phase", PHASES)
def test_a_persistent_fault_of_nobody_fails_the_batch_after_two_tries(phase):
    hook = Injector(phase, RuntimeError("broken"), times=2)
    # After a lost pool, one step recomputes everybody.
    story = run_story(hook, max_num_batched_tokens=48)
    (second,) = [r for r in story.records if r.fault][1:]
    failed = set(PROMPTS) if phase == "schedule" else set(second.request_ids)
    assert {"a", "bad", "c"} <= failed
    check_failed(story, failed, f"step {second.index} failed in phase {phase}", "broken")
    check_undisturbed(story, set(PROMPTS) - failed)
    check_resets(story, phase, 2)
    # The engine is as good as new, and the next batch has its own two tries.
    hook.after, hook.times = hook.steps + 2, 3
    story.add("later", PROMPTS["a"], max_tokens=3)
    story.finish()
    assert story.output("later").outputs[0].token_ids == story.alone(PROMPTS["a"], max_tokens=3)
    assert hook.raised == 3


@pytest.mark.parametrize("times", [1, 10**6])
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_with_a_culprit_fails_the_culprit_only(phase, times):
    class Culprit(Injector):
        def __call__(self, phase, plan):
            # Persistent as a poisoned request is: while it is there.
            present = story.engine.scheduler.get("bad") is not None
            if present and (plan is None or "bad" in plan.request_ids):
                super().__call__(phase, plan)
            else:
                self.steps += phase == "schedule"

    story = Story(tokenizer=TOKENIZER)
    hook = Culprit(phase, RequestFaultError("bad grammar", ("bad",)), times=times)
    story.engine._fault_hook = hook
    for name, prompt in PROMPTS.items():
        story.add(name, prompt, max_tokens=MAX_TOKENS)
    story.finish()
    story.check_idle()
    assert hook.raised == 1
    check_failed(story, ["bad"], f"failed in phase {phase}", "RequestFaultError: bad grammar")
    check_undisturbed(story, set(PROMPTS) - {"bad"})
    check_resets(story, phase, 1)


@pytest.mark.parametrize("phase", ["pack", "fetch"])
def test_several_culprits_fail_together(phase):
    hook = Injector(phase, RequestFaultError("both", ("bad", "waits")))
    story = run_story(hook)
    check_failed(story, ["bad", "waits"], "both")
    check_undisturbed(story, ["a", "c"])


@pytest.mark.parametrize("phase", PHASES)
def test_a_culprit_who_is_gone_counts_as_nobody(phase):
    # Otherwise a fault that keeps naming it would be retried for ever.
    hook = Injector(phase, RequestFaultError("stale", ("gone",)), times=10**6)
    story = run_story(hook)
    check_failed(story, PROMPTS, "stale")
    assert hook.raised <= 2 * len(PROMPTS)


@pytest.mark.parametrize("budget", [2, 8, 48])
@pytest.mark.parametrize("phase", PHASES[1:])
def test_a_poisoned_request_cannot_keep_the_others_from_ending(phase, budget):
    # After every reset some chunks are recomputed before it strikes again: that is no progress.
    def hook(current, plan):
        if current == phase and "bad" in plan.request_ids:
            raise RuntimeError("poison")

    story = run_story(hook, max_num_batched_tokens=budget)
    failed = {name for name in PROMPTS if story.deltas[name][-1].error}
    assert "bad" in failed
    check_failed(story, failed, "poison")
    check_undisturbed(story, set(PROMPTS) - failed)


def test_faults_of_two_phases_in_a_row_count_together():
    class Alternating(Injector):
        def __call__(self, phase, plan):
            self.phase = ("pack", "fetch")[self.raised % 2]
            super().__call__(phase, plan)

    hook = Alternating("pack", RuntimeError("broken"), times=2)
    story = run_story(hook, max_num_batched_tokens=48)
    check_failed(story, ["a", "bad", "c"], "broken")
    check_undisturbed(story, ["waits"])


def test_two_faults_with_progress_between_them_fail_nobody():
    class Spaced(Injector):
        def __call__(self, phase, plan):
            before = self.raised
            try:
                super().__call__(phase, plan)
            finally:
                if self.raised > before:
                    self.after = self.steps + 2

    hook = Spaced("device", RuntimeError("flaky"), times=6)
    story = run_story(hook, max_num_batched_tokens=48)
    check_undisturbed(story, PROMPTS)
    check_resets(story, "device", 6)


@pytest.mark.parametrize("phase", PHASES)
def test_an_interrupt_passes_through_and_the_next_step_goes_on(phase):
    story = Story(tokenizer=TOKENIZER, hook=Injector(phase, KeyboardInterrupt()))
    for name, prompt in PROMPTS.items():
        story.add(name, prompt, max_tokens=MAX_TOKENS)
    for _ in range(3):
        story.step()
    story.add("aborted", PROMPTS["a"])
    story.engine.abort("aborted")
    with pytest.raises(KeyboardInterrupt):
        story.step()
    story.finish()
    check_undisturbed(story, PROMPTS)
    assert story.output("aborted").outputs[0].finish_reason == "abort"
    story.check_idle()


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_fault_while_making_text_is_one_requests_own(ends, monkeypatch):
    story = Story(tokenizer=TOKENIZER)
    story.add("a", PROMPTS["a"], max_tokens=MAX_TOKENS)
    params = {"max_tokens": 4}
    if ends == "stop":
        params["stop_token_ids"] = [story.alone(PROMPTS["bad"], max_tokens=4)[-1]]
    story.add("bad", PROMPTS["bad"], **params)
    story.add("c", PROMPTS["c"], max_tokens=MAX_TOKENS)
    stream = story.engine._entries["bad"].stream

    def broken(*_):
        raise UnicodeError("no such byte")

    monkeypatch.setattr(stream._decoder, "push" if ends == "length" else "finish", broken)
    story.finish()
    check_undisturbed(story, ["a", "c"])
    completion = story.output("bad").outputs[0]
    assert completion.finish_reason == "error"
    assert completion.error == "making text failed: UnicodeError: no such byte"
    check_resets(story, "commit", 0)
    story.check_idle()


def test_a_device_that_computes_garbage_is_a_fault_of_the_commit():
    story = Story(tokenizer=TOKENIZER)
    for name, prompt in PROMPTS.items():
        story.add(name, prompt, max_tokens=MAX_TOKENS)
    run = story.executor.run
    calls = []

    def garbage_once(served, inputs):
        outputs = run(served, inputs)
        calls.append(served)
        if len(calls) != 4:
            return outputs
        return outputs._replace(group_tokens=outputs.group_tokens * 0 - 9)

    story.executor.run = garbage_once
    story.finish()
    assert [r.fault[:20] for r in story.records if r.fault] == ["commit: RuntimeError"]
    check_undisturbed(story, PROMPTS)
    check_resets(story, "commit", 1)


@pytest.mark.parametrize("seed", range(60))
def test_random_faults_lose_no_token(seed):
    rng = Random(seed)
    rate = rng.choice([0.02, 0.1, 0.4])

    def hook(phase, plan):
        if rng.random() < rate / len(PHASES):
            names = rng.sample([*PROMPTS, "nobody"], rng.choice([0, 0, 1, 2]))
            raise RequestFaultError("random", tuple(names))

    story = Story(tokenizer=TOKENIZER, hook=hook, num_pages=rng.choice([13, 20, 37]))
    for name, prompt in PROMPTS.items():
        story.add(name, prompt, max_tokens=MAX_TOKENS)
        for _ in range(rng.choice([0, 0, 3])):
            story.step()
    story.finish()
    story.check_idle()
    assert story.executor.resets == story.engine.scheduler.pool_resets
    for name in PROMPTS:
        if story.deltas[name][-1].error:
            check_failed(story, [name], "random")
        else:
            check_undisturbed(story, [name])


REAL_PARAMS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 5},
    "cut": {"temperature": 1.0, "seed": 7, "top_k": 20, "top_p": 0.9},
}


def run_real(llm, hook) -> tuple[dict, Engine]:
    """Three requests on the real runner, one of them over several chunks."""
    llm.runner.reset()
    engine = Engine(llm.config, llm.runner, vocab_size=llm.model_config.vocab_size, fault_hook=hook)
    for number, (name, params) in enumerate(REAL_PARAMS.items()):
        prompt = Random(name).choices(range(1, llm.model_config.vocab_size), k=20 + 25 * number)
        params = SamplingParams(max_tokens=6, ignore_eos=True, **params)
        engine.add_request(name, prompt, params)
    while engine.has_unfinished:
        engine.step()
    outputs = {name: engine.release(name)[0].outputs[0] for name in REAL_PARAMS}
    assert engine.scheduler.pages.free == engine.scheduler.pages.capacity
    return outputs, engine


@pytest.fixture(scope="module")
def undisturbed(tiny_llm):
    outputs, _ = run_real(tiny_llm, lambda phase, plan: None)
    return {name: completion.token_ids for name, completion in outputs.items()}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_the_real_runner_recovers_at_every_phase(tiny_llm, undisturbed, phase, named):
    culprits = ("seeded",) if named else ()
    hook = Injector(phase, RequestFaultError("injected", culprits))
    outputs, engine = run_real(tiny_llm, hook)
    assert hook.raised == 1
    assert engine.scheduler.pool_resets == (phase in POOL_LOST)
    for name, completion in outputs.items():
        if name in culprits:
            assert completion.finish_reason == "error"
            assert completion.token_ids == undisturbed[name][: len(completion.token_ids)]
        else:
            assert completion.token_ids == undisturbed[name]


def test_the_real_runner_survives_the_loss_of_its_cache(tiny_llm, undisturbed):
    class Loss(Injector):
        """What a failed program leaves behind: donated arrays that are gone."""

        def __call__(self, phase, plan):
            try:
                super().__call__(phase, plan)
            except RuntimeError:
                for array in jax.tree.leaves(tiny_llm.runner._cache):
                    array.delete()

    hook = Loss("dispatch", RuntimeError())
    outputs, engine = run_real(tiny_llm, hook)
    assert engine.scheduler.pool_resets == 1
    assert {name: completion.token_ids for name, completion in outputs.items()} == undisturbed
