"""Speculative decoding of the embedded model: what is accepted, how fast, what a step costs.

    python -m scripts.bench_speculation [--batches 1 8] [--drafts 0 1 2 3 4 5 auto] [--rounds 3]

Prompts are windows of files that the model was not trained on: the unit tests of the running
Python's library, of which training sees none in any version, in the order in which
``scripts.tiny.corpus`` shuffles them (always the same). Every file gives its second window, then
every file its third, and so on. Generated text is easier to draft than the files, above all greedy
text, which falls into loops; so it is generated greedily and at temperature 0.8, and besides,
drafts right behind the files' own text are counted, as in the model's card.

One engine per draft length, all loaded, take turns: every round has prompts of its own, the same
for all, the order turns from round to round, and one round before the first warms up. "auto" starts
anew for every batch size and temperature, and learns in that round. Prompts are computed before any
request decodes (``prefill_first``), so all decode steps are of the cells that are timed. Tokens per
second count from the first token of all requests to the last of all. Ratios are taken round by
round, then their median.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from glm_jax import LLM, SamplingParams
from glm_jax.model_files import find_model
from scripts.facts import facts_of
from scripts.speculation.acceptance import acceptance_of, first_groups
from scripts.speculation.figures import best_fixed, equal_outputs, judge, ratios, spread_of
from scripts.speculation.generation import Generation, generate
from scripts.speculation.prompts import read_prompts
from scripts.speculation.steps import (
    REPLAYS,
    drafter_share,
    full_decodes,
    host_seconds,
    step_seconds,
)
from scripts.speculation.tables import show

CHUNK = 64
SLOTS = 8
BATCHES = (1, SLOTS)
LENGTHS = ("0", "1", "2", "3", "4", "5", "auto")
AUTO_WIDTHS = (1, 2, 4, 6)
TEMPERATURES = (0.0, 0.8)
# Prompts whose first drafts are compared with the model's card.
TEXT_PROMPTS = 64
LEAST_TOKENS = 2 * REPLAYS * 6


def start(drafts: str, length: int, **options: Any) -> LLM:
    """An engine with the cells that it needs here, compiled.

    A fixed length has one width: a request's last steps, which have fewer drafts, use it too.

    Args:
        drafts: of every request, or "auto".
        length: tokens that a request may have.
        **options: further ones of the engine.
    """
    automatic = drafts == "auto"
    widths = AUTO_WIDTHS if automatic else (int(drafts) + 1,)
    pages = -(-length // CHUNK)
    return LLM(
        num_speculative_tokens=drafts if automatic else int(drafts),
        decode_widths=widths,
        grid_cells=[(CHUNK, 0, 1), *((0, b, width) for b in BATCHES for width in widths)],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=pages * CHUNK,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=CHUNK,
        page_size=CHUNK,
        num_pages=SLOTS * pages + 1,
        execution_mode="full",
        step_policy="prefill_first",
        **options,
    )


def generate_round(
    llm: LLM, prompts: Sequence[list[int]], temperature: float, tokens: int
) -> Generation:
    """Generate for a batch; the seeds are the same whichever engine it is."""
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    return generate(llm.engine, prompts, params)


def run_rounds(
    llms: dict[str, LLM], prompts: Sequence[list[int]], batch: int, temperature: float, tokens: int
) -> dict[str, list[Generation]]:
    """Let all engines generate for all prompts, a batch a round; the first round does not count."""
    made: dict[str, list[Generation]] = {name: [] for name in llms}
    names = list(llms)
    for number, begin in enumerate(range(0, len(prompts), batch)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            part = prompts[begin : begin + batch]
            generation = generate_round(llms[name], part, temperature, tokens)
            if number:
                made[name].append(generation)
    return made


def summarise(made: dict[str, list[Generation]], batch: int, temperature: float) -> dict[str, Any]:
    """The figures of one batch size and temperature, by draft length."""
    rates = {name: [one.decode_rate for one in rounds] for name, rounds in made.items()}
    best = best_fixed(rates)
    plain = [full_decodes(one.records, batch, 1) for one in made["0"]]
    sides: dict[str, Any] = {}
    for name, rounds in made.items():
        side: dict[str, Any] = {
            "rate": spread_of(rates[name])._asdict(),
            "to_none": spread_of(ratios(rates[name], rates["0"]))._asdict(),
            "to_best": spread_of(ratios(rates[name], rates[best]))._asdict(),
            "equal": statistics.fmean(
                equal_outputs(one.tokens, other.tokens)
                for one, other in zip(rounds, made["0"], strict=True)
            ),
            "distinct": statistics.fmean(len(set(ids)) for one in rounds for ids in one.tokens),
            **acceptance_of(
                [group for one in rounds for record in one.records for group in record.drafts]
            )._asdict(),
        }
        if name != "auto":
            steps = [full_decodes(one.records, batch, int(name) + 1) for one in rounds]
            times = [step_seconds(records) for records in steps]
            base = [step_seconds(records) for records in plain]
            side["step_ms"] = spread_of([1e3 * seconds for seconds in times])._asdict()
            side["step_ratio"] = statistics.median(ratios(times, base))
            hosts = [host_seconds(records) for records in steps]
            side["host_ms"] = {
                phase: 1e3 * statistics.median(host[phase] for host in hosts) for phase in hosts[0]
            }
            if batch == 1 and name != "0":
                speed = side["to_none"]["median"]
                side["verdict"] = judge(side["length"], side["step_ratio"], speed)._asdict()
        else:
            side["widths"] = widths_used(rounds)
        sides[name] = side
    return {"batch": batch, "temperature": temperature, "best": best, "sides": sides}


def widths_used(rounds: Sequence[Generation]) -> dict[str, float]:
    """The share of decode steps of each width, with and without the drafter."""
    used: dict[str, int] = {}
    for record in (record for one in rounds for record in one.records):
        if record.kind == "decode" and record.cell is not None:
            key = f"{record.cell.width}{'' if record.drafter else ' without drafter'}"
            used[key] = used.get(key, 0) + 1
    return {key: count / sum(used.values()) for key, count in sorted(used.items())}


def text_acceptance(llms: dict[str, LLM], prompts: Sequence[list[int]]) -> dict[str, Any] | None:
    """Acceptance of the first drafts behind every prompt, by the largest fixed length."""
    name = max(name for name in llms if name != "auto")
    if name == "0":
        return None
    groups = []
    for begin in range(0, len(prompts), SLOTS):
        part = prompts[begin : begin + SLOTS]
        made = generate_round(llms[name], part, 0.0, int(name) + 2)
        groups += first_groups(group for record in made.records for group in record.drafts)
    return {"drafts": name, **acceptance_of(groups)._asdict()}


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Load all engines and measure."""
    console = Console(stderr=True)
    found = find_model(None)
    assert found.folder is not None
    batches, rounds = arguments.batches, arguments.rounds
    count = max(max(batches) * (rounds + 1), TEXT_PROMPTS)
    prompts = read_prompts(found.folder, count, arguments.prompt)
    llms = {}
    for name in arguments.drafts:
        console.print(f"loading and compiling: {name} drafts")
        llms[name] = start(name, arguments.prompt + arguments.tokens)
    console.print("drafts behind the files' own text")
    text = text_acceptance(llms, prompts[:TEXT_PROMPTS])
    results = []
    for batch in batches:
        for temperature in arguments.temperatures:
            console.print(f"batch {batch}, temperature {temperature}")
            part = prompts[: batch * (rounds + 1)]
            if "auto" in llms:
                # What it has learned of other text must not decide here.
                llms["auto"] = start("auto", arguments.prompt + arguments.tokens)
            made = run_rounds(llms, part, batch, temperature, arguments.tokens)
            results.append(summarise(made, batch, temperature))
    console.print("the drafter's share of a step")
    shares = {
        str(batch): {
            name: drafter_share(llm, prompts[:batch], arguments.tokens)
            for name, llm in llms.items()
            if name not in ("0", "auto")
        }
        for batch in batches
    }
    return {
        "model": found.name,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "rounds": rounds,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **facts_of(jax.devices()[0].device_kind),
        "peak_memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "text": text,
        "drafter_share": shares,
        "results": results,
    }


def check(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: no engine without drafts, or sizes that do not fit.
    """
    if "0" not in arguments.drafts:
        raise ValueError(
            f"--drafts is {' '.join(arguments.drafts)}; 0 must be among them: all speeds are "
            "compared with it."
        )
    if arguments.rounds < 1:
        raise ValueError(f"--rounds is {arguments.rounds}; it must be at least 1.")
    if arguments.prompt < 1 or arguments.prompt % CHUNK:
        raise ValueError(
            f"--prompt is {arguments.prompt}; it must be a multiple of {CHUNK}, so that no rest of "
            "a prompt is computed beside decodes."
        )
    if arguments.tokens < LEAST_TOKENS:
        raise ValueError(
            f"--tokens is {arguments.tokens}; it must be at least {LEAST_TOKENS}: so many the "
            "replayed steps of the drafter's share may draw."
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--drafts", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=list(TEMPERATURES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate for each")
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    try:
        check(arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    report = bench(arguments)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
