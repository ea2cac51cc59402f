"""The picture of a measurement: steps above, their operators below; decode left, prefill right."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.context.rounds import Figures
from scripts.context.steps import WORKS, Work

_COLOURS = {"sparse": "tab:blue", "dense": "tab:red", "both": "tab:green"}
_NAMES = {
    ("step", "sparse"): "sparse",
    ("step", "dense"): "dense, masked",
    ("indexer", "both"): "indexer (both forms)",
    ("attention", "sparse"): "attention, sparse",
    ("attention", "dense"): "attention, dense masked",
}
_FEW, _MANY, _PREFILL = WORKS


def draw(path: Path, rows: Sequence[Figures], title: str) -> None:
    """Draw milliseconds per token against the context; bars from the 10th to the 90th percentile.

    Args:
        path: the picture, a PNG.
        rows: all figures of a measurement.
        title: of the whole.
    """
    figure = Figure(figsize=(10, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    (steps, chunk), (decode_parts, prefill_parts) = figure.subplots(2, 2)
    steps.set_title("decode step, per token", fontsize=10)
    for work, style in ((_FEW, "--"), (_MANY, "-")):
        requests = f"{work.tokens} request{'s' if work.tokens > 1 else ''}"
        _draw_parts(steps, rows, work, ("step",), linestyle=style, suffix=f", {requests}")
    chunk.set_title(f"chunk of {_PREFILL.tokens} prompt rows, per token", fontsize=10)
    _draw_parts(chunk, rows, _PREFILL, ("step",))
    for axes, work in ((decode_parts, _MANY), (prefill_parts, _PREFILL)):
        axes.set_title(f"the operators in it, all layers ({work.name})", fontsize=10)
        _draw_parts(axes, rows, work, ("indexer", "attention"))
    contexts = sorted({row.context for row in rows})
    for axes in (steps, chunk, decode_parts, prefill_parts):
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context / 1024:g}K" for context in contexts])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("ms per token")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _draw_parts(
    axes: Axes,
    rows: Sequence[Figures],
    work: Work,
    parts: Sequence[str],
    *,
    suffix: str = "",
    **style: Any,
) -> None:
    """One line for each part and form of a work."""
    for (part, form), name in _NAMES.items():
        if part not in parts:
            continue
        line = sorted(
            (row for row in rows if (row.work, row.part, row.form) == (work.name, part, form)),
            key=lambda row: row.context,
        )
        below = [row.ms_per_token - row.p10 for row in line]
        above = [row.p90 - row.ms_per_token for row in line]
        axes.errorbar(
            [row.context for row in line],
            [row.ms_per_token for row in line],
            yerr=(below, above),
            label=name + suffix,
            color=_COLOURS[form],
            marker="o",
            markersize=3,
            capsize=2,
            linewidth=1.4,
            **style,
        )
