"""The memory of a device, and the page pool that fits into it beside weights and programs."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from bucketing.cell import Cell
from bucketing.hot_cells import hot_cells
from bucketing.program_key import ProgramKey
from bucketing.programs import CompileReport, compile_program
from glm_jax.compilation_cache import open_store
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.memory_plan import MemoryNeed, check_pages, memory_budget, plan_pages
from glm_jax.model.config import GlmConfig

_MEMINFO = Path("/proc/meminfo")


def engine_budget(device: jax.Device, utilization: float | int) -> int:
    """The bytes an engine may use, asked before anything is loaded.

    Args:
        device: on CPU, its memory is the RAM that is available now.
        utilization: the share of it (``gpu_memory_utilization``).
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    return memory_budget(total_memory(stats), float(utilization))


def total_memory(stats: Mapping[str, int] | None) -> int:
    """Bytes a device offers, by its own statistics; without any it shares the host's RAM."""
    return stats["bytes_limit"] if stats else available_ram()


def available_ram(meminfo: Path = _MEMINFO) -> int:
    """Bytes of RAM that a process can get without swapping.

    Counts what the kernel can drop at once (Linux); elsewhere all physical memory.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError(f"{meminfo} does not say MemAvailable; give num_pages.")


def fit_pool(
    model: GlmConfig, engine: EngineConfig, device: jax.Device, budget: int
) -> EngineConfig:
    """Choose num_pages: as many as requests can need, or as fit into the budget.

    Temporaries do not depend on the pool's size, so the compiler is asked with the smallest pool,
    for the cells that can be the hungriest; its answers are remembered with the programs.

    Raises:
        DoesNotFitError: not even one longest request fits.
    """
    least = engine.pages_per_seq + 1
    lowering = Lowering(model, dataclasses.replace(engine, num_pages=least))
    store = open_store(lowering, device)
    temporaries: dict[ProgramKey, int] = {}
    for cell in _hungry_cells(engine):
        report = store.report(cell) if store is not None else None
        if report is None:
            program, report = compile_program(lowering.lower, cell)
            if store is not None:
                store.save(cell, program, report)
        temporaries[cell] = report.temporary_bytes
    pages = plan_pages(
        memory_need(lowering, temporaries), budget=budget, wanted=engine.pool_pages, least=least
    )
    return dataclasses.replace(engine, num_pages=pages)


def check_pool(lowering: Lowering, reports: Mapping[Any, CompileReport], budget: int) -> None:
    """Refuse a pool that does not fit beside the programs compiled so far.

    Raises:
        DoesNotFitError: it says which cell is too large, and by how much.
    """
    temporaries = {key: report.temporary_bytes for key, report in reports.items()}
    need = memory_need(lowering, temporaries)
    check_pages(need, budget=budget, pages=lowering.engine.pool_pages)


def memory_need(lowering: Lowering, temporaries: Mapping[ProgramKey, int]) -> MemoryNeed:
    """What an engine takes besides its pages."""
    return MemoryNeed(
        weights=lowering.weight_bytes,
        state=lowering.slot_bytes,
        temporaries=temporaries,
        page=lowering.page_bytes,
    )


def _hungry_cells(engine: EngineConfig) -> tuple[Cell, ...]:
    """The largest cells of each kind: temporaries grow with the rows of either segment."""
    hot = hot_cells(engine.grid(), 1 + engine.num_drafts)
    return tuple(sorted(hot, key=lambda cell: cell.rows)[-2:])
