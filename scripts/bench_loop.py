"""Decode loops of the embedded model: what several steps in one dispatch save.

    python -m scripts.bench_loop [--batches 1 8] [--drafts 0 3] [--steps 16] [--rounds 5]

Per draft length one engine without loops and one with them take turns on the same prompts. Greedy;
tokens per second count from the first token of all requests to the last of all; ratios are taken
round by round, then their median. Host time is what a decode dispatch spends on planning, packing
and committing, per emitted token: on a CPU the dispatch itself shares the cores with the program.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from glm_jax import LLM
from glm_jax.engine.outputs import StepRecord
from glm_jax.model_files import find_model
from scripts.bench_speculation import BATCHES, generate_round, start
from scripts.facts import facts_of
from scripts.speculation.figures import equal_outputs, ratios, spread_of
from scripts.speculation.generation import Generation
from scripts.speculation.prompts import read_prompts

PROMPT, TOKENS = 256, 256


def host_per_token(records: Iterable[StepRecord], tokens: int) -> float:
    """Seconds of planning, packing and committing in decode steps, per emitted token."""
    phases = [record.phases for record in records if record.kind == "decode"]
    return sum(phase.schedule + phase.pack + phase.commit for phase in phases) / tokens


def compare(single: LLM, looped: LLM, prompts: Sequence[list[int]], batch: int) -> dict[str, Any]:
    """Let both engines generate in turns, a batch a round; the first round does not count."""
    made: dict[str, list[Generation]] = {"single": [], "loop": []}
    sides = {"single": single, "loop": looped}
    for number, begin in enumerate(range(0, len(prompts), batch)):
        part = prompts[begin : begin + batch]
        for name in sorted(sides, reverse=number % 2 == 0):
            generation = generate_round(sides[name], part, 0.0, TOKENS)
            if number:
                made[name].append(generation)
    rates = {name: [one.decode_rate for one in rounds] for name, rounds in made.items()}
    hosts = {
        name: [host_per_token(one.records, batch * TOKENS) for one in rounds]
        for name, rounds in made.items()
    }
    steps = [
        record.loop_steps
        for one in made["loop"]
        for record in one.records
        if record.kind == "decode"
    ]
    return {
        "batch": batch,
        "rate": {name: spread_of(values)._asdict() for name, values in rates.items()},
        "gain": spread_of(ratios(rates["loop"], rates["single"]))._asdict(),
        "host_us": {name: 1e6 * statistics.median(values) for name, values in hosts.items()},
        "mean_steps": statistics.fmean(steps),
        "equal": statistics.fmean(
            equal_outputs(one.tokens, other.tokens)
            for one, other in zip(made["loop"], made["single"], strict=True)
        ),
    }


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load two engines per draft length and compare them."""
    console = Console(stderr=True)
    found = find_model(None)
    assert found.folder is not None
    prompts = read_prompts(found.folder, max(arguments.batches) * (arguments.rounds + 1), PROMPT)
    results = []
    for drafts in arguments.drafts:
        console.print(f"loading and compiling: {drafts} drafts")
        single = start(str(drafts), PROMPT + TOKENS)
        looped = start(str(drafts), PROMPT + TOKENS, decode_loop_steps=arguments.steps)
        for batch in arguments.batches:
            console.print(f"{drafts} drafts, batch {batch}")
            part = prompts[: batch * (arguments.rounds + 1)]
            results.append({"drafts": drafts, **compare(single, looped, part, batch)})
    return {
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        **facts_of(jax.devices()[0].device_kind),
        "results": results,
    }


def show(report: dict[str, Any]) -> None:
    """Print the report as a table."""
    title = f"decode loops of up to {report['steps']} steps, {report['rounds']} rounds"
    table = Table(title=title)
    columns = "drafts", "batch", "tok/s single", "tok/s loop", "gain (low-high)", "steps"
    for column in (*columns, "host us/token single", "loop", "equal"):
        table.add_column(column, justify="right")
    for result in report["results"]:
        gain, host = result["gain"], result["host_us"]
        table.add_row(
            str(result["drafts"]),
            str(result["batch"]),
            *(f"{result['rate'][name]['median']:.0f}" for name in ("single", "loop")),
            f"{gain['median']:.2f} ({gain['low']:.2f}-{gain['high']:.2f})",
            f"{result['mean_steps']:.1f}",
            *(f"{host[name]:.0f}" for name in ("single", "loop")),
            f"{result['equal']:.0%}",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--drafts", type=int, nargs="+", choices=range(6), default=[0, 3])
    parser.add_argument("--steps", type=int, default=16, help="most steps of a loop")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    report = bench(arguments)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
