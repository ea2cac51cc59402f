"""One step in three execution modes, and mixed beside its parts run alone.

    python -m scripts.bench_step [--rounds 15] [--eager-rounds 1] [--models embedded wide] [--json]

For each cell: the same rows as one program (FULL), piece by piece (PIECEWISE, whose buckets are
the cells' rows exactly, so that no padding tells them apart) and operator by operator (EAGER); the
cell's prefill part and decode part as FULL programs of their own; and FULL with decode rows sent
through the path of prefill rows (``decode_path="extend"``). Rounds are interleaved, the order turns
from round to round, medians with the 10th and 90th percentile. A step counts from dispatch until
its tokens are on the host. The wide model has random weights, its experts hold 403 MB in float32.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bucketing.cell import Cell
from bucketing.pack import Chunk, Group, RankRows, SlotReset, SlotSettings, pack
from bucketing.programs import CompileReport
from bucketing.step_inputs import StepInputs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.modes import Mode, Served, full
from glm_jax.engine.runner import Runner
from glm_jax.model_files import ModelFiles, find_model, load_model

CELLS = (
    Cell(0, 1, 1),
    Cell(0, 8, 1),
    Cell(64, 8, 1),
    Cell(256, 8, 1),
    Cell(128, 16, 1),
    Cell(256, 0, 1),
)
# Tokens that every decoding request has in the cache: more than index_topk, so selection matters.
CONTEXT = 320
PAGE_SIZE = 64
MAX_LENGTH = 704
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())


class Side(NamedTuple):
    """One thing that is timed: a runner, how it runs the step, and the step's inputs."""

    runner: Runner
    served: Served
    inputs: StepInputs


def wide_model() -> ModelFiles:
    """A model whose steps read more expert weights than any cache holds."""
    embedded = find_model(None).config
    config = embedded.replace(
        hidden_size=512,
        moe_intermediate_size=1024,
        n_routed_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=4,
        mlp_layer_types=("dense", "dense", "sparse", "sparse"),
        indexer_types=("full", "full", "full", "shared"),
        num_nextn_predict_layers=0,
    )
    return ModelFiles("wide", config, None)


def options(decode_path: str) -> EngineConfig:
    """Engine options under which all cells exist."""
    groups = sorted({cell.groups for cell in CELLS} - {0})
    prefill = sorted({cell.prefill for cell in CELLS} - {0})
    slots = groups[-1] + 1
    return EngineConfig(
        max_model_len=MAX_LENGTH,
        page_size=PAGE_SIZE,
        max_num_seqs=slots,
        max_num_batched_tokens=prefill[-1],
        prefill_buckets=prefill,
        group_buckets=groups,
        piecewise_buckets=sorted({cell.rows for cell in CELLS}),
        decode_path=decode_path,
        dtype="float32",
        weight_dtype="float32",
        kv_cache_dtype="float32",
        layer_storage="per_layer",
        layer_loop="unrolled",
        kernels="xla",
        num_pages=slots * MAX_LENGTH // PAGE_SIZE + 1,
    )


class Bench:
    """A model ready to run every cell in every mode."""

    def __init__(self, found: ModelFiles, report: Callable[[CompileReport], Any]) -> None:
        """Load, compile, and give every slot its context."""
        self.config = found.config
        device = jax.devices()[0]
        model = load_model(found, dtype="float32", storage="per_layer", seed=0, device=device)
        self.runners = {}
        for path in ("groups", "extend"):
            engine = options(path)
            runner = Runner(model, Lowering(found.config, engine))
            cells = set(CELLS) | {Cell(max(engine.prefill_buckets), 0, 1)}
            if path == "groups":
                cells |= {Cell(cell.prefill, 0, 1) for cell in CELLS if cell.prefill}
                cells |= {Cell(0, cell.groups, 1) for cell in CELLS if cell.groups}
            pieces = [
                piece
                for rows in sorted({cell.rows for cell in CELLS})
                for piece in runner.pieces.pieces(rows)
            ]
            runner.compile([*sorted(cells), *(pieces if path == "groups" else [])], report)
            self._fill(runner, engine)
            self.runners[path] = runner

    def sides(self, cell: Cell) -> dict[str, Side]:
        """Everything that is timed for a cell, by name."""
        groups, extend = self.runners["groups"], self.runners["extend"]
        widest = options("groups").widest
        inputs = self.inputs(cell, cell)
        sides = {
            "full": Side(groups, full(cell), inputs),
            "piecewise": Side(
                groups,
                Served(Mode.PIECEWISE, widest, bucket=cell.rows),
                self.inputs(cell, widest),
            ),
            "eager": Side(groups, Served(Mode.EAGER, cell), inputs),
        }
        if cell.groups:
            sides["extend"] = Side(extend, full(cell), inputs)
        if cell.groups and cell.prefill:
            for name, part in (
                ("prefill_alone", Cell(cell.prefill, 0, 1)),
                ("decode_alone", Cell(0, cell.groups, 1)),
            ):
                sides[name] = Side(groups, full(part), self.inputs(part, part))
        return sides

    def inputs(self, cell: Cell, layout: Cell) -> StepInputs:
        """A step of full segments: the last slot starts its prompt anew, the first ones decode."""
        engine = options("groups")
        slot = engine.max_num_seqs - 1
        chunks, resets = [], []
        if cell.prefill:
            chunks = [self._chunk(slot, cell.prefill)]
            resets = [SlotReset(slot, _pages(slot), 0, GREEDY)]
        groups = [Group(g, True, 1, 0, None, None, True) for g in range(cell.groups)]
        return pack(layout, engine.limits(), [RankRows(chunks, groups, resets)])

    def _chunk(self, slot: int, rows: int) -> Chunk:
        tokens = np.random.default_rng(slot).integers(0, self.config.vocab_size, rows, np.int32)
        return Chunk(slot, tokens, np.append(tokens[1:], np.int32(0)), sampled=True)

    def _fill(self, runner: Runner, engine: EngineConfig) -> None:
        """Prefill every decoding slot up to its context."""
        cell = Cell(engine.max_num_batched_tokens, 0, 1)
        for slot in range(engine.max_num_seqs - 1):
            for start in range(0, CONTEXT, cell.prefill):
                resets = [SlotReset(slot, _pages(slot), 0, GREEDY)] if start == 0 else []
                rows = RankRows([self._chunk(slot, min(cell.prefill, CONTEXT - start))], [], resets)
                runner.run(full(cell), pack(cell, engine.limits(), [rows]))


