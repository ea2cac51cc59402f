"""Filling the cache offline: everything is stored, the second time everything is loaded."""

import io

import jax
import pytest
from rich.console import Console

from bucketing.cell import Cell
from bucketing.program_store import ProgramStore, ProgramStoreWarning
from glm_jax import compilation_cache, grid_warm
from glm_jax.compilation_cache import open_store, program_folder
from glm_jax.engine.lowering import Lowering
from glm_jax.progress import describe, remaining_seconds

# One cell, of one row: the smallest there is.
OPTIONS = {
    "page_size": 8,
    "max_model_len": 16,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "prefill_buckets": (1,),
    "grid_cells": ((1, 1, 1),),
    "decode_widths": (1,),
}


def test_warm_fills_the_cache_and_prints_what_it_did(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "program_folder", lambda: tmp_path / "programs")
    outputs, sources = [], []
    for _ in range(2):
        printed = io.StringIO()
        reports = grid_warm.run("tiny-random", OPTIONS, console=Console(file=printed, width=120))
        outputs.append(printed.getvalue())
        sources.append({report.source for report in reports.values()})
    assert sources == [{"compiled"}, {"loaded"}]
    assert "3 compiled, 0 loaded" in outputs[0]
    assert "0 compiled, 3 loaded" in outputs[1]
    assert "P=1 G=1 Q=1" in outputs[1]
    assert reports[Cell(1, 1, 1)].stored_bytes > 0


def test_warm_refuses_where_nothing_is_kept():
    # The tests' own switch: JAX's compilation cache is off.
    assert program_folder() is None
    with pytest.raises(ValueError, match="JAX_ENABLE_COMPILATION_CACHE=true"):
        grid_warm.run("tiny-random", OPTIONS)


@pytest.fixture
def jax_settings():
    """Sets JAX's settings for one test; nothing may be compiled meanwhile."""
    before = {}

    def update(name, value):
        before.setdefault(name, jax.config.values[name])
        jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_users_folder_or_inside_jaxs_own(
    jax_settings, monkeypatch, tmp_path
):
    jax_settings("jax_enable_compilation_cache", True)
    jax_settings("jax_compilation_cache_dir", None)
    monkeypatch.setattr(compilation_cache.Path, "home", lambda: tmp_path)
    assert program_folder() == tmp_path / ".cache" / "glm-jax" / "programs"
    jax_settings("jax_compilation_cache_dir", str(tmp_path / "jax"))
    assert program_folder() == tmp_path / "jax" / "glm-jax-programs"


def test_an_unsafe_folder_costs_a_warning_and_the_cache_only(tmp_path, monkeypatch, tiny_llm):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(compilation_cache, "program_folder", lambda: tmp_path)
    lowering = Lowering(tiny_llm.model_config, tiny_llm.config)
    with pytest.warns(ProgramStoreWarning, match="not kept: .* mode 755"):
        assert open_store(lowering, jax.devices()[0]) is None
    tmp_path.chmod(0o700)
    assert isinstance(open_store(lowering, jax.devices()[0]), ProgramStore)


def test_progress_says_what_happened_and_what_is_left(tiny_llm):
    report = tiny_llm.runner.programs.reports[Cell(64, 0, 1)]
    report = report._replace(seconds=9.84, temporary_bytes=23_000_000, stored_bytes=600_000)
    assert describe(report) == "compiled P=64 G=0 Q=1 in 9.8 s (0.6 MB, 23 MB scratch)"
    assert describe(report._replace(problem="disk full")).endswith("not kept: disk full)")
    assert remaining_seconds([10.0, 20.0], 3) == ", about 45 s to go"
    assert remaining_seconds([10.0], 0) == ""
