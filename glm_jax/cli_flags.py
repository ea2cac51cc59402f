"""Flags of the ``glm-jax`` command that several subcommands share."""

import argparse
import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from bucketing.grid import Grid
from glm_jax.engine.config import EngineConfig, grid_options
from glm_jax.sampling.params import SamplingParams

# Engine options that are plain values on the command line.
_ENGINE_FLAGS = (
    "dtype",
    "weight_dtype",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "num_pages",
    "seed",
    "layer_storage",
    "layer_loop",
    "latent_norm_eps",
    "grid_warm",
    "execution_mode",
    "max_step_ms",
    "num_speculative_tokens",
    "decode_loop_steps",
    "tbt_target_ms",
)


def _drafts(text: str) -> int | str:
    """Read a count, or "auto"; the options check what it may be."""
    return int(text) if text.lstrip("-").isdigit() else text


_FLAG_TYPES = {
    "num_pages": int,
    "latent_norm_eps": float,
    "max_step_ms": float,
    "tbt_target_ms": float,
    "num_speculative_tokens": _drafts,
}


def add_model_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``."""
    parser.add_argument(
        "--model", help="checkpoint folder, or tiny-random; without it the embedded model"
    )


def add_step_log_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--step-log``."""
    parser.add_argument(
        "--step-log",
        type=Path,
        metavar="FILE",
        help="write a line of JSON per step; `glm-jax explain` reads it",
    )


def add_log_plans_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-plans``."""
    parser.add_argument(
        "--log-plans",
        action="store_true",
        help="with --step-log: also what every step was told, for `glm-jax replay` (slower)",
    )


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--profile`` and ``--profile-steps``."""
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FOLDER",
        help="capture steps with JAX's profiler, for TensorBoard or XProf; each has its number",
    )
    parser.add_argument(
        "--profile-steps",
        type=int,
        default=20,
        metavar="N",
        help="how many, after the first step (default 20)",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, the engine's options and the axes of the grid."""
    add_model_flag(parser)
    group = parser.add_argument_group("engine options")
    for field in fields(EngineConfig):
        if field.name in _ENGINE_FLAGS:
            kind = _FLAG_TYPES.get(field.name, type(field.default))
            assert field.default is not MISSING, f"{field.name=} has no default"
            group.add_argument(f"--{field.name.replace('_', '-')}", type=kind, dest=field.name)
    group.add_argument(
        "--grid-prefill",
        type=_sizes,
        help="prefill rows of the grid, for example 0,64,256; the largest is the step's budget",
    )
    group.add_argument(
        "--grid-decode",
        type=_sizes,
        help="decode groups of the grid, for example 0,1,2,4,8; the largest is max_num_seqs",
    )
    group.add_argument("--grid", type=Path, help="grid file that `glm-jax grid plan` wrote")


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options that were given.

    Raises:
        ValueError: the grid file is none, or axes are given beside it.
    """
    chosen = {name: getattr(options, name) for name in _ENGINE_FLAGS}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if options.grid is not None:
        if options.grid_prefill or options.grid_decode:
            raise ValueError(
                "--grid and --grid-prefill or --grid-decode both give the cells. Pass one."
            )
        chosen |= grid_options(Grid.from_json(json.loads(options.grid.read_text())))
    for flag, buckets, limit in (
        (options.grid_prefill, "prefill_buckets", "max_num_batched_tokens"),
        (options.grid_decode, "group_buckets", "max_num_seqs"),
    ):
        if flag:
            chosen[buckets] = flag
            chosen.setdefault(limit, max(flag))
    return chosen


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add what a request may ask for."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--sampling-seed", type=int, help="same seed, same text")
    group.add_argument("--max-tokens", type=int, default=128)
    group.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="a line per token instead of text: its log-probability, and those of the N best",
    )


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """Return the sampling parameters that were given."""
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.sampling_seed,
        max_tokens=options.max_tokens,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        logprobs=options.logprobs,
    )


def _sizes(text: str) -> tuple[int, ...]:
    """Read "0,64,256"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"{text!r} is no list of sizes; write integers with commas, such as 0,64,256"
        raise argparse.ArgumentTypeError(message) from None
