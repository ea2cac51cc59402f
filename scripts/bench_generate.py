"""Generation speed on a CPU, beside transformers on the same float32 checkpoint.

    python -m scripts.bench_generate --hf-python PYTHON [--model FOLDER] [--rounds 5] [--json FILE]

PYTHON is an interpreter with torch and transformers; without it only glm-jax is measured. Both get
the same processors, prompts and float32 weights and run in turn, so that a busy moment of the
machine meets both. Every token's time is taken in both. Prefill runs until every request has its
first token; decoding is counted from there until a request has its last one, so while all of them
decode and nothing else happens. Greedy; the tokens of both are compared.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from glm_jax import LLM, GlmConfig, SamplingParams, Tokenizer
from glm_jax.model.parameters import parameter_specs
from glm_jax.model_files import find_model
from glm_jax.weights.export import export_parameters
from glm_jax.weights.load import load_parameters

ROOT = Path(__file__).resolve().parents[1]
# A long file of plain Python; the prompts are windows of it.
PROMPT_SOURCE = "argparse.py"
METRICS = {"prefill": "prefill tok/s", "decode": "decode tok/s", "total": "end-to-end tok/s"}


class Generated(NamedTuple):
    """What one side made of the prompts.

    Attributes:
        tokens: New tokens of each prompt.
        times: When each of them was there, in seconds since the prompts were handed over.
    """

    tokens: list[list[int]]
    times: list[list[float]]


# (prompts, max_tokens) -> what came of it
Generate = Callable[[list[list[int]], int], Generated]


def write_float32(source: Path, target: Path) -> None:
    """Write the checkpoint that both sides load."""
    config = GlmConfig.from_hf(source)
    parameters = {
        name: np.empty(spec.shape, np.float32) for name, spec in parameter_specs(config).items()
    }
    load_parameters(source, config, parameters.__getitem__)
    export_parameters(target, config, parameters.__getitem__, dtype="float32")


def read_prompts(folder: Path, count: int, length: int) -> list[list[int]]:
    """Return windows of a real file, none starting where another does."""
    text = (Path(sysconfig.get_path("stdlib")) / PROMPT_SOURCE).read_text(encoding="utf-8")
    ids = Tokenizer.from_path(folder).encode(text, add_special_tokens=False)
    stride = (len(ids) - length) // count
    if stride < 1:
        raise SystemExit(f"{PROMPT_SOURCE} has {len(ids)} tokens, too few for {count} x {length}")
    return [ids[start : start + length] for start in range(0, stride * count, stride)]


def start_ours(folder: Path, batch: int, length: int) -> Generate:
    """Load and compile glm-jax; eps as transformers has it, so that the tokens can agree."""
    llm = LLM(
        folder,
        dtype="float32",
        latent_norm_eps=1e-6,
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=batch,
        grid_warm="all",
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> Generated:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        generated = Generated([[] for _ in prompts], [[] for _ in prompts])
        start = time.perf_counter()
        for index, delta in llm.stream(prompts, params):
            generated.tokens[index] += delta.token_ids
            generated.times[index] += [time.perf_counter() - start] * len(delta.token_ids)
        return generated

    return generate


def start_theirs(
    python: str, folder: Path, threads: int, stack: ExitStack
) -> tuple[Generate, dict[str, str]]:
    """Start the worker and return its generate and its versions."""
    worker = stack.enter_context(
        subprocess.Popen(
            [python, "-m", "scripts.oracle.worker", str(folder), str(threads)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    requests, answers = worker.stdin, worker.stdout
    assert requests is not None
    assert answers is not None
    # Popen waits for the worker at the end of the stack; it leaves when its input is closed.
    stack.callback(requests.close)

    def read() -> Any:
        line = answers.readline()
        if not line:
            raise SystemExit(f"the worker of {python} ended; its message is above")
        return json.loads(line)

    def generate(prompts: list[list[int]], max_tokens: int) -> Generated:
        requests.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        requests.flush()
        answer = read()
        return Generated(answer["tokens"], [answer["times"]] * len(prompts))

    return generate, read()


def rates_of(prompts: list[list[int]], generated: Generated) -> dict[str, float]:
    """Return tokens per second of one round, by metric."""
    times = generated.times
    all_started = max(one[0] for one in times)
    first_done = min(one[-1] for one in times)
    decoded = sum(all_started < moment <= first_done for one in times for moment in one)
    return {
        "prefill": sum(map(len, prompts)) / all_started,
        "decode": decoded / (first_done - all_started),
        "total": sum(map(len, times)) / max(one[-1] for one in times),
    }


def run_rounds(
    sides: dict[str, Generate], prompts: list[list[int]], max_tokens: int, rounds: int
) -> dict[str, Any]:
    """Let the sides take turns, the order reversed every round, after a warm-up of each."""
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    tokens: dict[str, list[list[int]]] = {}
    for generate in sides.values():
        generate(prompts, 4)
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            generated = sides[name](prompts, max_tokens)
            tokens[name] = generated.tokens
            rates[name].append(rates_of(prompts, generated))
    return {
        "batch": len(prompts),
        "sides": {name: summarise(values) for name, values in rates.items()},
        "equal_tokens": agreement(list(tokens.values())),
    }


def summarise(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return median, lowest and highest of each metric."""
    summary = {}
    for metric in METRICS:
        values = [one[metric] for one in rounds]
        summary[metric] = {
            "median": statistics.median(values),
            "low": min(values),
            "high": max(values),
        }
    return summary


