"""The ``glm-jax`` command."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import MISSING, fields
from typing import Any

from rich.console import Console

import glm_jax
from glm_jax.demo.comparison import Comparison, turns
from glm_jax.demo.prompts import make_prompts
from glm_jax.demo.report import report
from glm_jax.demo.scenario import Scenario
from glm_jax.demo.table import live_run, run_line, summary
from glm_jax.engine.config import EngineConfig
from glm_jax.sampling.params import SamplingParams

# Engine options that are plain values on the command line.
_ENGINE_FLAGS = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "seed",
    "layer_storage",
    "layer_loop",
    "latent_norm_eps",
)
_SCENARIO_FLAGS = {
    "requests": "requests that are decoding when the long prompt arrives",
    "prompt_length": "tokens of the prompt of each of those",
    "arrival_length": "tokens of the long prompt",
    "chunk": "most prefill rows of a step, under every policy",
    "max_tokens": "tokens that every request generates",
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
_FLAG_TYPES = {"num_pages": int, "latent_norm_eps": float}


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
    _add_model_flags(generate)
    _add_sampling_flags(generate)
    generate.set_defaults(run=_generate)
    demo = commands.add_parser(
        "demo",
        help="a long prompt arrives while others decode: mixed steps beside the alternatives",
        description=_DEMO,
        allow_abbrev=False,
    )
    _add_model_flag(demo)
    _add_demo_flags(demo)
    demo.set_defaults(run=_demo)
    return parser


def _add_demo_flags(parser: argparse.ArgumentParser) -> None:
    for name, meaning in _SCENARIO_FLAGS.items():
        default = getattr(Scenario, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, help=f"{meaning} (default {default})")
    parser.add_argument("--repeat", type=int, help="runs per policy (default 1; 3 with --json)")
    parser.add_argument("--json", action="store_true", help="print figures and steps as JSON")


def _add_model_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="checkpoint folder, or tiny-random; without it the embedded model"
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    _add_model_flag(parser)
    group = parser.add_argument_group("engine options")
    for field in fields(EngineConfig):
        if field.name in _ENGINE_FLAGS:
            kind = _FLAG_TYPES.get(field.name, type(field.default))
            assert field.default is not MISSING, f"{field.name=} has no default"
            group.add_argument(f"--{field.name.replace('_', '-')}", type=kind, dest=field.name)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--sampling-seed", type=int, help="same seed, same text")
    group.add_argument("--max-tokens", type=int, default=128)
    group.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true")


def _engine_options(options: argparse.Namespace) -> dict[str, Any]:
    chosen = {name: getattr(options, name) for name in _ENGINE_FLAGS}
    return {name: value for name, value in chosen.items() if value is not None}


def _sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.sampling_seed,
        max_tokens=options.max_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
    )


def _generate(options: argparse.Namespace) -> int:
    params = _sampling_params(options)
    chosen = _engine_options(options)
    chosen.setdefault("max_num_seqs", len(options.prompt))
    # Resolved at this line, JAX and all, so that --help and usage errors are instant.
    llm = glm_jax.LLM(options.model, **chosen)
    prompts: list[Any] = list(options.prompt)
    if options.chat:
        if llm.tokenizer is None:
            raise ValueError("--chat needs a tokenizer; this model has none")
        turns = ([{"role": "user", "content": prompt}] for prompt in options.prompt)
        prompts = [llm.tokenizer.encode_chat(turn) for turn in turns]
    texts = [""] * len(prompts)
    for index, delta in llm.stream(prompts, params):
        text = delta.text if llm.tokenizer else " ".join(map(str, delta.token_ids)) + " "
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


def _demo(options: argparse.Namespace) -> int:
    repeats = (3 if options.json else 1) if options.repeat is None else options.repeat
    if repeats < 1:
        raise ValueError(f"repeat is {repeats}; allowed: an integer >= 1.")
    scenario = Scenario(**{name: getattr(options, name) for name in _SCENARIO_FLAGS})
    llm = glm_jax.LLM(options.model, **scenario.engine_options())
    vocab_size = llm.model_config.vocab_size
    comparison = Comparison(
        llm.config,
        llm.runner,
        make_prompts(scenario, llm.tokenizer, vocab_size),
        vocab_size=vocab_size,
        max_tokens=scenario.max_tokens,
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
