"""The accounts as tables for a reader."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from glm_jax.ledger.accounts import Accounts
from glm_jax.ledger.article import NOTES, Item, article_items
from glm_jax.ledger.ledger import FIRST_PASS, LATER_PASS, Ledger, Sum
from glm_jax.ledger.stage import Demand
from glm_jax.ledger.weights import model_size

# Columns that the widest table needs; a narrower terminal cuts words off.
WIDTH = 128
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_NUMBERS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
# Their stages are those of the layers above, so only the sums are shown.
_MTP = (FIRST_PASS, LATER_PASS)


def print_ledger(console: Console, accounts: Accounts, *, formulas: bool) -> None:
    """Print all accounts; the stages are those of the step that was asked for."""
    step = accounts.step
    console.print(_headline(step), highlight=False)
    console.print(_stages_table(step))
    console.print(_accounts_table(accounts))
    if accounts.bills():
        console.print(_bills_table(accounts))
        console.print(_verdict(accounts), style="bold", highlight=False)
    shapes = {kind: ledger.shape for kind, ledger in accounts.ledgers.items()}
    setting = step.setting
    items = article_items(setting.config, setting.formats, setting.layout, shapes)
    console.print(_article_table(items))
    _print_notes(console, items)
    if formulas:
        console.print(_formulas_table(step, items))


def _print_notes(console: Console, items: Sequence[Item]) -> None:
    console.print("Published wrongly, of 8192 prefill rows and 32 x 6 decode rows:", style="bold")
    for item in items:
        if item.note:
            said = f' ("{item.published}")' if item.published else " (missing)"
            console.print(f"- {item.name}{said}: {item.note}.", highlight=False)
    for note in NOTES:
        console.print(f"- {note}", highlight=False)


def _headline(ledger: Ledger) -> str:
    setting, shape = ledger.setting, ledger.shape
    config, formats = setting.config, setting.formats
    size = model_size(config)
    pads = "" if shape.cell is None else f" in a program of {shape.cell.rows}"
    return (
        f"{size.parameters / 1e9:.1f}e9 parameters ({size.without_mtp / 1e9:.1f}e9 without MTP, "
        f"{size.active / 1e9:.1f}e9 active) on {setting.layout}, {setting.hardware.name}; "
        f"{shape.prefill_rows} prefill rows, {shape.decode_rows} decode rows of "
        f"{len(shape.groups)} requests{pads}; weights {formats.matrices}, cache {formats.cache}: "
        f"{formats.latent_bytes(config)} bytes a latent, {formats.index_bytes(config)} an index "
        f"key, {formats.token_bytes(config, mtp=False):,} a token "
        f"({formats.token_bytes(config, mtp=True):,} with MTP)"
    )


def _stages_table(ledger: Ledger) -> Table:
    table = _table(
        f"{ledger.shape.kind} step, busiest device",
        ("layers", "stage", "who"),
        ("of", "Gop", "MB read", "written", "sent", "bound", "us", "ms"),
    )
    for stage in ledger.stages:
        if stage.part in _MTP:
            continue
        floor, times = ledger.floor(stage), ledger.times[stage.part]
        table.add_row(
            f"{times} {_short_part(stage.part)}",
            stage.name,
            stage.mark,
            f"{_short(stage.count)} {stage.unit}",
            *_demand_cells(stage.demand),
            floor.bound,
            f"{1e6 * floor.seconds:.1f}",
            f"{1e3 * times * floor.seconds:.2f}",
        )
    table.add_section()
    for name, one in ledger.sums.items():
        label = f"{ledger.times[name]} {_short_part(name)}"
        table.add_row(*_sum_cells(label, one))
    table.add_row(*_sum_cells("all", ledger.total), style="bold")
    table.caption = (
        "A stage: in one layer, us; in all, ms. shared: all rows at once. What stays in the chip's "
        "cache (rows, gathered entries) is not in read and written."
    )
    return table


def _short_part(part: str) -> str:
    return part.removesuffix(" layer").removesuffix(" pass")


def _sum_cells(name: str, one: Sum) -> tuple[str, ...]:
    cells = _demand_cells(one.demand)
    return (name, "sum", "", "", *cells, one.floor.bound, "", f"{1e3 * one.seconds:.2f}")


def _demand_cells(demand: Demand) -> tuple[str, ...]:
    """Billions of operations, millions of bytes read, written and sent; nothing for 0."""
    scaled = demand.operations / 1e9, demand.read / 1e6, demand.written / 1e6, demand.sent / 1e6

    def cell(value: float | int) -> str:
        digits = 2 if value < 10 else 1 if value < 1000 else 0
        return f"{value:,.{digits}f}" if value else ""

    return tuple(map(cell, scaled))


def _formulas_table(ledger: Ledger, items: Sequence[Item]) -> Table:
    table = Table("", "stage", "formula", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for stage in ledger.stages:
        table.add_row(stage.part, stage.name, f"{stage.formula} ({stage.precision})")
    for item in items:
        table.add_row("published", item.name, item.formula)
    return table


def _accounts_table(accounts: Accounts) -> Table:
    kinds = list(accounts.ledgers)
    mixed = len(kinds) == 3
    table = _table(
        "the accounts, busiest device", ("",), (*kinds, *(["mixed / decode"] if mixed else []))
    )
    totals = {kind: ledger.total for kind, ledger in accounts.ledgers.items()}

    def add(name: str, values: Mapping[str, float | int], unit: str = "") -> None:
        cells = [_short(value, unit) for value in values.values()]
        if mixed:
            known = values["decode"] > 0
            cells.append(f"{values['mixed'] / values['decode']:.2f}" if known else "")
        table.add_row(name, *cells)

    add("rows, all devices", {kind: one.shape.rows for kind, one in accounts.ledgers.items()})
    for name in ("operations", "elementwise", "read", "written", "sent"):
        unit = "" if name in ("operations", "elementwise") else "bytes"
        add(name, {kind: getattr(one.demand, name) for kind, one in totals.items()}, unit)
    for name in ("memory", "compute", "link"):
        values = {kind: getattr(one.floor, name) for kind, one in totals.items()}
        add(f"{name} alone", values, "seconds")
    add("floor", {kind: one.seconds for kind, one in totals.items()}, "seconds")
    return table


def _bills_table(accounts: Accounts) -> Table:
    table = _table(
        "who pays for the mixed step, ms",
        ("",),
        ("prefill", "decode", "decode share", "a decode request"),
    )
    requests = len(accounts.step.shape.groups)
    for bill in accounts.bills():
        table.add_row(
            bill.rule,
            f"{1e3 * bill.prefill:.2f}",
            f"{1e3 * bill.decode:.2f}",
            f"{bill.decode / (bill.prefill + bill.decode):.1%}",
            f"{1e3 * bill.decode / requests:.3f}",
        )
    return table


def _verdict(accounts: Accounts) -> str:
    decode, mixed = accounts.ledgers["decode"].seconds, accounts.step.seconds
    return (
        f"mixed / (prefill + decode) = {accounts.together:.3f}; a decode waits {1e3 * mixed:.1f} "
        f"instead of {1e3 * decode:.1f} ms for its token, {accounts.stretch:.2f} times as long"
    )


def _article_table(items: Sequence[Item]) -> Table:
    table = _table(
        "the published account, all devices",
        ("",),
        (*items[0].values, "mixed / decode", "published"),
    )
    for item in items:
        ratio = "" if item.ratio is None else f"{item.ratio:.2f}"
        values = (_short(value, item.unit) for value in item.values.values())
        verdict = ("wrong" if item.note else "right") if item.published else "missing"
        table.add_row(item.name, *values, ratio, verdict)
    return table


def _table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption_justify = "left"
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _short(value: float | int, unit: str = "") -> str:
    """A few digits and a prefix; nothing for 0."""
    if value == 0:
        return ""
    if unit == "seconds":
        return f"{1e3 * value:.2f} ms"
    for prefix, size in _BYTES if unit == "bytes" else _NUMBERS:
        if value >= size:
            scaled = value / size
            text = f"{scaled:.4g}" if size == 1 else f"{scaled:.{2 if scaled < 100 else 1}f}"
            return f"{text} {prefix}".rstrip()
    return f"{value:.2g}"
