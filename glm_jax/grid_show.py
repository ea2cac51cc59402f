"""``glm-jax grid show``: use, padding and compile time of every cell, as a heat map."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bucketing.cell import Cell
from bucketing.grid import Grid
from bucketing.programs import ProgramTable
from glm_jax.compilation_cache import compile_service
from glm_jax.engine.lowering import Lowering
from glm_jax.engine_options import resolve_options
from glm_jax.measurements import Measurements
from glm_jax.model_files import find_model


class CellView(NamedTuple):
    """What is known of a cell.

    Attributes:
        steps: Steps it was used for.
        share: Of all steps.
        waste: Pad rows as a fraction of its rows; None if it was never used.
        step_ms: Measured fixed time of a step; None if it was never measured.
        compile_seconds: None if no program is stored.
    """

    steps: int
    share: float
    waste: float | None
    step_ms: float | None
    compile_seconds: float | None


class GridView(NamedTuple):
    """A grid and what is known of its cells."""

    grid: Grid
    cells: Mapping[Cell, CellView]


# What a map shows: its title, the value of a cell, and how a value is written.
Map = tuple[str, Callable[[CellView], float | None], Callable[[float], str]]
MAPS: tuple[Map, ...] = (
    ("share of steps", lambda view: view.share if view.steps else None, "{:.0%}".format),
    ("pad rows", lambda view: view.waste, "{:.0%}".format),
    ("ms per step", lambda view: view.step_ms, "{:.1f}".format),
    ("seconds to compile", lambda view: view.compile_seconds, "{:.1f}".format),
)


def run(
    model: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    png: Path | None = None,
    console: Console | None = None,
) -> GridView:
    """Print the heat maps of an engine's grid.

    Args:
        model: as for ``LLM``; only its config is read.
        options: fields of ``EngineConfig``, the same as those of the runs to show.
        png: also draw them here; needs matplotlib (the extra ``dev`` has it).
        console: where they go; by default the standard output.
    """
    view = view_grid(model, options or {})
    console = console or Console()
    used = sum(cell.steps for cell in view.cells.values())
    console.print(f"{len(view.cells)} cells, {used} steps measured so far")
    for title, value, write in MAPS:
        for width in view.grid.widths:
            console.print(f"\n{title}, Q = {width}", style="bold", highlight=False)
            console.print(_table(view, width, value, write))
    if png is not None:
        draw(view, png)
        console.print(f"drawn: {png}")
    return view


def view_grid(model: str | Path | None, options: Mapping[str, Any]) -> GridView:
    """Collect what the stored programs and earlier runs tell."""
    found = find_model(model)
    served, engine = resolve_options(
        found.config, options, jax.devices()[0].platform, fp8_checkpoint=found.fp8
    )
    service = compile_service(Lowering(served, engine), ProgramTable())
    store = service.store
    measured = Measurements(store)
    grid = engine.grid()
    total = max(measured.use.steps, 1)
    cells = {}
    for cell in grid.cells():
        report, figures = store.report(cell), measured.step_time.figures(cell)
        steps = measured.use[cell].steps
        cells[cell] = CellView(
            steps=steps,
            share=steps / total,
            waste=measured.use.waste(cell) if steps else None,
            step_ms=None if figures is None else figures.fixed * 1e3,
            compile_seconds=None if report is None else report.compile_seconds,
        )
    service.close()
    return GridView(grid, cells)


def _table(
    view: GridView,
    width: int,
    value: Callable[[CellView], float | None],
    write: Callable[[float], str],
) -> Table:
    """One heat map: prefill rows down, groups across; darker is less."""
    columns, rows, values = _values(view, width, value)
    table = Table("P \\ G", *map(str, columns), box=None)
    high = max((one for one in values.ravel() if np.isfinite(one)), default=0.0)
    for prefill, line in zip(rows, values, strict=True):
        table.add_row(str(prefill), *(_shaded(one, high, write) for one in line))
    return table


def _values(
    view: GridView, width: int, value: Callable[[CellView], float | None]
) -> tuple[list[int], list[int], np.ndarray]:
    """Groups, prefill rows, and the value of each cell; NaN where there is none."""
    # Cells without groups exist once; they stand in the first map.
    first = width == view.grid.widths[0]
    chosen = {
        cell: one
        for cell, one in view.cells.items()
        if cell.width == width and (cell.groups or first)
    }
    columns = sorted({cell.groups for cell in chosen})
    rows = sorted({cell.prefill for cell in chosen})
    values = np.full((len(rows), len(columns)), np.nan)
    for cell, one in chosen.items():
        known = value(one)
        if known is not None:
            values[rows.index(cell.prefill), columns.index(cell.groups)] = known
    return columns, rows, values


def _shaded(value: float, high: float, write: Callable[[float], str]) -> Text:
    if not np.isfinite(value):
        return Text("-", style="dim", justify="right")
    warmth = 0.0 if high == 0 else value / high
    shade = 30 + round(150 * warmth)
    style = f"rgb(255,255,255) on rgb({shade},{60 + round(60 * (1 - warmth))},60)"
    return Text(f" {write(value)} ", style=style, justify="right")


def draw(view: GridView, path: Path) -> None:
    """Draw all maps into one picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # An optional dependency.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    widths = view.grid.widths
    figure = Figure(figsize=(4.2 * len(widths), 3.1 * len(MAPS)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(MAPS), len(widths), squeeze=False)
    for line, (title, value, write) in zip(axes, MAPS, strict=True):
        for axis, width in zip(line, widths, strict=True):
            columns, rows, values = _values(view, width, value)
            axis.imshow(values, aspect="auto", cmap="YlOrRd", vmin=0)
            axis.set_title(f"{title}, Q = {width}", fontsize=9)
            axis.set_xticks(range(len(columns)), columns)
            axis.set_yticks(range(len(rows)), rows)
            axis.set_xlabel("decode groups")
            axis.set_ylabel("prefill rows")
            for (row, column), one in np.ndenumerate(values):
                text = write(one) if np.isfinite(one) else "-"
                axis.text(column, row, text, ha="center", va="center", fontsize=8)
    figure.savefig(path, dpi=120)
