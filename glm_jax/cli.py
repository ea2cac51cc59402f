"""The ``glm-jax`` command."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import glm_jax
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
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="checkpoint folder, or tiny-random; without it the embedded model"
    )
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
