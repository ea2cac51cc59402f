import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.expert_matmul import ExpertWeights, config, mosaic_gpu
from pallas_kernels.expert_matmul.placement import place_rows
from pallas_kernels.fp8 import BlockScaled

# One shape for all that runs in Mosaic's interpreter: the tile loop, the pipeline and the stores
# are the kernel's own, only wgmma and TMA are simulated.
ROWS, EXPERTS, CHOICES, MODEL, WIDTH, LAYERS = 70, 4, 2, 128, 64, 2
LAYER = 1


def _chosen_experts(rng) -> np.ndarray:
    chosen = [rng.permutation(EXPERTS - 1)[:CHOICES] for _ in range(ROWS)]
    experts = np.array(chosen, np.int32)  # the last expert gets nothing
    experts[3:] = np.where(experts[3:] == 2, 0, experts[3:])  # 0 and 1 get more than a tile
    experts[3] = EXPERTS  # a dropped row
    return experts


def _problem():
    rng = np.random.default_rng(5)

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16)

    experts = _chosen_experts(rng)
    return [
        normal(ROWS, MODEL),
        experts,
        rng.random((ROWS, CHOICES), np.float32),
        normal(LAYERS, EXPERTS, MODEL, 2 * WIDTH) / np.float32(MODEL**0.5).astype("bfloat16"),
        normal(LAYERS, EXPERTS, WIDTH, MODEL) / np.float32(WIDTH**0.5).astype("bfloat16"),
    ]


def _by_hand(x, experts, gates, gate_up, down) -> np.ndarray:
    """Float64, one assignment at a time."""
    out = np.zeros(x.shape)
    for row, choice in np.ndindex(experts.shape):
        expert = experts[row, choice]
        if expert == EXPERTS:
            continue
        both = x[row].astype(np.float64) @ gate_up[LAYER, expert].astype(np.float64)
        gate, up = np.split(both, 2)
        hidden = gate / (1 + np.exp(-gate)) * up
        out[row] += gates[row, choice] * (hidden @ down[LAYER, expert].astype(np.float64))
    return out


@functools.cache
def _compiled():
    return jax.jit(functools.partial(mosaic_gpu.expert_matmul, interpret=True))


def _run(problem) -> np.ndarray:
    *rows, gate_up, down = problem
    return np.asarray(_compiled()(*rows, ExpertWeights(gate_up, down, np.int32(LAYER))))


@pytest.mark.usefixtures("mosaic_interpreter")
def test_expert_matmul_on_tiles_equals_a_float64_loop():
    problem = _problem()
    # Hidden values and results are rounded to bfloat16.
    np.testing.assert_allclose(_run(problem), _by_hand(*problem), rtol=0, atol=3e-2)


@pytest.mark.usefixtures("mosaic_interpreter")
def test_expert_matmul_on_tiles_drops_rows_whatever_they_hold():
    problem = _problem()
    problem[1][::3] = EXPERTS
    clean = _run(problem)
    problem[0][::3] = np.nan
    problem[2][::3] = np.inf
    dirty = _run(problem)
    np.testing.assert_array_equal(dirty, clean)
    assert not dirty[::3].any()


