"""Progress on the error stream while weights load and programs compile."""

from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from bucketing.cell import Cell
from bucketing.programs import CompileReport


@contextmanager
def loading_bar(name: str) -> Generator[Callable[[int, int, str], None]]:
    """Bytes of a checkpoint; yields the loader's progress callback."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}", total=None)

        def advance(done: int, total: int, tensor: str) -> None:
            bar.update(task, completed=done, total=total, description=f"loading {tensor}")

        yield advance


@contextmanager
def compiling_bar(programs: int) -> Generator[Callable[[CompileReport], None]]:
    """Programs that are loaded or compiled; yields the callback for each report.

    Args:
        programs: how many there will be.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} programs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("programs", total=programs)
        seconds: defaultdict[str, list[float]] = defaultdict(list)

        def advance(report: CompileReport) -> None:
            seconds[report.source].append(report.seconds)
            left = programs - sum(map(len, seconds.values()))
            rest = remaining_seconds(seconds[report.source], left)
            bar.update(task, advance=1, description=f"{describe(report)}{rest}")

        yield advance


def describe(report: CompileReport) -> str:
    """What happened to one program: which, how, how long, its size and its scratch memory."""
    size = f"{report.stored_bytes / 1e6:.1f} MB, " if report.stored_bytes else ""
    problem = f", not kept: {report.problem}" if report.problem else ""
    return (
        f"{report.source} {program_name(report.key)} in {report.seconds:.1f} s "
        f"({size}{report.temporary_bytes / 1e6:.0f} MB scratch{problem})"
    )


def program_name(key: object) -> str:
    """A program's key for people."""
    if isinstance(key, Cell):
        return f"P={key.prefill} G={key.groups} Q={key.width}"
    return str(key)


def remaining_seconds(so_far: list[float], left: int) -> str:
    """The estimate of the rest, from the mean so far; nothing to say at the end.

    Loading comes before compiling, so the mean of the latest kind is the one that counts.
    """
    if not so_far or not left:
        return ""
    return f", about {sum(so_far) / len(so_far) * left:.0f} s to go"
