"""What the demo shows: the steps of a run as they happen, everyone's gaps, and the summary."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from glm_jax.demo.report import differences, figures_of
from glm_jax.demo.run import Run, Step

TITLES = {
    "prefill_first": "prefill first: the long prompt's chunks, then the decodes",
    "alternate": "alternate: a chunk, a decode, a chunk, ...",
    "mixed": "mixed: a chunk and the decodes in one step",
}
KIND_STYLES = {"prefill": "yellow", "decode": "cyan", "mixed": "green"}
BAR_WIDTH = 30


@contextmanager
def live_run(console: Console) -> Iterator[Callable[[Run], None]]:
    """Show a run while it goes on; yields what to call after every step.

    Drawn between steps by the caller's thread, never beside one: a second thread would slow down
    what is measured. Where the console is no terminal, only the end is printed.
    """
    with Live(console=console, auto_refresh=False) as live:

        def show(run: Run) -> None:
            live.update(run_view(run), refresh=console.is_terminal)

        yield show


def run_view(run: Run) -> Group:
    """Return a run as two tables."""
    return Group(Text(TITLES[run.policy], style="bold"), steps_table(run), gaps_table(run), "")


def run_line(run: Run) -> str:
    """Return a finished run as one line."""
    ttft = "-" if run.first_token is None else f"{run.first_token * 1e3:.0f}"
    return (
        f"{run.policy}: worst gap {run.worst_gap * 1e3:.1f} ms, TTFT {ttft} ms, "
        f"total {run.total * 1e3:.0f} ms"
    )


def steps_table(run: Run) -> Table:
    """Return the steps since the arrival; decode steps in a row share a line."""
    drafts = ("drafts ok",) if any(step.record.new_drafts for step in run.steps) else ()
    columns = "kind", "cell", "useful rows", "pad rows", *drafts, "waste", "ms", "worst gap ms"
    table = _table("step", *columns)
    number = 1
    for kind, steps in _lines(run.steps):
        last = number + len(steps) - 1
        label = f"{number}" if number == last else f"{number}-{last}"
        rows = [step.useful_rows for step in steps], [step.pad_rows for step in steps]
        table.add_row(
            label,
            kind,
            str(tuple(steps[0].record.cell or ())),
            _range(rows[0]),
            _range(rows[1]),
            *(_drafts(steps) for _ in drafts),
            f"{sum(rows[1]) / (sum(rows[0]) + sum(rows[1])):.0%}",
            f"{statistics.median(step.record.wall_time for step in steps) * 1e3:.1f}",
            _worst_gap(steps),
            style=KIND_STYLES[kind],
        )
        number = last + 1
    return table


def gaps_table(run: Run) -> Table:
    """Return what each decoding request saw: a line per request, a bar for its longest wait."""
    table = _table("request", "gaps", "median gap ms", "worst gap ms", "")
    table.columns[-1].justify = "left"
    gaps = {name: run.gaps(name) for name in run.requests}
    # A request that got nothing yet has been waiting since the arrival.
    worst = {name: max(waits, default=run.total) for name, waits in gaps.items()}
    scale = max(run.total, *worst.values())
    for name, waits in gaps.items():
        bar = "█" * max(1, round(BAR_WIDTH * worst[name] / scale)) if scale else ""
        median = f"{statistics.median(waits) * 1e3:.1f}" if waits else "-"
        table.add_row(name, str(len(waits)), median, f"{worst[name] * 1e3:.1f}", bar)
    if run.first_token is not None:
        ttft = f"first token after {run.first_token * 1e3:.0f} ms"
        table.add_row("new", "", "", "", ttft)
    return table


def summary(runs: Sequence[Run]) -> Group:
    """Return the policies side by side, and whether they generated the same."""
    table = _table("", "worst gap ms", "median gap ms", "TTFT ms", "total ms", "steps", "waste")
    figures = figures_of(runs)
    for policy, one in figures.items():
        table.add_row(
            policy.replace("_", " "),
            f"{one.worst_gap_ms:.1f}",
            f"{one.median_gap_ms:.1f}",
            f"{one.ttft_ms:.0f}",
            f"{one.total_ms:.0f}",
            f"{one.num_steps:g}",
            f"{one.waste:.0%}",
        )
    before, turns, mixed = (figures[name] for name in ("prefill_first", "alternate", "mixed"))
    ratios = (
        f"mixed / prefill first: worst gap {mixed.worst_gap_ms / before.worst_gap_ms:.2f}, "
        f"TTFT {mixed.ttft_ms / before.ttft_ms:.2f}\n"
        f"mixed / alternate: total {mixed.total_ms / turns.total_ms:.2f}"
    )
    return Group(table, ratios, _agreement(runs))


def _table(label: str, *columns: str) -> Table:
    """Return an empty table, figures to the right."""
    table = Table(label, box=None, pad_edge=False)
    for column in columns:
        words = column in ("kind", "cell")
        # Headers of several words may break; a cell's three figures must not.
        table.add_column(column, justify="left" if words else "right", no_wrap=words)
    return table


def _lines(steps: Sequence[Step]) -> Iterator[tuple[str, list[Step]]]:
    """Group decode steps that follow each other in one cell; others stand alone."""
    keys = (
        (step.record.kind, step.record.cell, None if step.record.kind == "decode" else number)
        for number, step in enumerate(steps)
    )
    for (kind, _, _), pairs in itertools.groupby(
        zip(keys, steps, strict=True), key=lambda pair: pair[0]
    ):
        yield kind, [step for _, step in pairs]


def _drafts(steps: Sequence[Step]) -> str:
    """Return how many drafts were right, of those that the steps verified."""
    verified = sum(step.record.draft_tokens for step in steps)
    return f"{sum(step.record.accepted_tokens for step in steps)}/{verified}" if verified else "-"


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}-{high}"


def _worst_gap(steps: Sequence[Step]) -> str:
    if steps[0].record.kind == "prefill":
        return "waiting"
    gaps = [gap for step in steps for gap in step.gaps.values()]
    return f"{max(gaps) * 1e3:.1f}" if gaps else "-"


def _agreement(runs: Sequence[Run]) -> str:
    found = differences(runs)
    if not found:
        return "tokens: identical in all runs"
    first = found[0]
    return (
        f"tokens: {len(found)} of {(len(runs) - 1) * len(runs[0].tokens)} sequences leave those of "
        f"the first run ({first.request} under {first.policy} at token {first.position}): programs "
        "of different shapes round differently, and a near-tie falls the other way"
    )
