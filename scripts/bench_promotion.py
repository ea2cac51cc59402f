"""A start from an empty cache under load: which steps ran how, second by second, and the tokens.

    python -m scripts.bench_promotion [--requests 6] [--interval 10] [--model FOLDER]

The engine waits for its pieces only (``grid_warm="none"``) and serves at once; a child process
compiles the cells meanwhile. Requests are kept in flight until every program is there. Afterwards
every request runs again, now as FULL steps, and its tokens are compared.
"""

import argparse
import itertools
import tempfile
import time
from collections import Counter
from random import Random
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from glm_jax import LLM, SamplingParams

GRID: dict[str, Any] = {"prefill_buckets": (64,), "group_buckets": (1, 8)}
LIMITS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 512}


class Asked(NamedTuple):
    """A request and what came of it."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]


def ask(rng: Random, vocab_size: int) -> Asked:
    """A request of random length, greedy or sampled."""
    prompt = rng.choices(range(vocab_size), k=rng.randint(8, 300))
    temperature = rng.choice([0.0, 0.8])
    params = SamplingParams(
        temperature=temperature, seed=rng.randrange(2**32), max_tokens=24, ignore_eos=True
    )
    return Asked(prompt, params, [])


def serve(llm: LLM, in_flight: int, interval: float) -> tuple[list[Asked], list[Counter[str]]]:
    """Keep requests in flight until nothing is pending any more; modes per interval."""
    rng, numbers = Random(0), itertools.count()
    running: dict[str, Asked] = {}
    done: list[Asked] = []
    modes: list[Counter[str]] = []
    started = time.perf_counter()
    draining = False
    while running or not draining:
        draining = draining or not llm.compiler.pending
        while len(running) < in_flight and not draining:
            name, asked = f"p{next(numbers)}", ask(rng, llm.model_config.vocab_size)
            llm.engine.add_request(name, asked.prompt, asked.params)
            running[name] = asked
        deltas, record = llm.engine.step()
        if record.fault is not None:
            raise RuntimeError(f"a step failed: {record.fault}")
        slot = int((time.perf_counter() - started) / interval)
        modes += [Counter() for _ in range(slot + 1 - len(modes))]
        modes[slot][record.mode] += 1
        for delta in deltas:
            running[delta.request_id].tokens.extend(delta.token_ids)
            if delta.finish_reason is not None:
                done.append(running.pop(delta.request_id))
                llm.engine.forget(delta.request_id)
    return done, modes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6, help="requests in flight")
    parser.add_argument("--interval", type=float, default=10.0, help="seconds per line")
    parser.add_argument("--model", default=None, help="checkpoint folder; default: embedded")
    arguments = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory() as cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        born = time.perf_counter()
        llm = LLM(arguments.model, skip_tokenizer_init=True, grid_warm="none", **GRID, **LIMITS)
        seconds, pending = time.perf_counter() - born, len(llm.compiler.pending)
        console.print(f"serving after {seconds:.1f} s, {pending} programs to come")
        done, modes = serve(llm, arguments.requests, arguments.interval)
        table = Table("from second", "PIECEWISE", "FULL", box=None)
        for number, count in enumerate(modes):
            row = number * arguments.interval, count["PIECEWISE"], count["FULL"]
            table.add_row(*map(str, row))
        console.print(table)
        again = llm.generate([one.prompt for one in done], [one.params for one in done])
        different = sum(
            one.tokens != output.outputs[0].token_ids
            for one, output in zip(done, again, strict=True)
        )
        console.print(f"{len(done)} requests, {different} with other tokens when all is FULL")
        console.print(f"failed programs: {llm.compiler.failed or 'none'}")
        llm.compiler.close()


if __name__ == "__main__":
    main()
