"""Work, inputs, checks and reports of bench_kernels and tune_kernels; nothing is really timed."""

import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

from pallas_kernels.expert_matmul import ExpertWeights
from pallas_kernels.index_topk.tile_shape import Cut, rows_per_tile
from pallas_kernels.pool import PagedPool
from scripts import bench_kernels, tune_kernels
from scripts.kernels.candidates import candidates_of
from scripts.kernels.cases import problems_of
from scripts.kernels.ceilings import Ceilings
from scripts.kernels.expert_matmul import ExpertMatmul
from scripts.kernels.index_topk import IndexTopk
from scripts.kernels.problem import implementation_of
from scripts.kernels.sparse_mla import Heads, SparseMla
from scripts.kernels.timing import Repeated, Spread, chain, measure, turns_for
from scripts.kernels.trial import Trial, attempt

HEADS = Heads(4, 32, 32)
SMALL = SparseMla("decode", 2, 3, HEADS, 1, 16, "float32", "float32", 2)
SECONDS = Spread(0.002, 0.001, 0.004)
CEILINGS = Ceilings(flops=1e12, bytes=1e11)


def test_index_topk_counts_the_keys_that_each_row_may_see():
    problem = IndexTopk("decode", 2, 3, 4, 1, 16, "bfloat16", 1)
    # Rows at positions 61, 62 and 63 of 64; a dot product of 128 values per head and key.
    assert problem.flops == 2 * (62 + 63 + 64) * 4 * 2 * 128
    keys, queries, weights, selected = 2 * 64 * 256, 6 * 4 * 512, 6 * 4 * 4, 6 * 16 * 4
    assert problem.bytes == keys + queries + weights + selected
    planar = IndexTopk("decode", 2, 3, 4, 1, 16, "fp8_planar", 1)
    assert problem.bytes - planar.bytes == 2 * 64 * (256 - 132)


def test_sparse_mla_counts_every_entry_of_few_rows_and_each_once_of_many():
    # Six rows of 16 entries, of 62 that the first row of a request may see: 48 per request.
    assert SMALL.flops == 6 * 4 * 16 * (2 * 576 + 2 * 512)
    queries_and_results, numbers = 6 * 4 * (512 + 64 + 512) * 4, 6 * 16 * 4
    assert SMALL.bytes == 2 * 48 * 576 * 4 + queries_and_results + numbers
    many = SparseMla("decode", 2, 3, HEADS, 1, 30, "fp8_ds_mla", "bfloat16", 2)
    assert many.bytes == 2 * 62 * 656 + queries_and_results + 6 * 30 * 4


def test_a_prefill_of_sparse_mla_also_projects_queries_and_values():
    prefill = SparseMla("prefill", 1, 64, Heads(4, 32, 48), 4, 16, "bfloat16", "bfloat16", 1)
    decode = SparseMla("decode", 1, 64, Heads(4, 32, 48), 4, 16, "bfloat16", "bfloat16", 1)
    assert prefill.flops - decode.flops == 2 * 64 * 4 * (32 * 512 + 512 * 48)


def test_expert_matmul_reads_experts_that_got_a_row():
    one = ExpertMatmul(1, 16, 2, 24, 8, "float32", 1)
    assert one.flops == 2 * (2 * 24 * 8 + 2 * 24 * 8 + 2 * 8 * 24)
    weights, row, choices, result = 2 * 3 * 24 * 8 * 4, 24 * 4, 2 * (4 + 4), 24 * 4
    assert one.bytes == weights + row + choices + result
    wide = ExpertMatmul(1, 16, 2, 256, 128, "fp8", 1)
    values, scales, row = 3 * 256 * 128, (2 * 2 + 2 * 1) * 4, 256 * 2
    assert wide.bytes == 2 * (values + scales) + row + choices + 256 * 4
    assert all(len(set(row)) == 3 for row in ExpertMatmul(9, 4, 3, 8, 8, "float32", 1).chosen())


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_problems_have_names_of_their_own(platform):
    names = [(problem.operator, problem.name) for problem in problems_of(platform)]
    assert len(names) == len(set(names))


def test_inputs_on_a_gpu_fit_60_gib():
    for problem in problems_of("gpu"):
        arrays = jax.make_jaxpr(problem.inputs)().out_avals
        assert sum(array.size * array.dtype.itemsize for array in arrays) < 60 * 2**30


def test_rows_of_a_request_select_what_all_may_see_and_share_little():
    positions = SMALL._positions()
    assert positions.shape == (6, 16)
    assert positions.max() < 62
    for first in (0, 3):
        assert len(set(positions[first : first + 3].ravel())) == 48
    assert (np.diff(positions) > 0).all()


def test_a_wrong_answer_is_not_timed():
    trial = attempt(lambda x: x + 1, (np.zeros(4, np.float32),), lambda *_: 0.6, 0.5)
    assert trial.wrong
    assert trial.repeated is None
    assert trial.reason == "wrong: its error is over 0.5"


def test_an_implementation_that_refuses_says_why():
    problem = ExpertMatmul(2, 4, 2, 8, 4, "float32", 1)
    weights = ExpertWeights(*(np.zeros((1, 4, *shape), np.float32) for shape in ((8, 8), (4, 8))))
    gates = np.zeros((2, 2), np.float32)
    inputs = np.zeros((2, 8), np.float32), problem.chosen(), gates, weights._replace(layer=0)
    trial = attempt(implementation_of(problem, "mosaic_gpu"), inputs, lambda *_: 0.0, 1.0)
    assert trial.reason.startswith("ValueError: expert_matmul's GPU kernel got weights of float32")
    assert not trial.wrong


