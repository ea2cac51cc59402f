"""The heat maps: what they say of a grid that was used, and of one that was not."""

import io

import pytest
from rich.console import Console

from bucketing.cell import Cell
from bucketing.grid_use import GridUse
from glm_jax import compilation_cache, grid_show
from glm_jax.measurements import Measurements

OPTIONS = {
    "page_size": 8,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "prefill_buckets": (16,),
    "group_buckets": (1, 2),
    "decode_widths": (1, 3),
    "latent_norm_eps": 1e-6,
}


def show(**options) -> tuple[str, grid_show.GridView]:
    printed = io.StringIO()
    console = Console(file=printed, width=100)
    view = grid_show.run("tiny-random", OPTIONS, console=console, **options)
    return printed.getvalue(), view


def test_an_unused_grid_shows_its_cells():
    text, view = show()
    assert "9 cells, 0 steps" in text
    assert text.count("share of steps") == len(view.grid.widths)
    assert {cell.compile_seconds for cell in view.cells.values()} == {None}


@pytest.fixture
def used(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "program_folder", lambda: tmp_path / "programs")
    stores = []
    make = grid_show.Measurements

    def remember(store):
        stores.append(store)
        return make(store)

    monkeypatch.setattr(grid_show, "Measurements", remember)
    show()
    measured, use = Measurements(stores[0]), GridUse()
    for rows, cell in ((6, Cell(0, 2, 3)), (9, Cell(16, 1, 1)), (6, Cell(0, 2, 3))):
        measured.step_time.observe(cell, 50, 0.0305)
        use.add(cell, rows, 0.0305, piecewise=False)
    measured.save(use)


@pytest.mark.usefixtures("used")
def test_use_padding_and_time_of_a_cell_are_shown():
    text, view = show()
    assert view.cells[Cell(0, 2, 3)].share == pytest.approx(2 / 3)
    assert view.cells[Cell(16, 1, 1)].waste == pytest.approx(1 - 9 / 17)
    for shown in ("3 steps", "67%", "33%", "47%", "30.5"):
        assert shown in text


@pytest.mark.usefixtures("used")
def test_the_maps_can_be_drawn(tmp_path):
    show(png=tmp_path / "grid.png")
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
