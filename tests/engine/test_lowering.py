"""Programs lowered from the configs alone: the same as the model's own, for a child to compile."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from bucketing.cell import Cell
from bucketing.pack import Chunk, RankRows, SlotReset, SlotSettings, pack
from bucketing.piecewise import Piece
from bucketing.program_store import ProgramStore
from bucketing.programs import ProgramTable
from glm_jax.compilation_cache import lowering_fingerprint
from glm_jax.engine.compile_worker import prepare
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.modes import full
from glm_jax.engine.runner import Runner
from glm_jax.engine.warm_order import warm_order
from glm_jax.model.presets import PRESETS
from glm_jax.model.storage import ParameterStore
from glm_jax.weights.random import fill_random

CELL = Cell(64, 0, 1)
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())


@pytest.fixture
def lowering(tiny_llm):
    return Lowering(tiny_llm.model_config, tiny_llm.config)


def fingerprint(lowering):
    return lowering_fingerprint(lowering, jax.devices()[0])


def test_lowering_survives_json(lowering):
    again = Lowering.from_json(lowering.as_json())
    assert (again.model, again.engine) == (lowering.model, lowering.engine)
    assert fingerprint(again) == fingerprint(lowering)
    assert again.params == lowering.params


def test_lowering_refuses_json_of_something_else():
    with pytest.raises(ValueError, match="must hold 'model' and 'engine'"):
        Lowering.from_json(json.dumps({"model": {}}))


def test_lowering_refuses_open_options(tiny_llm):
    with pytest.raises(ValueError, match="dtype is 'auto'"):
        Lowering(tiny_llm.model_config, EngineConfig())


def test_lowering_puts_every_array_where_it_is_told(lowering):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = Lowering(lowering.model, lowering.engine, sharding=place)
    arrays = placed.params, placed.cache, placed.slots, placed.inputs(CELL)
    assert {leaf.sharding for leaf in jax.tree.leaves(arrays)} == {place}


def test_lowering_gives_xla_flags_to_the_compiler(lowering):
    engine = dataclasses.replace(lowering.engine, xla_flags=("xla_no_such_flag=1",))
    wrong = Lowering(lowering.model, engine)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
        wrong.lower(Piece("embed", 8)).compile()


def test_lowering_knows_the_models_leaves_and_bytes(lowering, tiny_llm):
    held = tiny_llm.runner._params
    assert [leaf.shape for leaf in lowering.params] == [leaf.shape for leaf in held]
    assert lowering.weight_bytes == sum(leaf.nbytes for leaf in held)
    pages = lowering.engine.pool_pages
    assert lowering.page_bytes * pages == sum(leaf.nbytes for leaf in tiny_llm.runner._cache)
    assert lowering.slot_bytes == sum(leaf.nbytes for leaf in tiny_llm.runner._slots)


def test_runner_refuses_another_models_weights(lowering):
    config = PRESETS["tiny-random"]
    store = ParameterStore(config, dtype="float32", storage="per_layer")
    fill_random(config, store.destination, seed=0)
    with pytest.raises(ValueError, match=r"are not the .* its programs take"):
        Runner(store.to_device(jax.devices()[0]), lowering)


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 66},
        {"page_size": 16},
        {"max_num_seqs": 5},
        {"max_model_len": 64},
        {"dtype": "bfloat16"},
        {"weight_dtype": "bfloat16"},
        {"kv_cache_dtype": "bfloat16"},
        {"decode_path": "extend"},
        {"xla_flags": ("xla_gpu_graph_min_graph_size=1",)},
        {"max_num_batched_tokens": 128},  # pieces are packed for the widest step
    ],
    ids=lambda options: next(iter(options)),
)
def test_fingerprint_changes_with_what_shapes_programs(lowering, options):
    other = dataclasses.replace(lowering.engine, **options)
    assert fingerprint(Lowering(lowering.model, other)) != fingerprint(lowering)


@pytest.mark.parametrize(
    "options",
    [{"prefill_buckets": (32, 64)}, {"step_policy": "alternate"}, {"watermark": 0.5}, {"seed": 9}],
    ids=lambda options: next(iter(options)),
)
def test_fingerprint_ignores_what_only_chooses_among_programs(lowering, options):
    other = dataclasses.replace(lowering.engine, **options)
    assert fingerprint(Lowering(lowering.model, other)) == fingerprint(lowering)


def test_fingerprint_changes_with_the_model(lowering):
    other = lowering.model.replace(rms_norm_eps=1e-4)
    assert fingerprint(Lowering(other, lowering.engine)) != fingerprint(lowering)


def test_a_workers_program_loads_and_computes_what_the_parents_does(
    lowering, tiny_llm, tmp_path, monkeypatch
):
    job = {
        "lowering": lowering.as_json(),
        "settings": {},
        "root": str(tmp_path),
        "fingerprint": fingerprint(lowering),
    }
    compile_and_save = prepare(job)
    compile_and_save(CELL)
    compile_and_save(CELL)  # there already: nothing to do
    programs = ProgramTable()
    program, report = ProgramStore(tmp_path, fingerprint(lowering)).load(CELL)
    programs.add(CELL, program, report)
    own = tiny_llm.runner.programs.reports[CELL]
    assert report.aliased_bytes == own.aliased_bytes > 0
    assert report.temporary_bytes == own.temporary_bytes
    tokens = np.arange(1, 31, dtype=np.int32)
    chunk = Chunk(0, tokens, np.append(tokens[1:], 0).astype(np.int32), True)
    rows = RankRows(chunks=[chunk], resets=[SlotReset(0, range(1, 5), 0, GREEDY)])
    runner, results = tiny_llm.runner, []
    for table in (runner.programs, programs):
        monkeypatch.setattr(runner, "programs", table)
        runner.reset()
        outputs = runner.run(full(CELL), pack(CELL, lowering.limits, [rows]))
        results.append(jax.tree.map(np.asarray, (outputs, runner.snapshot())))
    runner.reset()
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_worker_refuses_to_make_other_programs_than_asked_for(lowering, tmp_path):
    job = {
        "lowering": lowering.as_json(),
        "settings": {},
        "root": str(tmp_path),
        "fingerprint": "ab" * 32,
    }
    with pytest.raises(RuntimeError, match="not the parent's"):
        prepare(job)


def order(tiny_llm, **options):
    engine = dataclasses.replace(
        tiny_llm.config, prefill_buckets=(16, 64), group_buckets=(1, 2, 4), **options
    )
    return warm_order(tiny_llm.model_config, engine), set(engine.grid().cells())


def cells(keys):
    return [key for key in keys if isinstance(key, Cell)]


def kinds(keys):
    return {key.kind for key in keys if not isinstance(key, Cell)}


def test_warm_all_waits_for_every_cell_and_needs_no_pieces(tiny_llm):
    found, grid = order(tiny_llm, grid_warm="all")
    assert set(cells(found.now)) == grid
    assert kinds(found.now) == {"controls", "logits"}
    assert found.later == ()


def test_warm_hot_waits_for_pieces_and_hot_cells_and_has_the_rest_later(tiny_llm):
    found, grid = order(tiny_llm, grid_warm="hot")
    assert cells(found.now) == [
        Cell(16, 0, 1),
        Cell(0, 1, 6),
        Cell(0, 4, 6),
        Cell(64, 4, 6),
        Cell(64, 0, 1),
    ]
    assert {"embed", "head", "logits"} < kinds(found.now)
    assert set(cells(found.later)) == grid - set(cells(found.now))
    assert not set(found.now) & set(found.later)


def test_warm_none_waits_for_pieces_only_and_gets_hot_cells_first(tiny_llm):
    found, grid = order(tiny_llm, grid_warm="none")
    assert cells(found.now) == []
    assert "embed" in kinds(found.now)
    assert cells(found.later)[:2] == [Cell(16, 0, 1), Cell(0, 1, 6)]
    assert set(cells(found.later)) == grid


@pytest.mark.parametrize("warm", ["none", "hot", "all"])
def test_full_mode_waits_for_every_cell_since_nothing_else_serves(tiny_llm, warm):
    found, grid = order(tiny_llm, grid_warm=warm, execution_mode="full")
    assert set(cells(found.now)) == grid
    assert found.later == ()


def test_piecewise_and_eager_modes_compile_no_cell(tiny_llm):
    for mode in ("piecewise", "eager"):
        found, _ = order(tiny_llm, execution_mode=mode)
        assert cells((*found.now, *found.later)) == []
