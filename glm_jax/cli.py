"""The ``glm-jax`` command."""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

import glm_jax
from glm_jax import grid_plan
from glm_jax.cli_flags import (
    add_engine_flags,
    add_log_plans_flag,
    add_model_flag,
    add_profile_flags,
    add_sampling_flags,
    add_step_log_flag,
    engine_options,
    sampling_params,
)
from glm_jax.demo.comparison import Comparison, turns
from glm_jax.demo.prompts import make_prompts
from glm_jax.demo.report import report
from glm_jax.demo.scenario import Scenario
from glm_jax.demo.table import live_run, run_line, summary
from glm_jax.deployment import options as deployment
from glm_jax.engine.logprob import PositionLogprobs
from glm_jax.ledger import options as ledger
from glm_jax.observe import options as explain
from glm_jax.observe import replay_options
from glm_jax.observe import timeline_options as timeline

_SCENARIO_FLAGS = {
    "requests": "requests that are decoding when the long prompt arrives",
    "prompt_length": "tokens of the prompt of each of those",
    "arrival_length": "tokens of the long prompt",
    "chunk": "most prefill rows of a step, under every policy",
    "max_tokens": "tokens that every request generates",
    "drafts": "draft tokens that every decoding request verifies per step",
}
_DEMO = """
Requests are decoding and a long prompt arrives. The same scenario runs under three step policies on
the same compiled programs: prefill_first (the prompt's chunks, then the decodes), alternate (a
chunk, a decode, a chunk, ...) and mixed (a chunk and the decodes in one step). Worst gap: the
longest time a decoding request waited for its next token. TTFT: from the arrival to the long
prompt's first token. Total: from the arrival until all requests are done. All are sums of the wall
times of steps, so drawing the tables does not count; with --repeat they are medians over the runs,
which take turns. In the JSON, unmixed is prefill_first.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; user errors are one line on the error stream and exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        print(f"glm-jax {options.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="glm-jax", description="Inference for the GLM-5 family in JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser(
        "generate", help="continue a prompt and stream the text", allow_abbrev=False
    )
    generate.add_argument("prompt", nargs="+", help="one or more prompts, run together")
    generate.add_argument("--chat", action="store_true", help="send each prompt as a chat turn")
    add_engine_flags(generate)
    add_sampling_flags(generate)
    add_step_log_flag(generate)
    add_log_plans_flag(generate)
    add_profile_flags(generate)
    generate.set_defaults(run=_generate)
    demo = commands.add_parser(
        "demo",
        help="a long prompt arrives while others decode: mixed steps beside the alternatives",
        description=_DEMO,
        allow_abbrev=False,
    )
    add_model_flag(demo)
    _add_demo_flags(demo)
    add_step_log_flag(demo)
    demo.set_defaults(run=_demo)
    _add_grid_commands(commands)
    plan = commands.add_parser(
        "plan",
        help="weights, cache, programs and least step times of a deployment on H200",
        description=deployment.DESCRIPTION,
        allow_abbrev=False,
    )
    deployment.add_arguments(plan)
    plan.set_defaults(run=_plan)
    account = commands.add_parser(
        "ledger",
        help="operations, bytes and least time of every stage of a step, and who pays",
        description=ledger.DESCRIPTION,
        allow_abbrev=False,
    )
    ledger.add_arguments(account)
    account.set_defaults(run=_ledger)
    _add_log_commands(commands)
    return parser


def _add_log_commands(commands: Any) -> None:
    why = commands.add_parser(
        "explain",
        help="why tokens came late, by a step log",
        description=explain.DESCRIPTION,
        allow_abbrev=False,
    )
    explain.add_arguments(why)
    why.set_defaults(run=_explain)
    again = commands.add_parser(
        "replay",
        help="run the steps of a log again and compare every bit",
        description=replay_options.DESCRIPTION,
        allow_abbrev=False,
    )
    add_model_flag(again)
    replay_options.add_arguments(again)
    again.set_defaults(run=_replay)
    trace = commands.add_parser(
        "trace",
        help="a step log as a timeline: JSON for Perfetto, a page, a picture",
        description=timeline.DESCRIPTION,
        allow_abbrev=False,
    )
    timeline.add_arguments(trace)
    trace.set_defaults(run=_trace)


def _add_grid_commands(commands: Any) -> None:
    grid = commands.add_parser("grid", help="plan, compile and look at the grid of programs")
    actions = grid.add_subparsers(dest="action", required=True)
    plan = actions.add_parser(
        "plan", help="choose the cells from a request trace or a step log", allow_abbrev=False
    )
    grid_plan.add_arguments(plan)
    plan.set_defaults(run=grid_plan.run)
    warm = actions.add_parser(
        "warm", help="compile all programs now, so that later starts load them", allow_abbrev=False
    )
    add_engine_flags(warm)
    warm.set_defaults(run=_grid_warm)
    show = actions.add_parser(
        "show", help="use, padding and compile time of every cell", allow_abbrev=False
    )
    add_engine_flags(show)
    show.add_argument("--png", type=Path, help="also draw the maps into this file")
    show.set_defaults(run=_grid_show)


def _add_demo_flags(parser: argparse.ArgumentParser) -> None:
    for name, meaning in _SCENARIO_FLAGS.items():
        default = getattr(Scenario, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--repeat", type=int, help="runs per policy (default 1; 3 with --json)")
    parser.add_argument("--json", action="store_true", help="print figures and steps as JSON")


def _generate(options: argparse.Namespace) -> int:
    params = sampling_params(options)
    chosen = engine_options(options)
    chosen.setdefault("max_num_seqs", len(options.prompt))
    # Whoever waits for one answer gets it soonest piece by piece.
    chosen.setdefault("grid_warm", "none")
    # Resolved at this line, JAX and all, so that --help and usage errors are instant.
    log = {"step_log": options.step_log, "log_plans": options.log_plans}
    llm = glm_jax.LLM(options.model, **log, **chosen)
    prompts: list[Any] = list(options.prompt)
    if options.chat:
        if llm.tokenizer is None:
            raise ValueError("--chat needs a tokenizer; this model has none")
        turns = ([{"role": "user", "content": prompt}] for prompt in options.prompt)
        prompts = [llm.tokenizer.encode_chat(turn) for turn in turns]
    texts = [""] * len(prompts)
    with _profiled(llm, options):
        for index, delta in llm.stream(prompts, params):
            text = delta.text if llm.tokenizer else " ".join(map(str, delta.token_ids)) + " "
            if delta.logprobs is not None:
                text = "".join(map(_likelihoods, delta.logprobs))
            texts[index] += text
            if len(prompts) == 1:
                print(text, end="", flush=True)
            if delta.error is not None:
                raise ValueError(f"request {index} failed: {delta.error}")
    if len(prompts) == 1:
        print()
    else:
        for prompt, text in zip(options.prompt, texts, strict=True):
            print(f"--- {prompt}\n{text}")
    return 0


def _profiled(llm: Any, options: argparse.Namespace) -> AbstractContextManager[Any]:
    """Capture steps of a model, where that is asked for."""
    if options.profile is None:
        return nullcontext()
    module = importlib.import_module("glm_jax.observe.profile")
    profile = module.Profile(options.profile, steps=options.profile_steps)
    llm.watch(profile)
    return closing(profile)


def _likelihoods(position: PositionLogprobs) -> str:
    """A line of log-probabilities: the drawn token's, then those of the most likely ones."""
    named = (
        f"{token if one.decoded_token is None else repr(one.decoded_token)} {one.logprob:.3f}"
        for token, one in position.items()
    )
    return "  ".join(named) + "\n"


