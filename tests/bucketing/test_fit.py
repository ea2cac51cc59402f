from itertools import chain, combinations, product
from random import Random

import numpy as np
import pytest

from bucketing.cell import Cell
from bucketing.chain import Chain, segments
from bucketing.fit import fit_grid, ladder, load_of
from bucketing.fit_problem import Candidates, Problem, Shape
from bucketing.guillotine import fit_guillotine
from bucketing.separable import fit_separable
from bucketing.step_rows import StepRows


class RowsTime:
    """A step costs its rows and a fixed part; groups cost a little more."""

    def predict(self, cell, pairs):
        return 20 + cell.rows + cell.groups / 3

    def useful(self, prefill_rows, decode_rows, groups, pairs):
        return 20 + prefill_rows + decode_rows + groups / 3


def subsets(items):
    items = tuple(items)
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def test_a_ladder_is_fine_first_and_ends_at_its_largest():
    assert ladder(100, 4, 4) == (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 100)
    assert ladder(3, 1, 8) == (1, 2, 3)
    assert ladder(1, 16, 8) == (1,)


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_is_as_good_as_any_choice_of_edges(seed):
    rng = np.random.default_rng(seed)
    weight, cost = rng.integers(0, 4, 6).astype(float), np.sort(rng.random(6))
    spill = np.concatenate([np.cumsum(weight[::-1])[::-1], [0.0]]) * 1.5
    solved = Chain(segments(weight[:, None] * cost[None, :]), spill, 4)

    def price(edges):
        end = edges[-1] + 1 if edges else 0
        served = sum(weight[n] * min(cost[e] for e in edges if e >= n) for n in range(end))
        return served + spill[end]

    for most in range(5):
        best = min(price(edges) for edges in subsets(range(6)) if len(edges) <= most)
        edges = solved.edges(most)
        assert len(edges) <= most
        assert solved.costs[most] == pytest.approx(best)
        assert price(edges) == pytest.approx(best)


def problem(seed, *, widths=(1, 3), cut_share=0.0, shapes=12):
    rng = Random(seed)
    drawn = {}
    for _ in range(shapes):
        rows, groups = rng.choice([0, 0, rng.randint(1, 16)]), rng.randint(0, 4)
        if rows or groups:
            drawn[Shape(rows, groups, rng.choice(widths) if groups else 1)] = float(
                rng.randint(1, 5)
            )
    return drawn, problem_of(drawn, (0, 4, 16), (0, 1, 2, 4), widths, cut_share)


def problem_of(shapes, prefill, groups, widths, cut_share=0.0):
    candidates = Candidates(prefill, groups, widths)
    cost = candidates.price(RowsTime())
    return Problem(candidates, cost, candidates.weigh(shapes), cut_share)


def layout_price(shapes, problem, layout):
    """What traffic costs that uses the smallest bucket that holds it, or the largest cell."""
    buckets = sorted(layout)
    total = 0.0
    for (rows, groups, width), weight in shapes.items():
        bucket = next((b for b in buckets if b >= rows), None)
        cells = [] if bucket is None or (rows == 0 and bucket) else layout[bucket]
        # A step is planned at its own width, or at the widest where the bucket has none of it.
        own = {q for g, q in cells if g}
        wanted = width if width in own or not groups else problem.widths[-1]
        if not groups:
            wanted = problem.widths[-1]
        holding = [
            RowsTime().predict(Cell(bucket, g, q), 0)
            for g, q in cells
            if g >= groups and (q == wanted or (g == 0 and not groups))
        ]
        total += weight * min([*holding, problem.largest_cost])
    return total


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("programs", [2, 3, 4])
def test_guillotine_is_as_good_as_any_layout(seed, programs):
    shapes, small = problem(seed)
    # All sets of cells, the largest apart, that form buckets with their own groups.
    cells = [
        (p, g, q)
        for p, g, q in product(small.prefill, small.groups, small.widths)
        if (p or g) and (g or q == 1) and (p, g, q) != (16, 4, 3)
    ]
    best = np.inf
    for chosen in subsets(cells):
        if len(chosen) > programs - 1:
            break
        layout: dict[int, list] = {}
        for p, g, q in (*chosen, (16, 4, 3)):
            layout.setdefault(p, []).append((g, q))
        best = min(best, layout_price(shapes, small, layout))
    found = fit_guillotine(small, programs)
    assert len(found) <= programs - 1
    assert small.seconds(small.grid(found)) <= best + 1e-9


