"""``glm-jax grid warm``: compiles every program of an engine into the store, without weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from bucketing.program_key import ProgramKey
from bucketing.programs import CompileReport, ProgramTable
from glm_jax.compilation_cache import compile_service
from glm_jax.device_memory import engine_budget, fit_pool
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.warm_order import warm_order
from glm_jax.engine_options import resolve_options
from glm_jax.model_files import find_model
from glm_jax.progress import compiling_bar, program_name


def run(
    model: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    console: Console | None = None,
) -> dict[ProgramKey, CompileReport]:
    """Fill the store with all that ``LLM`` with the same options may need, and print a table.

    Args:
        model: as for ``LLM``; only its config is read.
        options: fields of ``EngineConfig``, the same as those of the later start.
        console: where the table goes; by default the standard output.

    Returns:
        The report of every program.

    Raises:
        ValueError: an option is wrong, or there is no folder to keep programs in.
    """
    found = find_model(model)
    device = jax.devices()[0]
    served, engine = resolve_options(
        found.config, options or {}, device.platform, fp8_checkpoint=found.fp8
    )
    if engine.num_pages is None:
        budget = engine_budget(device, engine.gpu_memory_utilization)
        engine = fit_pool(served, engine, device, budget)
    programs = ProgramTable()
    service = compile_service(Lowering(served, engine), programs)
    if not service.store.lasting:
        raise ValueError(
            "compiled programs are not kept, so there is nothing to warm: JAX's compilation cache "
            "is switched off or its folder cannot be used. Set JAX_ENABLE_COMPILATION_CACHE=true, "
            "and JAX_COMPILATION_CACHE_DIR to a folder of your own."
        )
    order = warm_order(served, engine)
    keys = (*order.now, *order.later)
    with compiling_bar(len(keys)) as progress:
        service.warm(keys, progress)
    service.close()
    reports = {key: programs.reports[key] for key in keys}
    (console or Console()).print(_table(found.name, service.store.folder, reports))
    return reports


def _table(name: str, folder: Path, reports: Mapping[ProgramKey, CompileReport]) -> Table:
    """One line per program, with the sums below."""
    listed = list(reports.values())
    compiled = [report for report in listed if report.source == "compiled"]
    table = Table(
        title=f"Programs of {name}",
        caption=f"{len(compiled)} compiled, {len(listed) - len(compiled)} loaded; in {folder}",
        show_footer=True,
    )
    table.add_column("program", footer=f"{len(listed)} programs")
    table.add_column("seconds", f"{sum(r.seconds for r in listed):.1f}", justify="right")
    largest = max((report.temporary_bytes for report in listed), default=0)
    table.add_column("temporaries", f"{largest / 1e6:.1f} MB at most", justify="right")
    total = sum(report.stored_bytes for report in listed)
    table.add_column("size", f"{total / 1e6:.1f} MB", justify="right")
    table.add_column("source")
    for report in listed:
        table.add_row(
            program_name(report.key),
            f"{report.seconds:.2f}",
            f"{report.temporary_bytes / 1e6:.1f} MB",
            f"{report.stored_bytes / 1e6:.2f} MB",
            report.problem or report.source,
        )
    return table
