"""The signals of a step log as one HTML page that needs nothing else: the picture and its sums."""

import base64
from collections.abc import Iterable, Sequence
from html import escape

from glm_jax.observe.timeline_figure import picture
from glm_jax.observe.timeline_signals import Signals
from glm_jax.observe.timeline_table import sums_by_kind, sums_of_waits, title_of

_STYLE = """
body { font: 14px/1.5 sans-serif; max-width: 1120px; margin: 1.5em auto; padding: 0 1em; }
img { width: 100%; }
table { border-collapse: collapse; margin: 0 0 1.2em; }
th, td { padding: .15em .9em .15em 0; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
"""


def page(signals: Signals, *, device: str = "") -> str:
    """Return the page as HTML.

    Args:
        signals: Of a log.
        device: Kind of device.

    Raises:
        ImportError: matplotlib is not installed.
    """
    title = title_of(signals, device)
    encoded = base64.b64encode(picture(signals)).decode()
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<img alt="rows, times between tokens, device and modes over time" '
        f'src="data:image/png;base64,{encoded}">\n'
        f"{_kinds(signals)}{_waits(signals)}{_modes(signals)}</body></html>\n"
    )


def _kinds(signals: Signals) -> str:
    heads = "steps", "count", "prefill rows", "decode rows", "pads", "median ms", "p99 ms"
    rows = (
        (
            one.kind,
            one.steps,
            one.prefill_rows,
            one.decode_rows,
            f"{one.pad_share:.1%}",
            f"{one.median_ms:.2f}",
            f"{one.p99_ms:.2f}",
        )
        for one in sums_by_kind(signals)
    )
    return _table(heads, rows)


def _waits(signals: Signals) -> str:
    heads = "time between tokens", "count", "median ms", "p99 ms", "longest ms"
    rows = (
        (sort, count, f"{median:.2f}", f"{p99:.2f}", f"{longest:.2f}")
        for sort, count, median, p99, longest in sums_of_waits(signals.waits)
    )
    return _table(heads, rows)


def _modes(signals: Signals) -> str:
    return _table(("mode", "steps"), signals.steps_by_mode().items())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str | int]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    lines = (
        "<tr>" + "".join(f"<td>{escape(str(one))}</td>" for one in row) + "</tr>" for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n" + "\n".join(lines) + "\n</table>\n"
