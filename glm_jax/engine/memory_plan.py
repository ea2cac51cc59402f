"""How many cache pages fit beside the weights and the hungriest program; host-only arithmetic."""

from collections.abc import Mapping
from typing import NamedTuple

from bucketing.program_key import ProgramKey

_MIB = 1 << 20
# A pool that holds no page besides the reserved page 0 serves nobody.
_LEAST_PAGES = 2


class MemoryNeed(NamedTuple):
    """What an engine takes besides its pages, in bytes.

    Attributes:
        weights: All parameters.
        state: Slots and what else stays on the device.
        temporaries: Scratch memory of each program, by the compiler's account; one runs at a time.
        page: One page of the pool, all layers.
    """

    weights: int
    state: int
    temporaries: Mapping[ProgramKey, int]
    page: int

    @property
    def hungriest(self) -> tuple[ProgramKey | None, int]:
        """The program with the largest temporaries, and those."""
        if not self.temporaries:
            return None, 0
        key = max(self.temporaries, key=lambda key: self.temporaries[key])
        return key, self.temporaries[key]


class DoesNotFitError(ValueError):
    """The engine cannot run in the memory there is."""


def memory_budget(total_bytes: int, utilization: float) -> int:
    """The bytes an engine may use: a share of the device's memory.

    Args:
        total_bytes: what the device offers (``memory_stats()["bytes_limit"]``), or the RAM that is
            available on CPU.
        utilization: ``gpu_memory_utilization``.
    """
    return int(total_bytes * utilization)


def plan_pages(need: MemoryNeed, *, budget: int, wanted: int, least: int) -> int:
    """How many pages the pool gets: ``wanted``, or as many as fit.

    Args:
        need: what the rest takes.
        budget: bytes the engine may use.
        wanted: pages the options ask for, page 0 included.
        least: pages it must have, page 0 included: those of one longest request.

    Raises:
        DoesNotFitError: not even ``least`` fit; it says which cell is too large, and by how much.
    """
    key, temporaries = need.hungriest
    free = budget - need.weights - need.state - temporaries
    pages = min(wanted, max(0, free) // need.page)
    least = max(least, _LEAST_PAGES)
    if pages >= least:
        return pages
    raise DoesNotFitError(_explain(need, key, least, least * need.page - free, budget))


def check_pages(need: MemoryNeed, *, budget: int, pages: int) -> None:
    """Refuse a pool whose size is fixed and that does not fit beside the rest.

    Raises:
        DoesNotFitError: it says which cell is too large, and by how much.
    """
    key, temporaries = need.hungriest
    missing = pages * need.page + need.weights + need.state + temporaries - budget
    if missing > 0:
        raise DoesNotFitError(_explain(need, key, pages, missing, budget))


def _explain(
    need: MemoryNeed, key: ProgramKey | None, pages: int, missing: int, budget: int
) -> str:
    """The sum that does not work out, and what to change."""
    temporaries = need.hungriest[1]
    culprit = f"{tuple(key)} " if key is not None else ""
    return (
        f"cell {culprit}does not fit by {_mib(missing)}: weights {_mib(need.weights)} + slots "
        f"{_mib(need.state)} + {pages} pages {_mib(pages * need.page)} + temporaries of the cell "
        f"{_mib(temporaries)} are more than the budget of {_mib(budget)}. Lower num_pages, "
        "max_model_len, max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization."
    )


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"
