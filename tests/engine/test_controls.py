"""Penalties, biases, bad words and thinking budgets on the golden model.

Each must draw what plain NumPy draws from the model's logits, one token at a time, in whatever
company, with drafts or without.
"""

import dataclasses
from random import Random
from typing import NamedTuple

import pytest
from engine.company import Company

from glm_jax import SamplingParams
from glm_jax.engine.engine import Engine
from scripts.decision_margins import decisions
from scripts.fuzz_modes import target_of
from scripts.fuzz_schedules import Arrival, Asked, Schedule, run_schedule, tokens_alone

# The tokens that begin and end a thinking part here: the golden model has no tokenizer.
THINK = (5, 6)
LENGTH = 16
FEATURES = {
    "presence penalty": {"presence_penalty": 2.0},
    "frequency penalty": {"frequency_penalty": 1.1},
    "frequency reward": {"frequency_penalty": -2.0},
    "repetition penalty": {"repetition_penalty": 1.6},
    "logit bias": {"logit_bias": {17: 2.5, 40: -3.0, 41: 100}},
    "allowed ids": {"allowed_token_ids": [3, 9, 11, 40, 77, 78]},
    "all penalties": {
        "presence_penalty": -0.7,
        "frequency_penalty": 0.6,
        "repetition_penalty": 0.8,
        "min_tokens": 9,
        "stop_token_ids": [41, 17],
    },
    "thinking in the prompt": {"thinking_token_budget": 4},
    "no thinking": {"thinking_token_budget": 0, "logit_bias": {5: 4.0}},
    "thinking again": {"thinking_token_budget": 2, "allowed_token_ids": [5, 6, 30, 31, 32]},
    "bad words": {},
    "everything": {
        "presence_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": {5: 1.5},
        "thinking_token_budget": 1,
    },
}
DRAWING = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 7}}


class Case(NamedTuple):
    """A request, and what it generates alone and without its feature."""

    asked: Asked
    tokens: list[int]
    plain: list[int]


def asked_for(feature: str, drawing: str, llm) -> tuple[Asked, list[int]]:
    rng = Random(feature)
    # No thinking token by chance, and one open part where it is wanted.
    prompt = rng.choices(range(7, llm.model_config.vocab_size), k=rng.randint(6, 20))
    if feature == "thinking in the prompt":
        prompt[-2] = THINK[0]
    common = {"max_tokens": LENGTH, "ignore_eos": True, **DRAWING[drawing]}
    plain = tokens_alone(llm, Asked(prompt, SamplingParams(**common)))
    options = dict(FEATURES[feature])
    if feature in ("bad words", "everything"):
        # What it would say: a word of each length, and two with one beginning.
        options["bad_words"] = [
            *(plain[:1], plain[3:5], [plain[3], 30], plain[7:10], plain[1:5]),
            *([token] for token in plain[12:14]),
        ]
    return Asked(prompt, SamplingParams(**common, **options)), plain


def knowing_thoughts(engine: Engine) -> Engine:
    engine._intake._think_ids = THINK
    return engine


@pytest.fixture(scope="module")
def cases(tiny_llm) -> dict[tuple[str, str], Case]:
    found = {}
    budget = tiny_llm.config.max_num_batched_tokens
    whole = Schedule({}, budget, 1, 1, [Arrival(0, 0, None)])
    for feature in FEATURES:
        for drawing in DRAWING:
            asked, plain = asked_for(feature, drawing, tiny_llm)
            lived = run_schedule(tiny_llm, [asked], whole, knowing_thoughts)
            found[feature, drawing] = Case(asked, lived.tokens[0], plain)
    return found


def together(llm, cases, features, drawing="seeded", **options) -> Company:
    """All requests of these features on one engine that can run four at once."""
    chosen = {feature: cases[feature, drawing] for feature in features}
    asked = {name: case.asked for name, case in chosen.items()}
    expected = {name: case.tokens for name, case in chosen.items()}
    company = Company(llm, asked, expected=expected, **options)
    knowing_thoughts(company.engine)
    return company