def _grid_warm(options: argparse.Namespace) -> int:
    # By name, here and below: JAX loads with the command that needs it, so that --help is instant.
    importlib.import_module("glm_jax.grid_warm").run(options.model, engine_options(options))
    return 0


def _grid_show(options: argparse.Namespace) -> int:
    show = importlib.import_module("glm_jax.grid_show")
    show.run(options.model, engine_options(options), png=options.png)
    return 0


def _plan(options: argparse.Namespace) -> int:
    return importlib.import_module("glm_jax.deployment.command").run(options)


def _ledger(options: argparse.Namespace) -> int:
    return importlib.import_module("glm_jax.ledger.command").run(options)


def _explain(options: argparse.Namespace) -> int:
    return importlib.import_module("glm_jax.observe.command").run(options)


def _replay(options: argparse.Namespace) -> int:
    return importlib.import_module("glm_jax.replay_step").run(options)


def _trace(options: argparse.Namespace) -> int:
    return importlib.import_module("glm_jax.observe.timeline_command").run(options)


def _demo(options: argparse.Namespace) -> int:
    repeats = (3 if options.json else 1) if options.repeat is None else options.repeat
    if repeats < 1:
        raise ValueError(f"repeat is {repeats}; allowed: an integer >= 1.")
    scenario = Scenario(**{name: getattr(options, name) for name in _SCENARIO_FLAGS})
    llm = glm_jax.LLM(options.model, step_log=options.step_log, **scenario.engine_options())
    vocab_size = llm.model_config.vocab_size
    comparison = Comparison(
        llm.config,
        llm.runner,
        make_prompts(scenario, llm.tokenizer, vocab_size),
        vocab_size=vocab_size,
        max_tokens=scenario.max_tokens,
        watches=llm.engine.watches,
    )
    comparison.warm_up()
    console = Console(stderr=options.json)
    runs = []
    for policy in turns(repeats):
        # Nothing is drawn while a run is timed for others to read.
        with nullcontext() if options.json else live_run(console) as watch:
            runs.append(comparison.run(policy, watch))
        if options.json:
            console.print(run_line(runs[-1]))
    console.print(summary(runs))
    if options.json:
        print(json.dumps(report(runs), indent=1))
    return 0
