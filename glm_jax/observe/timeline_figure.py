"""The signals of a step log as one picture: four panels over one time axis, mixed steps shaded."""

import io
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Num

from glm_jax.observe.timeline_signals import Signals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PREFILL, _DECODE, _BUSY, _MIXED = "#ee6677", "#4477aa", "#555555", "#ffd98c"
_MODES = {"FULL": "#228833", "PIECEWISE": "#aa3377", "EAGER": "#ccbb44"}
_SHADE = 0.45
# Columns of the counts of modes: some steps in each, but not too narrow to be seen.
_BIN_STEPS, _MOST_BINS = 5, 80


def picture(signals: Signals, title: str = "") -> bytes:
    """Return the signals as a PNG.

    Args:
        signals: Of a log.
        title: Of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # An optional dependency.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 8.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(4, 1, sharex=True, height_ratios=(1.2, 1.5, 0.8, 0.8))
    for panel, fill in zip(panels, (_rows, _waits, _busy, _modes), strict=True):
        for left, right in mixed_spans(signals):
            panel.axvspan(left, right, color=_MIXED, alpha=_SHADE, linewidth=0, zorder=0)
        fill(panel, signals)
        panel.grid(axis="y", alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        handles, _ = panel.get_legend_handles_labels()
        if panel is panels[0]:
            label = f"mixed steps: {int(signals.mixed.sum())}"
            handles.append(Patch(color=_MIXED, alpha=_SHADE, linewidth=0, label=label))
        panel.legend(
            handles=handles,
            fontsize=8,
            ncols=4,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            frameon=False,
            borderaxespad=0.2,
        )
    panels[-1].set_xlabel("seconds")
    panels[-1].set_xlim(0, float(signals.ends[-1]))
    figure.suptitle(title, fontsize=11)
    figure.align_ylabels(panels)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


def mixed_spans(signals: Signals) -> Iterator[tuple[float, float]]:
    """Yield when mixed steps ran, in seconds; steps that follow each other are one span."""
    for mixed, steps in groupby(range(len(signals.mixed)), lambda step: bool(signals.mixed[step])):
        if mixed:
            places = list(steps)
            yield float(signals.starts[places[0]]), float(signals.ends[places[-1]])


def _rows(panel: "Axes", signals: Signals) -> None:
    times, decode = _stairs(signals, signals.decode)
    _, both = _stairs(signals, signals.decode + signals.prefill)
    panel.fill_between(
        times, decode, both, color=_PREFILL, linewidth=0, label=_total("prefill", signals.prefill)
    )
    panel.fill_between(
        times, 0, decode, color=_DECODE, linewidth=0, label=_total("decode", signals.decode)
    )
    panel.set_ylim(bottom=0)
    _head(panel, "Rows of each step: tokens computed, of both kinds", "rows")


def _waits(panel: "Axes", signals: Signals) -> None:
    # An optional dependency.
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    requests = {wait.request_id: [] for wait in signals.waits}
    for wait in signals.waits:
        requests[wait.request_id].append((wait.time, wait.seconds * 1e3))
    for points in requests.values():
        panel.plot(*zip(*points, strict=True), color="#999999", linewidth=0.5, alpha=0.5, zorder=1)
    for beside, colour, label in (
        (False, _DECODE, "no prompt rows meanwhile"),
        (True, _PREFILL, "prompt rows meanwhile"),
    ):
        chosen = [wait for wait in signals.waits if (wait.prefill_rows > 0) is beside]
        times = [wait.time for wait in chosen]
        panel.scatter(
            times,
            [wait.seconds * 1e3 for wait in chosen],
            s=7,
            color=colour,
            linewidth=0,
            zorder=2,
            label=f"{label}: {len(chosen)}",
        )
    if signals.waits:
        panel.set_yscale("log")
        milliseconds = [wait.seconds * 1e3 for wait in signals.waits]
        # Wide enough for two of the ticks.
        panel.set_ylim(min(milliseconds) / 1.6, max(milliseconds) * 1.6)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    _head(panel, "Time between tokens, a line per request", "ms")


def _busy(panel: "Axes", signals: Signals) -> None:
    panel.stairs(
        signals.busy * 100,
        [0.0, *signals.ends],
        color=_BUSY,
        fill=True,
        alpha=0.6,
        label=f"over all: {signals.busy_share:.0%}",
    )
    panel.set_ylim(0, 105)
    _head(panel, "Device busy, from the dispatch until the outputs are there", "%")


def _modes(panel: "Axes", signals: Signals) -> None:
    # An optional dependency.
    from matplotlib.ticker import MaxNLocator

    bins = max(1, min(_MOST_BINS, len(signals.modes) // _BIN_STEPS))
    edges = np.linspace(0.0, float(signals.ends[-1]), bins + 1)
    below = np.zeros(bins)
    for mode, count in signals.steps_by_mode().items():
        times = [end for end, one in zip(signals.ends, signals.modes, strict=True) if one == mode]
        counts, _ = np.histogram(times, edges)
        panel.bar(
            edges[:-1],
            counts,
            np.diff(edges) * 0.9,
            bottom=below,
            align="edge",
            color=_MODES[mode],
            label=f"{mode}: {count}",
        )
        below += counts
    panel.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    _head(panel, f"Steps by mode, per {edges[1]:.3g} s", "steps")


def _stairs(
    signals: Signals, values: Num[np.ndarray, " steps"]
) -> tuple[Float[np.ndarray, " corners"], Num[np.ndarray, " corners"]]:
    """Return the corners of a curve that is zero between steps."""
    times = np.column_stack([signals.starts, signals.starts, signals.ends, signals.ends])
    zeros = np.zeros_like(values)
    return times.ravel(), np.column_stack([zeros, values, values, zeros]).ravel()


def _head(panel: "Axes", title: str, unit: str) -> None:
    panel.set_title(title, fontsize=9.5, loc="left")
    panel.set_ylabel(unit, fontsize=9)
    panel.tick_params(labelsize=8)


def _total(name: str, values: Num[np.ndarray, " steps"]) -> str:
    return f"{name}: {int(values.sum())}"
