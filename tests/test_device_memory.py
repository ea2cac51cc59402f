"""The memory there is, and the pool that fits into it."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from glm_jax import device_memory
from glm_jax.device_memory import (
    available_ram,
    check_pool,
    engine_budget,
    fit_pool,
    total_memory,
)
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.memory_plan import DoesNotFitError


@pytest.fixture
def stored(tiny_llm, monkeypatch):
    """A store that remembers what the compiler said of the smallest pool's programs."""
    config = tiny_llm.config
    store = SimpleNamespace(report=tiny_llm.runner.programs.reports.get)
    monkeypatch.setattr(device_memory, "open_store", lambda *_: store)
    least = dataclasses.replace(config, num_pages=config.pages_per_seq + 1)
    return Lowering(tiny_llm.model_config, least)


def other_bytes(lowering, reports):
    scratch = max(reports[cell].temporary_bytes for cell in lowering.engine.grid().cells())
    return lowering.weight_bytes + lowering.slot_bytes + scratch


def test_available_ram_reads_what_linux_says(tmp_path):
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:  9 kB\nMemAvailable:    1234 kB\n")
    assert available_ram(file) == 1234 * 1024
    assert available_ram(tmp_path / "absent") > 1 << 20
    file.write_text("MemTotal: 9 kB\n")
    with pytest.raises(OSError, match="num_pages"):
        available_ram(file)


def test_budget_is_a_share_of_the_devices_limit():
    assert total_memory({"bytes_limit": 1000}) == 1000
    assert 0 < engine_budget(jax.devices()[0], 0.01) < total_memory(None)


def test_pool_takes_what_the_hungriest_program_leaves(stored, tiny_llm):
    free = tiny_llm.config.max_num_seqs * tiny_llm.config.pages_per_seq
    budget = other_bytes(stored, tiny_llm.runner.programs.reports) + 20 * stored.page_bytes
    asked = dataclasses.replace(tiny_llm.config, num_pages=None)
    fitted = fit_pool(tiny_llm.model_config, asked, jax.devices()[0], budget)
    assert fitted.num_pages == 20
    roomy = fit_pool(tiny_llm.model_config, asked, jax.devices()[0], budget * 100)
    assert roomy.num_pages == free + 1


def test_pool_that_cannot_hold_one_request_is_refused(stored, tiny_llm):
    budget = other_bytes(stored, tiny_llm.runner.programs.reports) + 16 * stored.page_bytes
    asked = dataclasses.replace(tiny_llm.config, num_pages=None)
    with pytest.raises(DoesNotFitError, match=r"cell \(64, 4, [16]\) does not fit by 0\.0 MiB.*17"):
        fit_pool(tiny_llm.model_config, asked, jax.devices()[0], budget)


def test_fixed_pool_is_checked_against_the_compiled_programs(tiny_llm):
    lowering = Lowering(tiny_llm.model_config, tiny_llm.config)
    reports = tiny_llm.runner.programs.reports
    pool = lowering.page_bytes * tiny_llm.config.pool_pages
    enough = other_bytes(lowering, reports) + pool
    check_pool(lowering, reports, enough)
    with pytest.raises(DoesNotFitError, match=r"cell \(64, 4, [16]\) does not fit by 1\.0 MiB"):
        check_pool(lowering, reports, enough - (1 << 20))
