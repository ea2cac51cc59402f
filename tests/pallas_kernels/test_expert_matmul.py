import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.expert_matmul import ExpertWeights, api
from pallas_kernels.expert_matmul.cases import CASES, ExpertMatmulCase
from pallas_kernels.fp8 import BlockScaled

LAYERS, LAYER = 3, 1


@functools.cache
def _compiled(case: ExpertMatmulCase, implementation: str):
    return jax.jit(functools.partial(api.expert_matmul, implementation=implementation))


def _run(case: ExpertMatmulCase, implementation: str, problem) -> np.ndarray:
    x, experts, gates, gate_up, down = problem
    weights = ExpertWeights(gate_up, down, np.int32(LAYER))
    return np.asarray(_compiled(case, implementation)(x, experts, gates, weights))


def _problem(case: ExpertMatmulCase):
    rng = np.random.default_rng(5)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    chosen = [rng.permutation(case.experts)[: case.choices] for _ in range(case.rows)]
    return [
        normal((case.rows, case.model)),
        np.array(chosen, np.int32),
        rng.random((case.rows, case.choices), np.float32),
        normal((LAYERS, case.experts, case.model, 2 * case.width)) / case.model**0.5,
        normal((LAYERS, case.experts, case.width, case.model)) / case.width**0.5,
    ]


def _by_hand(x, experts, gates, gate_up, down) -> np.ndarray:
    """Float64, one assignment at a time; expert id E is dropped."""
    out = np.zeros(x.shape)
    for row, choice in np.ndindex(experts.shape):
        expert = experts[row, choice]
        if expert == gate_up.shape[1]:
            continue
        gate, up = np.split(x[row].astype(np.float64) @ gate_up[LAYER, expert], 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        out[row] += gates[row, choice] * (hidden @ down[LAYER, expert])
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_expert_matmul_equals_a_float64_loop(case, implementation):
    problem = _problem(case)
    problem[1][1] = case.experts  # a dropped row
    out = _run(case, implementation, problem)
    np.testing.assert_allclose(out, _by_hand(*problem), rtol=1e-5, atol=1e-5)


def test_expert_matmul_handles_all_rows_on_one_expert():
    problem = _problem(CASES[1])
    problem[1][:] = [2, 0]
    out = _run(CASES[1], "xla", problem)
    np.testing.assert_allclose(out, _by_hand(*problem), rtol=1e-5, atol=1e-5)


def test_expert_matmul_drops_rows_whatever_they_hold():
    problem = _problem(CASES[1])
    problem[1][::3] = CASES[1].experts
    clean = _run(CASES[1], "xla", problem)
    problem[0][::3] = np.nan
    problem[2][::3] = np.inf
    dirty = _run(CASES[1], "xla", problem)
    np.testing.assert_array_equal(dirty, clean)
    assert not dirty[::3].any()


def test_expert_matmul_gives_a_row_the_same_bits_whatever_shares_the_step():
    problem = _problem(CASES[1])
    alone = _run(CASES[1], "xla", problem)[7]
    rng = np.random.default_rng(11)
    order = rng.permutation(CASES[1].rows)
    shuffled = [part[order] for part in problem[:3]] + problem[3:]
    moved = _run(CASES[1], "xla", shuffled)
    np.testing.assert_array_equal(moved[order.tolist().index(7)], alone)


# Wide enough for several blocks of 128 in every direction, the last ones partial.
NARROW = ExpertMatmulCase("narrow", rows=40, experts=4, choices=2, model=160, width=128)


def _block_scaled(rng: np.random.Generator, shape: tuple[int, ...]) -> BlockScaled:
    """Random e4m3 values and scales of random matrices ``[.., outputs, inputs]``."""
    blocks = [-(-size // 128) for size in shape[-2:]]
    values = rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, (*shape[:-2], *blocks)) * shape[-1] ** -0.5
    return BlockScaled(values, scales.astype(np.float32))


def _plain(stack: BlockScaled) -> np.ndarray:
    """``[.., inputs, outputs]`` in float64."""
    spread = np.kron(stack.scales.astype(np.float64), np.ones((128, 128)))
    outputs, inputs = stack.values.shape[-2:]
    plain = stack.values.astype(np.float64) * spread[..., :outputs, :inputs]
    return plain.swapaxes(-1, -2)


@functools.cache
def _narrow_weights():
    """Of both narrow kinds and both implementations: results and what they should be."""
    problem = _problem(NARROW)
    problem[1][1] = NARROW.experts
    rng = np.random.default_rng(6)
    model, width = NARROW.model, NARROW.width
    stack = LAYERS, NARROW.experts
    gate_up = _block_scaled(rng, (*stack, 2 * width, model))
    fp8 = ExpertWeights(gate_up, _block_scaled(rng, (*stack, model, width)), np.int32(LAYER))
    bfloat16 = ExpertWeights(
        *(array.astype(ml_dtypes.bfloat16) for array in problem[3:]), np.int32(LAYER)
    )
    kinds = {"fp8": fp8, "bfloat16": bfloat16}

    def program(rows, kinds):
        return {
            (kind, implementation): api.expert_matmul(*rows, weights, implementation=implementation)
            for kind, weights in kinds.items()
            for implementation in ("reference", "xla")
        }

    found = jax.device_get(jax.jit(program)(problem[:3], kinds))
    plain = {"fp8": (_plain(fp8.gate_up), _plain(fp8.down))}
    plain["bfloat16"] = tuple(array.astype(np.float64) for array in bfloat16[:2])
    return found, {kind: _by_hand(*problem[:3], *arrays) for kind, arrays in plain.items()}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("kind", ["fp8", "bfloat16"])
def test_expert_matmul_uses_narrow_weights_as_the_numbers_they_mean(kind, implementation):
    found, expected = _narrow_weights()
    np.testing.assert_allclose(found[kind, implementation], expected[kind], rtol=1e-5, atol=1e-5)


def test_expert_matmul_widens_no_stack_of_narrow_experts():
    # Rows as narrow as the experts: the CPU computes in float32 all the same.
    experts, model, width = 16, 128, 64
    narrow = functools.partial(jax.ShapeDtypeStruct, dtype=jax.numpy.bfloat16)
    weights = ExpertWeights(
        narrow((LAYERS, experts, model, 2 * width)),
        narrow((LAYERS, experts, width, model)),
        jax.ShapeDtypeStruct((), np.int32),
    )
    chosen = jax.ShapeDtypeStruct((4, 2), np.int32)
    gates = jax.ShapeDtypeStruct((4, 2), np.float32)
    run = functools.partial(api.expert_matmul, implementation="xla")
    compiled = jax.jit(run).lower(narrow((4, model)), chosen, gates, weights).compile()
    one_layer = 4 * experts * 3 * model * width
    assert compiled.memory_analysis().temp_size_in_bytes < one_layer / 4