def _fp8_problem(model: int, width: int = 128):
    rng = np.random.default_rng(6)

    def matrices(outputs, inputs):
        values = rng.standard_normal((LAYERS, EXPERTS, outputs, inputs), np.float32)
        blocks = -(-outputs // 128), -(-inputs // 128)
        scales = rng.uniform(0.3, 1.7, (LAYERS, EXPERTS, *blocks)).astype(np.float32)
        scales /= np.float32(inputs**0.5)  # no power of two
        return BlockScaled(values.astype(ml_dtypes.float8_e4m3fn), scales)

    return [
        rng.standard_normal((ROWS, model), np.float32).astype(ml_dtypes.bfloat16),
        _chosen_experts(rng),
        rng.random((ROWS, CHOICES), np.float32),
        matrices(2 * width, model),
        matrices(model, width),
    ]


def _transposed_values(matrices: BlockScaled) -> np.ndarray:
    """What is meant, in float64, with the inputs in rows."""
    outputs, inputs = (np.arange(size) // 128 for size in matrices.values.shape[-2:])
    spread = matrices.scales[..., outputs[:, None], inputs]
    return (matrices.values.astype(np.float64) * spread).swapaxes(-1, -2)


# 192: steps of 64 columns, and an item of down that reaches beyond the matrix.
@pytest.mark.parametrize("model", [192, 256])
@pytest.mark.usefixtures("mosaic_interpreter")
def test_expert_matmul_on_tiles_with_fp8_weights_equals_a_float64_loop(model):
    *rows, gate_up, down = _fp8_problem(model)
    expected = _by_hand(*rows, _transposed_values(gate_up), _transposed_values(down))
    result = _run([*rows, gate_up, down])
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


def _placed(experts: np.ndarray, number: int):
    place = jax.jit(place_rows, static_argnums=(1, 2))(experts, number, config.TILE_ROWS)
    return jax.tree.map(np.asarray, place)


def test_place_rows_lays_tiles_that_never_span_two_experts():
    number, rows = 5, 300
    experts = np.random.default_rng(1).integers(0, number + 1, (rows, 2)).astype(np.int32)
    experts[experts == 3] = 4  # nothing for expert 3
    placed = _placed(experts, number)
    flat = experts.reshape(-1)
    assert (placed.place.reshape(-1)[flat == number] == len(placed.row)).all()
    covered = []
    for tile in range(placed.used[0]):
        start, live = placed.tile_start[tile], placed.tile_rows[tile]
        assert start % config.ROW_GROUP == 0
        assert 1 <= live <= config.TILE_ROWS
        assert start + config.TILE_ROWS <= len(placed.row)
        for place in range(start, start + live):
            assignment = int(np.flatnonzero(placed.place.reshape(-1) == place).item())
            assert flat[assignment] == placed.tile_expert[tile]
            assert placed.row[place] == assignment // 2
            covered.append(assignment)
    assert sorted(covered) == np.flatnonzero(flat < number).tolist()


def test_place_rows_keeps_the_order_of_an_experts_assignments():
    experts = np.array([[1, 0], [1, 2], [0, 1]], np.int32)
    placed = _placed(experts, 2)
    assert placed.place.tolist() == [[8, 0], [9, len(placed.row)], [1, 10]]


def _refused(x, experts, gates, gate_up, down) -> None:
    operands = x, experts, gates, ExpertWeights(gate_up, down, np.int32(LAYER))
    jax.eval_shape(mosaic_gpu.expert_matmul, *operands)


def test_expert_matmul_on_tiles_refuses_what_it_cannot_multiply():
    x, experts, gates, gate_up, down = _problem()
    with pytest.raises(ValueError, match="got weights of float32 and bfloat16"):
        _refused(x, experts, gates, gate_up.astype(np.float32), down)
    with pytest.raises(ValueError, match="got model width 96"):
        _refused(x[:, :96], experts, gates, gate_up[:, :, :96], down[..., :96])


def test_expert_matmul_on_tiles_refuses_fp8_weights_that_it_cannot_read():
    x, experts, gates, gate_up, down = _fp8_problem(128)
    with pytest.raises(ValueError, match="got weights of block FP8 and bfloat16"):
        _refused(x, experts, gates, gate_up, down.values.astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="got expert width 64 with block-FP8 weights"):
        _refused(*_fp8_problem(128, width=64))


@pytest.mark.parametrize(
    ("assignments", "experts", "size"), [(1536, 256, 16), (5632, 256, 32), (384, 8, 64)]
)
def test_fp8_tile_size_holds_the_rows_of_nearly_all_experts(assignments, experts, size):
    assert config.fp8_tile_size(assignments, experts) == size


@pytest.mark.parametrize(
    ("columns", "parts", "tile"),
    [(2048, 2, 128), (6144, 1, 256), (128, 2, 128), (64, 2, 64), (192, 1, 64)],
)
def test_tile_for_takes_the_widest_that_divides(columns, parts, tile):
    assert config.tile_for(columns, parts).columns == tile


def test_tile_for_refuses_what_no_tile_divides():
    with pytest.raises(ValueError, match="cannot tile 96 columns"):
        config.tile_for(96, 1)
