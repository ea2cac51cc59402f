"""Time per token against the context, sparse attention beside dense attention with a mask.

    python -m scripts.bench_context [--rounds 9] [--contexts 1024 2048 4096 8192 16384]
        [--json scripts/plots/context.json] [--png scripts/plots/context.png]

A decode step of 1 and of 8 requests that have the context in the cache, and a chunk of 512 prompt
rows whose last row stands there. "Sparse" is the product's program. "Dense" is the same program
except that attention, in every layer, scores all keys of the context and masks what the indexer did
not select (``scripts.context.dense``); the results are compared before anything is timed. Beside
the steps, the operators that read the context alone, for all layers of a step: the indexer, which
is the same in both forms, and attention. The cache holds random values (``scripts.context.steps``).

Rounds are interleaved over forms and contexts, in a new order each; medians with the 10th and 90th
percentile. A step counts from dispatch until its tokens are on the host.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from glm_jax.model_files import ModelFiles, find_model
from scripts.context.figure import draw
from scripts.context.operators import Operators
from scripts.context.rounds import Figures, growth, measure, sides_at
from scripts.context.steps import PAGE_SIZE, PREFILL_ROWS, WORKS, Steps

CONTEXTS = (1024, 2048, 4096, 8192, 16384)
_COLUMNS = (
    ("step", "sparse"),
    ("step", "dense"),
    ("indexer", "both"),
    ("attention", "sparse"),
    ("attention", "dense"),
)


def bench(found: ModelFiles, contexts: Sequence[int], rounds: int) -> list[Figures]:
    """Compare both forms at every context, then time them."""
    console = Console(stderr=True)
    steps = Steps(
        found, max(contexts), lambda one: console.print(f"  {one.key} {one.seconds:.1f} s")
    )
    operators = Operators(steps)
    sides = {}
    for context in contexts:
        sides |= sides_at(steps, operators, context)
        console.print(f"  context {context}: dense equals sparse")
    return measure(sides, rounds, lambda number: console.print(f"  round {number} of {rounds}"))


def check_contexts(contexts: Sequence[int], longest: int) -> list[int]:
    """Sort the contexts.

    Raises:
        ValueError: one is shorter than a chunk, longer than the model allows, or a duplicate.
    """
    wrong = [one for one in contexts if not PREFILL_ROWS <= one <= longest]
    if wrong or len(set(contexts)) < len(contexts):
        raise ValueError(
            f"contexts are {list(contexts)}; allowed: different ones, from {PREFILL_ROWS} (the "
            f"rows of a chunk) to {longest} (the model's max_position_embeddings)."
        )
    return sorted(contexts)


def show(rows: Sequence[Figures]) -> None:
    """Print a table of each work, and how much each column grows from first to last context."""
    figures = {(row.context, row.work, row.part, row.form): row for row in rows}
    for work in WORKS:
        table = Table(
            *("context", "sparse step", "dense step", "dense/sparse"),
            *("indexer", "attention sparse", "attention dense", "rest of sparse step"),
            box=None,
            title=f"{work.name}: ms per token, median (p10-p90)",
            title_justify="left",
        )
        for context in sorted({row.context for row in rows}):
            line = [figures[context, work.name, part, form] for part, form in _COLUMNS]
            sparse, dense, indexer, attention, _ = (one.ms_per_token for one in line)
            written = [f"{one.ms_per_token:.3f} ({one.p10:.3f}-{one.p90:.3f})" for one in line]
            written.insert(2, f"{dense / sparse:.2f}")
            table.add_row(str(context), *written, f"{sparse - indexer - attention:.3f}")
        grown = [f"x {growth(rows, work.name, part, form):.2f}" for part, form in _COLUMNS]
        table.add_row("last/first", *grown[:2], "", *grown[2:])
        Console(width=200).print(table)
        print()


def summary(found: ModelFiles, rows: Sequence[Figures], rounds: int) -> dict[str, Any]:
    """All that a reader needs to judge the figures."""
    return {
        "model": found.name,
        "index_topk": found.config.index_topk,
        "layers": found.config.num_hidden_layers,
        "layers_with_indexer": found.config.indexer_types.count("full"),
        "page_size": PAGE_SIZE,
        "dtype": "float32",
        "rounds": rounds,
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "figures": [row._asdict() for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--png", type=Path, help="draw them into this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; allowed: at least 1.")
    found = find_model(None)
    contexts = check_contexts(arguments.contexts, found.config.max_position_embeddings)
    rows = bench(found, contexts, arguments.rounds)
    show(rows)
    result = summary(found, rows, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.png:
        title = (
            f"{result['model']}, top-k {result['index_topk']}, float32, {result['cores']} CPU cores"
        )
        draw(arguments.png, rows, title)


if __name__ == "__main__":
    sys.exit(main())
