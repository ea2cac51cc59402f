import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_topk import api
from pallas_kernels.index_topk.cases import CASES, IndexTopkCase
from pallas_kernels.pool import PagedPool
from pallas_kernels.tiles import Tiles


@functools.cache
def _compiled(case: IndexTopkCase, implementation: str, form: str):
    def call(queries, weights, positions, table, pool):
        keys = PagedPool(pool[None], 0, "float32")
        options = {"topk": case.topk, "implementation": implementation}
        if form == "decode":
            return api.index_topk_decode(queries, weights, positions, table, keys, **options)
        rows = jnp.arange(positions.size, dtype=jnp.int32).reshape(positions.shape)
        tiles = Tiles(rows, positions, table, positions[:, 0], positions[:, -1])
        flat = queries.reshape(-1, *queries.shape[2:]), weights.reshape(-1, weights.shape[-1])
        found, count = api.index_topk_prefill(*flat, tiles, keys, **options)
        return found.reshape(*positions.shape, -1), count.reshape(positions.shape)

    return jax.jit(call)


def _problem(case: IndexTopkCase, seed: int = 0, longest: int | None = None):
    rng = np.random.default_rng(seed)
    total = case.tiles * case.pages + 1
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    tokens = longest or case.pages * case.page_size
    last = rng.integers(case.rows - 1, tokens, case.tiles)
    last[0] = tokens - 1
    positions = last[:, None] - np.arange(case.rows)[::-1]
    table = 1 + rng.permutation(case.tiles * case.pages).reshape(case.tiles, case.pages)
    return {
        "queries": normal((case.tiles, case.rows, case.heads, case.width)),
        "weights": normal((case.tiles, case.rows, case.heads)),
        "positions": positions.astype(np.int32),
        "table": table.astype(np.int32),
        "pool": normal((total, case.page_size, case.width)),
    }


def _sets(result, problem):
    selected, count = (np.asarray(part) for part in result)
    tiles, rows = problem["positions"].shape
    return [
        [sorted(selected[t, r, : count[t, r]].tolist()) for r in range(rows)] for t in range(tiles)
    ]


@pytest.mark.parametrize(
    ("implementation", "form"), [("xla", "decode"), ("xla", "prefill"), ("reference", "prefill")]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_index_topk_selects_what_the_reference_selects(case, implementation, form):
    problem = _problem(case)
    fast = _compiled(case, implementation, form)(**problem)
    slow = _compiled(case, "reference", "decode")(**problem)
    assert _sets(fast, problem) == _sets(slow, problem)


@pytest.mark.parametrize("context", [CASES[1].topk - 1, CASES[1].topk, CASES[1].topk + 1])
def test_index_topk_around_the_first_row_that_leaves_a_key_out(context):
    case = CASES[1]
    problem = _problem(case, seed=context, longest=context)
    fast = _compiled(case, "xla", "decode")(**problem)
    slow = _compiled(case, "reference", "decode")(**problem)
    assert _sets(fast, problem) == _sets(slow, problem)
    assert np.asarray(fast[1])[0, -1] == min(context, case.topk)


def test_index_topk_takes_the_lowest_positions_of_a_plateau():
    # All dot products are negative, so ReLU makes every score exactly 0 (or -0 by the weights).
    case = CASES[0]
    problem = _problem(case)
    problem["queries"] = np.abs(problem["queries"])
    problem["pool"] = -np.abs(problem["pool"])
    selected, count = _compiled(case, "xla", "decode")(**problem)
    first = np.arange(case.topk)
    for tile, row in np.ndindex(problem["positions"].shape):
        kept = int(np.asarray(count)[tile, row])
        assert sorted(np.asarray(selected)[tile, row, :kept]) == first[:kept].tolist()


def test_index_topk_prefers_a_low_position_among_equal_best_scores():
    # Equal keys in different blocks: ties must go to the earlier block.
    case = CASES[0]
    problem = _problem(case)
    problem["pool"][:] = problem["pool"][:1, :1]
    fast = _compiled(case, "xla", "prefill")(**problem)
    slow = _compiled(case, "reference", "decode")(**problem)
    assert _sets(fast, problem) == _sets(slow, problem)


def test_index_topk_never_looks_past_a_rows_position():
    case = CASES[1]
    problem = _problem(case, longest=40)
    clean = _compiled(case, "xla", "decode")(**problem)
    for tile, last in enumerate(problem["positions"][:, -1]):
        flat = problem["pool"][problem["table"][tile]].reshape(-1, case.width)
        flat[last + 1 :] = np.nan
        problem["pool"][problem["table"][tile]] = flat.reshape(case.pages, case.page_size, -1)
    poisoned = _compiled(case, "xla", "decode")(**problem)
    assert _sets(poisoned, problem) == _sets(clean, problem)


def test_index_topk_counts_nothing_for_pad_rows():
    case = CASES[1]
    problem = _problem(case)
    problem["positions"][1:] = -1
    _, count = _compiled(case, "xla", "decode")(**problem)
    assert np.asarray(count)[1:].tolist() == [[0]] * (case.tiles - 1)


def test_index_topk_refuses_an_unknown_implementation():
    with pytest.raises(ValueError, match="allowed: reference, xla"):
        _compiled(CASES[1], "cuda", "decode")(**_problem(CASES[1]))
