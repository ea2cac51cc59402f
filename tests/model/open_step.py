"""A step program with its insides laid open: logits of every row, and what every layer selected."""

import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bucketing.grid import Cell
from bucketing.pack import Chunk, RankRows, SlotReset, SlotSettings, pack
from bucketing.step_inputs import Limits
from glm_jax.model import layer
from glm_jax.model.cache import CACHE_FORMATS, cache_shapes
from glm_jax.model.config import GlmConfig
from glm_jax.model.head import logits_of
from glm_jax.model.layer import Form
from glm_jax.model.parameters import parameter_specs
from glm_jax.model.selection import select
from glm_jax.model.slots import empty_slots
from glm_jax.model.step import build_step
from glm_jax.model.storage import ParameterStore, split_model
from glm_jax.weights.load import load_parameters
from pallas_kernels.sparse_mla import sparse_mla_prefill

PAGE_SIZE = 64
# Prompts of similar length share a program.
CELL_STEP = 256
FLOAT32 = CACHE_FORMATS["float32"]

# Programs by config and number of pages; mutated weights share one.
_COMPILED: dict[tuple[GlmConfig, int], Callable] = {}


class Ties(NamedTuple):
    """Selections decided by rounding, and what the reference made of them."""

    layer: np.ndarray  # int [n], counted among the full layers
    row: np.ndarray  # int [n]
    keys: np.ndarray  # int [n, K], positions


class Opened(NamedTuple):
    logits: np.ndarray  # float32 [T, V]
    selected: np.ndarray  # bool [L, T, T]: layer, row, key


def read_parameters(folder, config: GlmConfig) -> dict[str, np.ndarray]:
    """Every parameter of a checkpoint in float32, by flat name."""
    parameters = {
        name: np.empty(spec.shape, np.float32) for name, spec in parameter_specs(config).items()
    }
    load_parameters(folder, config, parameters.__getitem__)
    return parameters


def run_open(
    config: GlmConfig,
    parameters: dict[str, np.ndarray],
    tokens: np.ndarray,
    ties: Ties | None = None,
) -> Opened:
    """Prefill all tokens as one chunk of one step; `ties` are taken over, the rest is computed."""
    store = ParameterStore(config, dtype="float32", storage="per_layer")
    for name in parameter_specs(config):
        store.destination(name)[...] = parameters[name]
    merge, leaves = split_model(store.to_device(jax.devices("cpu")[0]))
    pages = -(-len(tokens) // CELL_STEP) * (CELL_STEP // PAGE_SIZE)
    key = (config, pages)
    if key not in _COMPILED:
        _COMPILED[key] = compile_open(config, merge, leaves, pages)
    chosen = np.zeros((config.indexer_types.count("full"), pages * PAGE_SIZE), bool)
    keys = np.zeros((*chosen.shape, min(config.index_topk, pages * PAGE_SIZE)), np.int32)
    if ties is not None:
        chosen[ties.layer, ties.row] = True
        keys[ties.layer, ties.row] = ties.keys
    logits, entries, counts = _COMPILED[key](leaves, tokens, (chosen, keys))
    return Opened(logits[: len(tokens)], as_masks(entries, counts, len(tokens)))


def compile_open(config: GlmConfig, merge: Callable, leaves: list, pages: int) -> Callable:
    """Compile one prefill cell; weights, tokens and ties are arguments of what is returned."""
    limits = Limits(max_num_seqs=1, pages_per_seq=pages, page_size=PAGE_SIZE)
    cell = Cell(pages * PAGE_SIZE, 0, 1)
    step = build_step(merge, Form(config, FLOAT32), loop="unrolled")

    def program(params, cache, slots, inputs, ties):
        with open_layers(ties) as selections:
            _, _, outputs = step(params, cache, slots, inputs)
        rows = jnp.arange(cell.prefill)
        logits = logits_of(outputs.hidden[0], merge(params).head[...], rows)
        return logits, *map(list, zip(*selections, strict=True))

    def inputs_of(tokens):
        settings = SlotSettings(0.0, 0, 1.0, 0.0, 0, 0, ())
        reset = SlotReset(0, range(1, pages + 1), 0, settings)
        tokens = np.asarray(tokens, np.int32)
        chunk = Chunk(0, tokens, np.append(tokens[1:], np.int32(0)), sampled=True)
        return pack(cell, limits, [RankRows(chunks=[chunk], resets=[reset])])

    cache = jax.tree.map(
        lambda spec: np.zeros((1, *spec.shape), spec.dtype),
        cache_shapes(config, FLOAT32, num_pages=pages + 1, page_size=PAGE_SIZE),
    )
    slots = empty_slots(limits, 1)
    jitted = jax.jit(program)

    def run(leaves, tokens, ties):
        return jax.device_get(jitted(leaves, cache, slots, inputs_of(tokens), ties))

    return run


@contextmanager
def open_layers(ties: tuple) -> Generator[list]:
    """While tracing: note the (entries, count) that each layer attends to, and put ties in."""
    chosen, keys = ties
    selections = []
    full_layers = itertools.count()

    def select_with_ties(*arguments, **options):
        own = select(*arguments, **options)
        number = next(full_layers)
        # The one request's pages start at page 1, in order.
        taken = chosen[number][:, None]
        return own._replace(
            positions=jnp.where(taken, keys[number], own.positions),
            entries=jnp.where(taken, keys[number] + PAGE_SIZE, own.entries),
        )

    def attend_and_note(queries, selection, *rest, **options):
        selections.append((selection.entries, selection.count))
        return sparse_mla_prefill(queries, selection, *rest, **options)

    with (
        mock.patch.object(layer, "select", select_with_ties),
        mock.patch.object(layer, "sparse_mla_prefill", attend_and_note),
    ):
        yield selections


def as_masks(entries: list, counts: list, num_tokens: int) -> np.ndarray:
    """Cache entries to key positions; the one request's pages start at page 1, in order."""
    masks = np.zeros((len(entries), num_tokens, num_tokens), bool)
    for mask, chosen, count in zip(masks, entries, counts, strict=True):
        for row in range(num_tokens):
            keys = chosen[row, : count[row]] - PAGE_SIZE
            assert len(set(keys.tolist())) == count[row], f"row {row} selects a key twice"
            mask[row, keys] = True
    return masks
