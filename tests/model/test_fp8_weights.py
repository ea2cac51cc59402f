"""Weights held in FP8 or bfloat16 compute what the same numbers in float32 compute.

All forms of the model are one XLA program, so that the suite compiles one.
"""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from bucketing.cell import Cell
from bucketing.pack import Chunk, RankRows, SlotReset, SlotSettings, pack
from bucketing.step_inputs import Limits
from glm_jax.model.cache import CACHE_FORMATS, cache_shapes
from glm_jax.model.layer import Form
from glm_jax.model.parameters import parameter_specs
from glm_jax.model.presets import PRESETS
from glm_jax.model.slots import empty_slots
from glm_jax.model.step import build_step
from glm_jax.model.storage import ParameterStore, split_model
from glm_jax.weights.quant import dequantise_rows
from glm_jax.weights.random import fill_random

# Two layers alike, which a scanned loop runs as two turns.
CONFIG = PRESETS["tiny-random"].replace(
    moe_intermediate_size=128,
    num_hidden_layers=2,
    mlp_layer_types=("sparse",) * 2,
    indexer_types=("full",) * 2,
    num_nextn_predict_layers=0,
)
# weight_dtype, layer_storage, layer_loop
PLAIN = "float32", "per_layer", "unrolled"
FORMS = (
    ("fp8", "per_layer", "unrolled"),
    ("fp8", "stacked", "scan"),
    ("bfloat16", "per_layer", "unrolled"),
)
LIMITS = Limits(max_num_seqs=1, pages_per_seq=4, page_size=8)
CELL, PROMPT, STEPS = Cell(16, 0, 1), 13, 5
GREEDY = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
CACHE = CACHE_FORMATS["float32"]


@functools.cache
def fp8_numbers():
    """Parameters that every form holds exactly: FP8 with powers of two as scales, else bfloat16."""
    store = ParameterStore(CONFIG, dtype="float32", storage="per_layer", weight_dtype="fp8")
    fill_random(CONFIG, store.destination, seed=6)
    for name, spec in parameter_specs(CONFIG).items():
        held = store.destination(name)
        if spec.quantised:
            held.scales[...] = np.exp2(np.round(np.log2(held.scales)))
        else:
            held[...] = held.astype(ml_dtypes.bfloat16)
    return {name: store.destination(name) for name in parameter_specs(CONFIG)}


def plain(held):
    """A parameter as ``[.., in, out]`` numbers."""
    if not isinstance(held, tuple):
        return held
    matrices = [
        dequantise_rows(held.values[place], held.scales[place]).T
        for place in np.ndindex(held.values.shape[:-2])
    ]
    return np.reshape(matrices, held.values.swapaxes(-1, -2).shape)


def model_of(weight_dtype, storage):
    store = ParameterStore(CONFIG, dtype="float32", storage=storage, weight_dtype=weight_dtype)
    for name, held in fp8_numbers().items():
        target = store.destination(name)
        if isinstance(target, tuple):
            target.values[...], target.scales[...] = held
        else:
            target[...] = plain(held)
    return store.to_device(jax.devices()[0])


@functools.cache
def generated():
    """For every form the hidden rows of a prompt and of some tokens after it, and the tokens.

    All forms are given the tokens that the plain one draws.
    """
    steps, leaves = {}, {}
    for form in (PLAIN, *FORMS):
        weight_dtype, storage, loop = form
        merge, leaves[form] = split_model(model_of(weight_dtype, storage))
        steps[form] = build_step(merge, Form(CONFIG, CACHE, kernels="xla"), loop=loop)

    def all_steps(leaves, states, inputs):
        return {form: steps[form](leaves[form], *states[form], inputs) for form in steps}

    shapes = cache_shapes(CONFIG, CACHE, num_pages=5, page_size=LIMITS.page_size)
    cache = jax.tree.map(lambda spec: np.zeros((1, *spec.shape), spec.dtype), shapes)
    states = dict.fromkeys(steps, (cache, empty_slots(LIMITS, 1)))
    hidden, tokens = {form: [] for form in steps}, {form: [] for form in steps}
    rows = np.random.default_rng(2).integers(2, CONFIG.vocab_size, PROMPT).astype(np.int32)
    program = jax.jit(all_steps).lower(leaves, states, inputs_of(rows)).compile()
    for _ in range(STEPS):
        results = program(leaves, states, inputs_of(rows))
        for form, (*state, outputs) in results.items():
            states[form], found = tuple(state), jax.device_get(outputs)
            hidden[form].append(found.hidden[0, : len(rows)])
            tokens[form].append(int(found.chunk_tokens[0, 0]))
        rows = np.array(tokens[PLAIN][-1:], np.int32)
    return hidden, tokens


def inputs_of(rows):
    chunk = Chunk(0, rows, np.append(rows[1:], np.int32(0)), sampled=True)
    resets = [SlotReset(0, range(1, 5), 0, GREEDY)] if len(rows) > 1 else []
    return pack(CELL, LIMITS, [RankRows(chunks=[chunk], resets=resets)])


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_narrow_weights_give_the_rows_of_their_numbers(form):
    hidden, _ = generated()
    for found, expected in zip(hidden[form], hidden[PLAIN], strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("form", FORMS, ids="-".join)
def test_narrow_weights_give_the_tokens_of_their_numbers(form):
    _, tokens = generated()
    assert tokens[form] == tokens[PLAIN]
    assert len(set(tokens[PLAIN])) > 1


def test_fp8_weights_take_a_byte_a_number_in_the_large_matrices():
    numbers = fp8_numbers()
    held = numbers["layers.1.moe.gate_up"]
    assert held.values.itemsize == 1
    assert held.values.size == CONFIG.n_routed_experts * 2 * 128 * CONFIG.hidden_size
