"""Prints the report of the benchmark."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.speculation.figures import OWED_SPEED, SHORTFALL

# Columns of the printed tables, wherever they are printed to.
WIDTH = 150


def show(report: Mapping[str, Any]) -> None:
    """Print tables and verdicts."""
    console = Console(width=WIDTH, highlight=False)
    console.print(
        {key: value for key, value in report.items() if not isinstance(value, dict | list)}
    )
    if report["text"] is not None:
        _show_text(console, report["text"])
    for result in report["results"]:
        console.print(_table(result, report["drafter_share"][str(result["batch"])]))
        _show_verdicts(console, result)
    for result in report["results"]:
        _show_host(console, result)


def _show_text(console: Console, text: Mapping[str, Any]) -> None:
    rates = " ".join(f"{rate:.0%} of {n}" for rate, n in _pairs(text))
    console.print(
        f"first drafts behind the files' text, {text['groups']} prompts: accepted of those "
        f"reached, by position: {rates}; length {text['length']:.2f}"
    )


def _pairs(acceptance: Mapping[str, Any]) -> list[tuple[float, int]]:
    return list(zip(acceptance["of_reached"], acceptance["reached"], strict=True))


def _table(result: Mapping[str, Any], shares: Mapping[str, float]) -> Table:
    table = Table(title=f"batch {result['batch']}, temperature {result['temperature']}", box=None)
    table.add_column("drafts")
    for heading in ("decode tok/s", "to none", "to best", "length"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("accepted by position", no_wrap=True)
    for heading in ("step ms", "t(k+1)/t(1)", "drafter", "same", "distinct"):
        table.add_column(heading, justify="right")
    for name, side in result["sides"].items():
        table.add_row(
            name,
            _spread(side["rate"], "{:.0f}"),
            _spread(side["to_none"], "{:.2f}"),
            f"{side['to_best']['median']:.2f}",
            f"{side['length']:.2f}",
            _rates(side["of_all"]),
            f"{side['step_ms']['median']:.1f}" if "step_ms" in side else "",
            f"{side['step_ratio']:.2f}" if "step_ratio" in side else "",
            f"{shares[name]:.0%}" if name in shares else "",
            f"{side['equal']:.0%}",
            f"{side['distinct']:.0f}",
        )
    return table


def _show_verdicts(console: Console, result: Mapping[str, Any]) -> None:
    for name, side in result["sides"].items():
        verdict = side.get("verdict")
        if verdict is not None:
            console.print(
                f"  {name} drafts: length {verdict['length']:.2f}, "
                f"{OWED_SPEED}x is {'owed' if verdict['owed'] else 'not owed'} above "
                f"{verdict['threshold']:.2f} (steps alone give it from {verdict['needed']:.2f}); "
                f"{verdict['speed']:.2f}x: {'met' if verdict['met'] else 'not met'}"
            )
    auto = result["sides"].get("auto")
    if auto is not None:
        behind = 1 - auto["to_best"]["median"]
        verdict = "within" if behind <= SHORTFALL else "more than"
        used = ", ".join(f"{width}: {share:.0%}" for width, share in auto["widths"].items())
        console.print(
            f"  auto is {behind:+.1%} behind {result['best']} drafts, {verdict} {SHORTFALL:.0%}; "
            f"its widths: {used}"
        )


def _show_host(console: Console, result: Mapping[str, Any]) -> None:
    times = ", ".join(
        f"{name}: {side['host_ms']['all']:.2f} ({side['host_ms']['dispatch']:.2f})"
        for name, side in result["sides"].items()
        if "host_ms" in side
    )
    console.print(
        f"host ms per step (of it dispatch) by drafts, batch {result['batch']}, temperature "
        f"{result['temperature']}: {times}"
    )


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def _spread(spread: Mapping[str, float], form: str) -> str:
    middle, low, high = (form.format(spread[key]) for key in ("median", "low", "high"))
    return f"{middle} ({low}-{high})"