def test_turns_go_through_the_planes_and_whole_outputs_come_back():
    pool = PagedPool(jax.device_put(_plain(3, 1, 2, 1)), 0, "float32")

    def call(x, pool):
        return x + pool.array[pool.plane]

    x = np.full((1, 2, 1), 10.0, np.float32)
    # Turn 4, the fifth, reads plane 1 again.
    last = jax.jit(chain(call, 5))(x, pool)
    assert np.asarray(last).ravel().tolist() == [12.0, 13.0]


def test_programs_take_turns_and_times_are_per_call():
    now, order = [0.0], []

    def program(name, seconds):
        def run():
            order.append(name)
            now[0] += seconds.pop(0)

        return run

    spreads = measure(
        {
            # The first of each warms up.
            "a": Repeated(program("a", [99.0, 4.0, 8.0, 12.0]), 4),
            "b": Repeated(program("b", [99.0, 0.5, 0.5, 0.5]), 1),
        },
        (),
        3,
        lambda: now[0],
    )
    assert spreads["a"] == pytest.approx((2.0, 1.2, 2.8))
    assert spreads["b"] == (0.5, 0.5, 0.5)
    assert "".join(order) == "baabbaab"


@pytest.mark.parametrize(("seconds", "turns"), [(1.0, 1), (0.01, 3), (1e-6, 1000)])
def test_short_calls_are_repeated(seconds, turns):
    assert turns_for(seconds) == turns


def _plain(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def _text(table):
    file = io.StringIO()
    Console(width=200, file=file).print(table)
    return file.getvalue()


def test_a_result_is_told_as_rates_and_shares_of_the_ceilings():
    result = bench_kernels.Result(SMALL, "xla", Trial(1e-6, None, ""), SECONDS)
    line = bench_kernels.as_json(result, CEILINGS, {"device": "d", "jax": "0", "commit": "c"})
    assert line["flops_per_s"] == SMALL.flops / 0.002
    assert line["bytes_per_s"] == SMALL.bytes / 0.002
    assert (line["seconds"], line["p10"], line["p90"]) == (0.002, 0.001, 0.004)
    assert json.loads(json.dumps(line))["ceilings"] == {"flops": 1e12, "bytes": 1e11}
    row = _text(bench_kernels.table([result], CEILINGS)).splitlines()[1].split()
    share = SMALL.bytes / 0.002 / 1e11
    assert row[-6:-4] == ["2.000", "(1.000-4.000)"]
    assert row[-1] == f"{share:.0%}"


def test_what_was_not_timed_says_why_and_fails_where_it_is_the_default():
    refused = bench_kernels.Result(SMALL, "mosaic_gpu", Trial(None, None, "no GPU"), None)
    told = _text(bench_kernels.table([refused], CEILINGS))
    assert "not timed (1): no GPU" in told
    assert told.splitlines()[1].split()[-5:] == ["mosaic_gpu", "-", "not", "timed", "(1)"]
    assert bench_kernels.as_json(refused, CEILINGS, {})["not_timed"] == "no GPU"
    assert bench_kernels.failures([refused], "xla") == []
    assert len(bench_kernels.failures([refused], "mosaic_gpu")) == 1
    wrong = bench_kernels.Result(SMALL, "reference", Trial(0.5, None, "wrong"), None)
    assert len(bench_kernels.failures([wrong], "xla")) == 1


def test_every_problem_that_can_be_cut_otherwise_has_the_rules_candidate():
    for problem in problems_of("gpu"):
        candidates = candidates_of(problem)
        assert len({candidate.name for candidate in candidates}) == len(candidates)
        if candidates:
            assert sum(candidate.by_rule for candidate in candidates) == 1


@pytest.mark.parametrize(
    ("cut", "said"),
    [(Cut(rows=9), "32 heads and float32 keys a tile has 1 to 6"), (Cut(splits=0), "0 splits")],
)
def test_a_cut_that_the_scoring_kernel_has_no_room_for_is_refused(cut, said):
    keys = PagedPool(jax.device_put(_plain(1, 1, 64, 128)), 0, "float32")
    with pytest.raises(ValueError, match=said):
        rows_per_tile(6, 32, keys, cut)


def test_the_fastest_candidate_stands_beside_the_rules():
    candidates = candidates_of(SparseMla("decode", 1, 1, HEADS, 4, 256, "float32", "float32", 1))
    results = [
        tune_kernels.Result(
            SMALL, candidate, None, Trial(0.0, None, ""), Spread(0.1 * n, 0.1, 0.2), ""
        )
        for n, candidate in enumerate(candidates, 1)
    ]
    best = tune_kernels.fastest(results)
    assert [candidate.name for candidate in candidates if candidate.by_rule] == ["4 splits"]
    said = tune_kernels.comparison(results, best)
    assert said.endswith("fastest 1 splits, rule 4 splits (+300.0%)")
    assert tune_kernels.as_json(results[0], best, {})["fastest"]


def test_tuning_without_a_gpu_is_refused_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["tune_kernels"])
    with pytest.raises(SystemExit) as refusal:
        tune_kernels.main()
    assert refusal.value.code == 2
    assert "give --compile-only" in capsys.readouterr().err