def test_separable_finds_the_only_sizes_that_traffic_has():
    shapes = {Shape(100, 3, 3): 5.0, Shape(0, 3, 3): 9.0, Shape(100, 8, 3): 2.0}
    known = problem_of(shapes, (0, 50, 100, 200), (0, 1, 3, 8), (3,))
    grid = known.grid(fit_separable(known, 8))
    assert grid.cells() == tuple(
        Cell(p, g, 3) for p, g in product((0, 100, 200), (0, 3, 8)) if p or g
    )
    assert fit_separable(known, 2) == []


def steps_of(*shapes):
    return [StepRows(Cell(0, 0, 1), p, g * q, g, q, 0) for p, g, q in shapes]


def fitted(*loads, programs=6, prefill=None, budget=64, seqs=8):
    return fit_grid(
        [load_of(load, RowsTime()) for load in loads],
        RowsTime(),
        programs=programs,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        widths=(1, 3),
        prefill=prefill,
    )


def test_traffic_of_few_shapes_is_served_without_waste():
    load = steps_of(*[(32, 4, 3)] * 50, *[(0, 4, 3)] * 100)
    fit = fitted(load)
    assert {(32, 4, 3), (0, 4, 3), (64, 8, 3)} <= set(fit.grid.cells())
    assert fit.waste == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("programs", [1, 2, 5, 12, 40])
def test_a_fitted_grid_is_complete_and_keeps_to_its_programs(programs):
    rng = Random(programs)
    load = steps_of(
        *((rng.randint(0, 64), rng.randint(1, 8), rng.choice([1, 3])) for _ in range(90))
    )
    fit = fitted(load, programs=programs)
    assert len(fit.grid.cells()) <= programs
    assert fit.grid.complete
    assert fit.grid.prefill.largest == 64


def test_more_programs_never_waste_more():
    rng = Random(4)
    load = steps_of(*((rng.randint(0, 64), rng.randint(1, 8), 3) for _ in range(200)))
    wastes = [fitted(load, programs=n, prefill=(8, 16, 32)).waste for n in (2, 4, 8, 16, 32)]
    assert wastes == sorted(wastes, reverse=True)
    assert wastes[-1] < wastes[0] / 2


def test_the_worst_load_counts():
    quiet, busy = steps_of(*[(0, 1, 3)] * 90), steps_of(*[(0, n, 3) for n in (5, 6, 7)] * 10)
    both = fitted(quiet, busy, programs=3)
    # One cell for the quiet load, two for the busy one: the largest serves seven groups as well.
    assert (0, 1, 3) in both.grid.cells()


def test_busier_moments_than_seen_have_a_cell_near():
    load = steps_of(*[(0, 4, 3)] * 1000)
    cells = fitted(load, seqs=64, programs=6).grid.cells()
    assert any(cell.prefill == 0 and 4 < cell.groups <= 16 for cell in cells)


@pytest.mark.parametrize("budget", [317, 1000, 16640])
def test_odd_budgets_are_the_largest_bucket(budget):
    load = steps_of((budget, 3, 3), (1, 8, 1), (budget // 2, 0, 1))
    grid = fitted(load, budget=budget, programs=10).grid
    assert grid.prefill.largest == max(cell.prefill for cell in grid.cells()) == budget


def test_nothing_to_fit_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        fitted()
    with pytest.raises(ValueError, match="0 programs"):
        fitted(steps_of((1, 1, 1)), programs=0)
    with pytest.raises(ValueError, match="no steps"):
        fitted([])
    with pytest.raises(ValueError, match=r"shape \(65, 1, 3\) is beyond the limits \(64, 8, 3\)"):
        fitted(steps_of((65, 1, 3)))
