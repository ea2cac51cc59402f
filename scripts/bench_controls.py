"""Control lines of the embedded model: what they cost steps that use them, and those that do not.

    python -m scripts.bench_controls [--rounds 5] [--tokens 48] [--drafts 0]

One engine has them compiled in, another has slots without them; the same prompts take turns. Times
are of decode steps of eight requests: the median of a round, then the median over the rounds and
the lowest and highest; ratios are taken round by round against the engine without. On a GPU the
step's time is the device's, on a CPU both share the cores.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bucketing.cell import Cell
from glm_jax import LLM, SamplingParams
from glm_jax.engine.engine import Engine
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.runner import Runner
from glm_jax.model.slots import slot_shapes
from scripts.facts import facts_of
from scripts.speculation.figures import ratios, spread_of

SLOTS, CHUNK, PROMPT = 8, 64, 40
# What the requests of a round ask for: all of them, or the first one only.
PENALTIES = {"frequency_penalty": 0.3, "repetition_penalty": 1.1}
USES: dict[str, tuple[dict[str, Any], int]] = {
    "nobody": ({}, 0),
    "one with penalties": (PENALTIES, 1),
    "all with penalties": (PENALTIES, SLOTS),
    "all with a bias": ({"logit_bias": {7: 2.0, 9: -2.0}}, SLOTS),
    "all with bad words": ({"bad_words": [[3, 4], [5, 6, 7]]}, SLOTS),
}
WITHOUT, WITH = "left out", "compiled in"


def start(drafts: int, length: int) -> LLM:
    """An engine with the two cells that it needs here, compiled."""
    pages = -(-length // CHUNK)
    return LLM(
        num_speculative_tokens=drafts,
        grid_cells=[(CHUNK, 0, 1), (0, SLOTS, drafts + 1)],
        decode_widths=(drafts + 1,),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=pages * CHUNK,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=CHUNK,
        page_size=CHUNK,
        num_pages=SLOTS * pages + 1,
        execution_mode="full",
        step_policy="prefill_first",
    )


def without_controls(llm: LLM) -> Runner:
    """The model of an engine with steps that know no control lines."""
    lowering = Lowering(llm.model_config, llm.config)
    lowering.slots = lowering._with_rank(slot_shapes(lowering.limits))
    runner = Runner(llm.runner.model, lowering)
    runner.compile(llm.config.grid().cells())
    return runner


def decode_seconds(llm: LLM, runner: Runner, use: str, tokens: int) -> float:
    """The median time of a decode step of all slots."""
    options, users = USES[use]
    engine = Engine(llm.config, runner, vocab_size=llm.model_config.vocab_size)
    for number in range(SLOTS):
        prompt = Random(number).choices(range(llm.model_config.vocab_size), k=PROMPT)
        asked = options if number < users else {}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **asked)
        engine.add_request(f"r{number}", prompt, params)
    times = []
    while engine.has_unfinished:
        record = engine.step().record
        if record.fault is not None:
            raise RuntimeError(f"a step failed: {record.fault}")
        if isinstance(record.cell, Cell) and record.kind == "decode":
            times.append(record.wall_time)
    return statistics.median(times)


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all sides take turns."""
    llm = start(arguments.drafts, PROMPT + arguments.tokens)
    runners = {WITHOUT: without_controls(llm), WITH: llm.runner}
    sides = [(WITHOUT, "nobody"), *((WITH, use) for use in USES)]
    times: dict[tuple[str, str], list[float]] = {side: [] for side in sides}
    for number in range(arguments.rounds + 1):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            seconds = decode_seconds(llm, runners[side[0]], side[1], arguments.tokens)
            # The first round does not count.
            if number:
                times[side].append(seconds)
    return {
        "drafts": arguments.drafts,
        "rounds": arguments.rounds,
        **facts_of(jax.devices()[0].device_kind),
        "results": [result_of(side, times) for side in sides],
    }


def result_of(
    side: tuple[str, str], times: Mapping[tuple[str, str], list[float]]
) -> dict[str, Any]:
    """The figures of one side."""
    against = ratios(times[side], times[WITHOUT, "nobody"])
    return {
        "controls": side[0],
        "users": side[1],
        "ms": spread_of([1e3 * value for value in times[side]])._asdict(),
        "ratio": spread_of(against)._asdict(),
    }


def show(report: Mapping[str, Any]) -> None:
    """Print the report as a table."""
    title = (
        f"decode steps of {SLOTS} requests, {report['drafts']} drafts, {report['rounds']} rounds"
    )
    table = Table(title=title)
    table.add_column("controls")
    table.add_column("who uses them")
    table.add_column("ms a step (low-high)", justify="right")
    table.add_column("times that of none (low-high)", justify="right")
    for result in report["results"]:
        ms, ratio = result["ms"], result["ratio"]
        table.add_row(
            result["controls"],
            result["users"],
            f"{ms['median']:.2f} ({ms['low']:.2f}-{ms['high']:.2f})",
            f"{ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f})",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of each request")
    parser.add_argument("--drafts", type=int, choices=range(6), default=0)
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    report = bench(arguments)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
