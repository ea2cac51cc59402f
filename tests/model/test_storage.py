"""Storage and loop forms: the same numbers from all, few leaves when stacked, no copies."""

import jax
import numpy as np
import pytest

from bucketing.grid import Cell
from bucketing.pack import Chunk, RankRows, SlotReset, SlotSettings, pack
from bucketing.programs import compile_program
from bucketing.step_inputs import Limits, input_shapes
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.modes import full
from glm_jax.engine.runner import Runner
from glm_jax.model.cache import CACHE_FORMATS, Cache, cache_shapes
from glm_jax.model.layer import Form
from glm_jax.model.presets import PRESETS
from glm_jax.model.slots import Slots, slot_shapes
from glm_jax.model.step import build_step
from glm_jax.model.storage import ParameterStore, abstract_model, split_model
from glm_jax.weights.random import fill_random

LIMITS = Limits(max_num_seqs=2, pages_per_seq=8, page_size=8)
CELL = Cell(32, 0, 1)
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
FORMS = [("per_layer", "unrolled"), ("stacked", "unrolled"), ("stacked", "scan")]


@pytest.fixture(scope="module")
def config():
    """A full and a shared layer, twice: the scanned run is two turns of two layers."""
    return PRESETS["tiny-random"].replace(
        num_hidden_layers=4,
        indexer_types=("full", "shared", "full", "shared"),
        mlp_layer_types=("sparse",) * 4,
        index_topk=8,
    )


@pytest.fixture(scope="module")
def runners(config):
    return {form: _runner(config, *form) for form in FORMS}


def _lowering(config, storage, loop, *, dtype="float32", num_pages=17):
    engine = EngineConfig(
        max_model_len=LIMITS.pages_per_seq * LIMITS.page_size,
        max_num_seqs=LIMITS.max_num_seqs,
        page_size=LIMITS.page_size,
        num_pages=num_pages,
        dtype=dtype,
        weight_dtype=dtype,
        kv_cache_dtype=dtype,
        layer_storage=storage,
        layer_loop=loop,
        kernels="xla",
    )
    return Lowering(config, engine)


def _runner(config, storage, loop, *, dtype="float32"):
    store = ParameterStore(config, dtype=dtype, storage=storage)
    fill_random(config, store.destination, seed=1)
    model = store.to_device(jax.devices()[0])
    runner = Runner(model, _lowering(config, storage, loop, dtype=dtype))
    runner.compile([CELL])
    return runner


def _hidden(runner, config):
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, 30).astype(np.int32)
    chunk = Chunk(0, tokens, np.append(tokens[1:], 0).astype(np.int32), True)
    rows = RankRows(chunks=[chunk], resets=[SlotReset(0, range(1, 5), 0, GREEDY)])
    outputs = runner.run(full(CELL), pack(CELL, LIMITS, [rows]))
    return np.asarray(outputs.hidden)[0, :30]


@pytest.mark.parametrize("form", FORMS[1:], ids="-".join)
def test_every_form_computes_the_same_rows(runners, config, form):
    plain = _hidden(runners[FORMS[0]], config)
    np.testing.assert_allclose(_hidden(runners[form], config), plain, atol=1e-5)


def test_bfloat16_follows_float32(runners, config):
    runner = _runner(config, *FORMS[0], dtype="bfloat16")
    # Rows below index_topk: past it a rounding may change a selection, which is no error.
    rows = slice(0, config.index_topk)
    narrow = _hidden(runner, config)[rows].astype(np.float32)
    wide = _hidden(runners[FORMS[0]], config)[rows]
    assert np.corrcoef(narrow.ravel(), wide.ravel())[0, 1] > 0.99


def test_stacked_storage_has_few_leaves_for_the_78_layer_preset():
    model = abstract_model(PRESETS["glm-5.3"], dtype="bfloat16", storage="stacked")
    leaves = len(split_model(model)[1]) + len(Cache._fields) + len(Slots._fields)
    assert leaves < 150


# One row alone is a case of its own: XLA once rewrote its cache write into a copy of the pool.
@pytest.mark.parametrize("cell", [CELL, Cell(0, 1, 1)], ids=str)
def test_a_programs_temporaries_do_not_grow_with_the_pool(runners, config, cell):
    runners[FORMS[0]].compile([cell])
    small = runners[FORMS[0]].programs.reports[cell]
    doubled = _lowering(config, *FORMS[0], num_pages=34)
    _, large = compile_program(doubled.lower, cell)
    assert large.temporary_bytes == small.temporary_bytes
    # The donated pool is written in place: what grew is aliased, byte for byte.
    grown = large.argument_bytes - small.argument_bytes
    assert large.aliased_bytes - small.aliased_bytes == grown > 0


def test_per_layer_storage_copies_no_weights(config):
    # Experts wide enough that a copy of one layer's would exceed all other temporaries.
    wide = config.replace(moe_intermediate_size=2048)
    merge, leaves = split_model(abstract_model(wide, dtype="float32", storage="per_layer"))
    cache_format = CACHE_FORMATS["float32"]
    step = build_step(merge, Form(wide, cache_format), loop="unrolled")
    arguments = (
        leaves,
        _with_rank(cache_shapes(wide, cache_format, num_pages=17, page_size=8)),
        _with_rank(slot_shapes(LIMITS)),
        jax.tree.map(
            _shape, input_shapes(CELL, LIMITS), is_leaf=lambda leaf: hasattr(leaf, "shape")
        ),
    )
    memory = jax.jit(step, donate_argnums=(1, 2)).lower(*arguments).compile().memory_analysis()
    one_layer = 3 * wide.n_routed_experts * wide.hidden_size * wide.moe_intermediate_size * 4
    assert memory.temp_size_in_bytes < one_layer


def _shape(spec):
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)


def _with_rank(specs):
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype), specs)