def _pages(slot: int) -> range:
    per_slot = MAX_LENGTH // PAGE_SIZE
    return range(1 + slot * per_slot, 1 + (slot + 1) * per_slot)


def run(side: Side) -> float:
    """Seconds of one step, until the tokens it drew are on the host."""
    started = time.perf_counter()
    outputs = side.runner.run(side.served, side.inputs)
    for drawn in (outputs.group_tokens, outputs.chunk_tokens):
        np.asarray(drawn)
    return time.perf_counter() - started


def measure(sides: dict[str, Side], rounds: int, eager_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every side, round by round, the order turning; EAGER by itself afterwards.

    The first round warms up; EAGER compiles its operators in it.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = [name for name in sides if name != "eager"]
    for number in range(-1, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = run(sides[name])
            if number >= 0:
                times[name].append(seconds * 1e3)
    for number in range(-1, eager_rounds):
        seconds = run(sides["eager"]) if eager_rounds else 0.0
        if number >= 0:
            times["eager"].append(seconds * 1e3)
    return times


def row(model: str, cell: Cell, times: dict[str, list[float]], pieces: int) -> dict[str, Any]:
    """The figures of a cell."""
    result: dict[str, Any] = {"model": model, "P": cell.prefill, "G": cell.groups}
    for name in ("full", "piecewise", "eager", "prefill_alone", "decode_alone", "extend"):
        values = times.get(name)
        median = None if not values else round(float(np.median(values)), 3)
        result[f"{name}_ms"] = median
        if values:
            spread = np.percentile(values, (10, 90))
            result[f"{name}_ms_p10_p90"] = [round(float(value), 3) for value in spread]
    result["dispatches_full"] = 1
    result["dispatches_piecewise"] = pieces
    return result


def bench(names: Sequence[str], rounds: int, eager_rounds: int) -> list[dict[str, Any]]:
    """Measure every cell of every model."""
    console = Console(stderr=True)
    rows = []
    for name in names:
        found = find_model(None) if name == "embedded" else wide_model()
        bench_of = Bench(found, lambda one: console.print(f"  {one.key} {one.seconds:.1f} s"))
        for cell in CELLS:
            sides = bench_of.sides(cell)
            times = measure(sides, rounds, eager_rounds)
            run(sides["piecewise"])
            rows.append(row(name, cell, times, bench_of.runners["groups"].dispatches))
            console.print(rows[-1])
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(
        *("model", "P", "G", "full ms", "piecewise", "eager", "p/f", "mixed/parts", "extend/f"),
        box=None,
    )
    for one in rows:
        parts = (one["prefill_alone_ms"] or 0) + (one["decode_alone_ms"] or 0)
        low, high = one["full_ms_p10_p90"]
        table.add_row(
            one["model"],
            str(one["P"]),
            str(one["G"]),
            f"{one['full_ms']:.1f} ({low:.1f}-{high:.1f})",
            f"{one['piecewise_ms']:.1f}",
            f"{one['eager_ms']:.0f}" if one["eager_ms"] else "",
            f"{one['piecewise_ms'] / one['full_ms']:.2f}",
            f"{one['full_ms'] / parts:.2f}" if parts else "",
            f"{one['extend_ms'] / one['full_ms']:.2f}" if one["extend_ms"] else "",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["embedded", "wide"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--eager-rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    arguments = parser.parse_args()
    rows = bench(arguments.models, arguments.rounds, arguments.eager_rounds)
    if arguments.json:
        versions = {"jax": jax.__version__, "python": platform.python_version()}
        print(json.dumps({"cells": rows, "rounds": arguments.rounds, **versions}))
    else:
        show(rows)


if __name__ == "__main__":
    sys.exit(main())
