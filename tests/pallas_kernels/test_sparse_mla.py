import functools

import jax
import numpy as np
import pytest

from pallas_kernels.sparse_mla import api
from pallas_kernels.sparse_mla.cases import CASES, SparseMlaCase


@functools.cache
def _compiled(case: SparseMlaCase, implementation: str):
    def call(q_latent, q_rope, entries, count, pool):
        return api.sparse_mla(
            q_latent,
            q_rope,
            entries,
            count,
            lambda places: pool[places],
            scale=0.25,
            implementation=implementation,
        )

    return jax.jit(call)


def _problem(case: SparseMlaCase):
    rng = np.random.default_rng(3)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    count = rng.integers(1, case.topk + 1, case.rows)
    count[0] = 0  # a pad row
    return {
        "q_latent": normal((case.rows, case.heads, case.latent)),
        "q_rope": normal((case.rows, case.heads, case.rope)),
        "entries": rng.integers(1, case.pool, (case.rows, case.topk)).astype(np.int32),
        "count": count.astype(np.int32),
        "pool": normal((case.pool, case.latent + case.rope)),
    }


def _by_hand(problem) -> np.ndarray:
    """Float64, one row and head at a time."""
    rows, heads, latent = problem["q_latent"].shape
    out = np.zeros((rows, heads, latent))
    for n, h in np.ndindex(rows, heads):
        entries = problem["entries"][n, : problem["count"][n]]
        if not len(entries):
            continue
        cached = problem["pool"][entries].astype(np.float64)
        query = np.concatenate([problem["q_latent"][n, h], problem["q_rope"][n, h]])
        logits = cached @ query * 0.25
        weights = np.exp(logits - logits.max())
        out[n, h] = weights / weights.sum() @ cached[:, :latent]
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sparse_mla_equals_a_float64_loop(case, implementation):
    problem = _problem(case)
    out = np.asarray(_compiled(case, implementation)(**problem))
    np.testing.assert_allclose(out, _by_hand(problem), rtol=1e-5, atol=1e-5)


def test_sparse_mla_gives_zeros_for_a_pad_row():
    out = np.asarray(_compiled(CASES[0], "xla")(**_problem(CASES[0])))
    assert not out[0].any()


def test_sparse_mla_ignores_nan_in_entries_after_the_count():
    problem = _problem(CASES[1])
    clean = np.asarray(_compiled(CASES[1], "xla")(**problem))
    poison = CASES[1].pool - 1
    problem["pool"][poison] = np.nan
    entries = np.where(problem["entries"] == poison, 1, problem["entries"])
    live = np.arange(CASES[1].topk) < problem["count"][:, None]
    clean_entries = np.where(live, entries, 1).astype(np.int32)
    dirty_entries = np.where(live, entries, poison).astype(np.int32)
    clean = np.asarray(_compiled(CASES[1], "xla")(**{**problem, "entries": clean_entries}))
    dirty = np.asarray(_compiled(CASES[1], "xla")(**{**problem, "entries": dirty_entries}))
    np.testing.assert_array_equal(dirty, clean)


def test_sparse_mla_gives_a_row_the_same_bits_wherever_it_stands():
    case = CASES[1]
    problem = _problem(case)
    turned = {
        name: np.roll(array, 5, axis=0) if name != "pool" else array
        for name, array in problem.items()
    }
    out = np.asarray(_compiled(case, "xla")(**problem))
    moved = np.asarray(_compiled(case, "xla")(**turned))
    np.testing.assert_array_equal(np.roll(out, 5, axis=0), moved)
