"""Progress on the error stream while weights load and programs compile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from bucketing.programs import CompileReport


@contextmanager
def loading_bar(name: str) -> Iterator[Callable[[int, int, str], None]]:
    """Bytes of a checkpoint; yields the loader's progress callback."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=None)

        def advance(done: int, total: int, tensor: str) -> None:
            bar.update(task, completed=done, total=total, description=f"loading {tensor}")

        yield advance


@contextmanager
def compiling_bar(cells: int) -> Iterator[Callable[[CompileReport], None]]:
    """Programs of a grid; yields the compile callback."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} programs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=cells)

        def advance(report: CompileReport) -> None:
            prefill, groups, width = report.cell
            done = f"compiled P={prefill} G={groups} Q={width} in {report.seconds:.1f} s"
            bar.update(task, advance=1, description=done)

        yield advance