@pytest.mark.parametrize("drawing", DRAWING)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_token_is_drawn_from_what_numpy_makes_of_the_logits(
    tiny_llm, cases, feature, drawing
):
    (prompt, params), tokens, _ = cases[feature, drawing]
    drawn = decisions(tiny_llm, prompt, tokens, params, think_ids=THINK)
    assert [decision.token for decision in drawn] == tokens


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_changes_what_is_drawn(cases, feature):
    # Or the other tests would show nothing.
    assert any(
        cases[feature, drawing].tokens != cases[feature, drawing].plain for drawing in DRAWING
    )


def test_the_budget_ends_every_thinking_part_in_time(cases):
    for drawing in DRAWING:
        assert cases["thinking in the prompt", drawing].tokens[3] == THINK[1]
        nothing = cases["no thinking", drawing].tokens
        assert all(nothing[n + 1] == THINK[1] for n, t in enumerate(nothing[:-1]) if t == THINK[0])
    again = cases["thinking again", "seeded"].tokens
    assert again.count(THINK[0]) >= 2


@pytest.mark.parametrize("drafter", ["right", "half", "model"])
@pytest.mark.parametrize("drawing", DRAWING)
def test_penalties_are_not_double_counted_where_drafts_are_accepted(
    tiny_llm, cases, drawing, drafter
):
    # D 63. Each request arrives while others decode: mixed steps, prompts in chunks.
    company = together(tiny_llm, cases, FEATURES, drawing, drafter=drafter)
    for feature in FEATURES:
        company.add(feature)
        company.step()
    company.finish()
    assert {"mixed", "decode"} <= {record.kind for record in company.records}
    accepted = {feature: sum(company.accepted(feature)) for feature in FEATURES}
    if drafter == "right":
        # All but the first token, by steps of at most six.
        assert min(accepted.values()) >= LENGTH // 2, accepted


def test_penalties_survive_the_loss_of_all_pages(tiny_llm, cases):
    config = dataclasses.replace(tiny_llm.config, num_pages=11, watermark=0.0)
    company = together(tiny_llm, cases, FEATURES, config=config)
    company.add(*FEATURES)
    company.finish()
    assert company.engine.scheduler.preemptions >= 2


def test_penalties_survive_a_lost_device(tiny_llm, cases):
    company = together(tiny_llm, cases, list(FEATURES)[:4])
    company.add(*list(FEATURES)[:4])
    hook = company.engine._fault_hook

    def fail_once(phase, plan) -> None:
        if phase == "fetch" and company.engine.steps == 3:
            raise RuntimeError("injected")
        hook(phase, plan)

    company.engine._fault_hook = fail_once
    faults = []
    for _ in range(5):
        company.records.append(company.engine.step().record)
        faults.append(company.records[-1].fault is not None)
    assert faults == [False, False, False, True, False]
    company.finish()


def test_a_request_without_penalties_does_not_inherit_those_of_its_slot(tiny_llm, cases):
    config = dataclasses.replace(tiny_llm.config, max_num_seqs=4)
    case = cases["everything", "greedy"]
    asked = {}
    for turn in range(3):
        asked |= {f"controlled {turn} {n}": case.asked for n in range(4)}
        bare = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        asked |= {f"plain {turn} {n}": Asked(case.asked.prompt, bare) for n in range(4)}
    expected = {name: case.plain if name[0] == "p" else case.tokens for name in asked}
    company = Company(tiny_llm, asked, expected=expected, drafter="half", config=config)
    knowing_thoughts(company.engine)
    company.add(*asked)
    company.finish()


def test_pieces_draw_the_same(tiny_llm, cases):
    target = target_of(tiny_llm, "piecewise")
    company = together(tiny_llm, cases, FEATURES, target=target, drafter="half")
    company.add(*FEATURES)
    company.finish()
    assert {record.mode for record in company.records} == {"PIECEWISE"}


def test_features_that_come_and_go_between_steps_compile_nothing(tiny_llm, cases, compile_counter):
    # D 9.
    company = together(tiny_llm, cases, FEATURES, drafter="model")
    before, rng, names = compile_counter.compiled, Random(2), list(FEATURES)
    rng.shuffle(names)
    for name in names:
        company.add(name)
        for _ in range(rng.randint(0, 5)):
            company.step()
    company.finish()
    assert compile_counter.compiled == before