def agreement(generated: list[list[list[int]]]) -> float:
    """Return the fraction of positions at which all sides generated the same token."""
    return float(np.mean(np.all(np.array(generated) == np.array(generated[0]), axis=0)))


def show(report: dict[str, Any]) -> None:
    """Print one line per batch size and metric."""
    table = Table("batch", "metric", *report["results"][0]["sides"], "ratio", box=None)
    for result in report["results"]:
        for metric, label in METRICS.items():
            sides = [side[metric] for side in result["sides"].values()]
            cells = [f"{s['median']:.1f} ({s['low']:.1f}-{s['high']:.1f})" for s in sides]
            ratio = f"{sides[0]['median'] / sides[1]['median']:.1f}" if len(sides) > 1 else ""
            table.add_row(str(result["batch"]), label, *cells, ratio)
    console = Console()
    console.print({key: value for key, value in report.items() if key != "results"})
    console.print(table)
    for result in report["results"]:
        console.print(f"batch {result['batch']}: {result['equal_tokens']:.1%} of tokens equal")


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure every batch size and return the report."""
    processors = sorted(os.sched_getaffinity(0))[: arguments.threads]
    # Before JAX makes its thread pool, and inherited by the worker.
    os.sched_setaffinity(0, processors)
    found = find_model(arguments.model)
    if found.folder is None:
        raise SystemExit(f"{found.name} has no checkpoint folder; pass one with --model")
    prompts = read_prompts(found.folder, max(arguments.batch), arguments.prompt)
    versions = {"jax": jax.__version__, "python": platform.python_version()}
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_float32(found.folder, folder)
        ours = start_ours(folder, max(arguments.batch), arguments.prompt + arguments.tokens)
        sides = {"glm-jax": ours}
        if arguments.hf_python:
            theirs, their_versions = start_theirs(
                arguments.hf_python, folder, arguments.threads, stack
            )
            sides["transformers"] = theirs
            versions |= their_versions
        results = [
            run_rounds(sides, prompts[:batch], arguments.tokens, arguments.rounds)
            for batch in arguments.batch
        ]
    return {
        "model": found.name,
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "threads": len(processors),
        "rounds": arguments.rounds,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder; the embedded model without it")
    parser.add_argument("--hf-python", help="interpreter with torch and transformers")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate for each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    report = bench(arguments)
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
