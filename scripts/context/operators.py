"""The two operators that read the context, alone, at the shapes of a step.

A call runs an operator for all layers of a step, one after another: each plane of the cache is read
once a step, so what a layer finds in the processor's caches is what it finds in a step.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm_jax.model.cache import Cache
from glm_jax.model.rows import Rows, build_rows
from glm_jax.model.selection import to_entries
from pallas_kernels.index_topk import index_topk_decode, index_topk_prefill
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import (
    Queries,
    Selection,
    UpProjections,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from scripts.context.dense import dense_decode, dense_prefill, head_scale
from scripts.context.steps import FORMS, PAGE_SIZE, SEED, WORKS, Steps, Work

IMPLEMENTATION = "xla"
# Largest difference between dense and sparse attention, relative to the largest value.
TOLERANCE = 1e-5


class Operands(NamedTuple):
    """What an operator of a step takes besides the cache; the same for all layers."""

    rows: Rows
    index_queries: Float[Array, "N M I"]
    index_weights: Float[Array, "N M"]
    queries: Queries
    q_latent: Float[Array, "N H C"]
    up: UpProjections


class Operators:
    """Programs of the indexer and of both forms of attention, for every work."""

    def __init__(self, steps: Steps) -> None:
        """Compile nothing yet; random queries, the first layer's up-projections."""
        self._steps = steps
        self._up = steps.model.member("blocks", 0).attention.up("float32")
        entries = steps.lowering.engine.pool_pages * PAGE_SIZE
        self._rows = jax.jit(
            lambda slots, inputs: build_rows(
                *jax.tree.map(lambda array: array[0], (slots, inputs)),
                page_size=PAGE_SIZE,
                pool_entries=entries,
                tile_rows=steps.lowering.form.tile_rows,
            )
        )
        self._indexer = {work: jax.jit(functools.partial(_index, steps, work)) for work in WORKS}
        self._attention = {
            (work, form): jax.jit(functools.partial(_attend, steps, work, form))
            for work in WORKS
            for form in FORMS
        }
        self._to_entries = jax.jit(functools.partial(to_entries, page_size=PAGE_SIZE))

    def operands(self, work: Work, context: int) -> tuple[Operands, Selection]:
        """Random queries of a step, and what the indexer of the first layer selects for them."""
        steps = self._steps
        config = steps.lowering.model
        slots = jax.device_put(steps.slots(work, context))
        rows = self._rows(slots, steps.inputs(work))
        rng = np.random.default_rng(SEED)

        def normal(*shape: int) -> Array:
            values = rng.standard_normal((work.tokens, *shape), dtype=np.float32)
            return jax.device_put(values)

        heads = config.num_attention_heads
        operands = Operands(
            rows=rows,
            index_queries=normal(config.index_n_heads, config.index_head_dim),
            index_weights=normal(config.index_n_heads),
            queries=Queries(
                normal(heads, config.qk_nope_head_dim), normal(heads, config.qk_rope_head_dim)
            ),
            q_latent=normal(heads, config.kv_lora_rank),
            up=self._up,
        )
        found = self._indexer[work](steps.cache, operands)[0]
        return operands, self._to_entries(found, slots.page_table[0], rows.slots)

    def indexer(self, work: Work, operands: Operands) -> float:
        """Seconds of ``index_topk`` for all full layers."""
        return _time(self._indexer[work], self._steps.cache, operands)

    def attention(self, work: Work, form: str, operands: Operands, selection: Selection) -> float:
        """Seconds of ``sparse_mla``, or of its dense rival, for all layers."""
        return _time(self._attention[work, form], self._steps.cache, operands, selection)

    def compare(self, work: Work, operands: Operands, selection: Selection) -> None:
        """Run both forms of attention in all layers and compare them.

        Raises:
            ValueError: they differ by more than TOLERANCE of the largest value: the time of a wrong
                result means nothing.
        """
        sparse, dense = (
            np.stack(self._attention[work, form](self._steps.cache, operands, selection))
            for form in FORMS
        )
        worst = float(np.max(np.abs(sparse - dense)) / np.max(np.abs(sparse)))
        if not worst <= TOLERANCE:
            raise ValueError(
                f"dense attention of {work.name} is off by {worst:.1e} of the largest value; "
                f"allowed: {TOLERANCE:.0e}. Mend scripts/context/dense.py before timing it."
            )


def _time(program: Callable[..., Any], *arguments: Any) -> float:
    started = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - started


def _index(
    steps: Steps, work: Work, cache: Cache, operands: Operands
) -> list[tuple[Int[Array, "N K"], Int[Array, " N"]]]:
    """Select in every full layer of the model."""
    lowering, rows = steps.lowering, operands.rows
    config = lowering.model
    topk = min(config.index_topk, lowering.engine.max_model_len)
    queries, results = operands.index_queries, []
    for plane in range(config.indexer_types.count("full")):
        keys = PagedPool(cache.index_keys[0], plane, lowering.form.cache_format.index_keys)
        if work.cell.prefill:
            result = index_topk_prefill(
                queries,
                operands.index_weights,
                rows.tiles,
                keys,
                topk=topk,
                implementation=IMPLEMENTATION,
            )
        else:
            found, count = index_topk_decode(
                queries[:, None],
                operands.index_weights[:, None],
                rows.group_positions,
                rows.group_page_table,
                keys,
                topk=topk,
                implementation=IMPLEMENTATION,
            )
            result = found[:, 0], count[:, 0]
        results.append(result)
        # Layers follow one another: the next one's queries wait for this one's result.
        queries += jnp.minimum(result[1][0], 0)
    return results


def _attend(
    steps: Steps,
    work: Work,
    form: str,
    cache: Cache,
    operands: Operands,
    selection: Selection,
) -> list[Float[Array, "N H outer"]]:
    """Attend in every layer of the model."""
    lowering, rows = steps.lowering, operands.rows
    scale = head_scale(lowering.form)
    queries, q_latent, results = operands.queries, operands.q_latent, []
    for plane in range(lowering.model.num_hidden_layers):
        pool = PagedPool(cache.latent[0], plane, lowering.form.cache_format.latent)
        if work.cell.prefill:
            attend = sparse_mla_prefill if form == "sparse" else dense_prefill
            result = attend(
                queries,
                selection,
                rows.tiles,
                pool,
                operands.up,
                scale=scale,
                implementation=IMPLEMENTATION,
            )
        elif form == "sparse":
            result = sparse_mla_decode(
                q_latent,
                queries.rope,
                selection.entries,
                selection.count,
                pool,
                scale=scale,
                implementation=IMPLEMENTATION,
            )
        else:
            result = dense_decode(
                q_latent,
                queries.rope,
                selection,
                rows.group_page_table,
                rows.group_positions[:, 0],
                pool,
                scale=scale,
            )
        results.append(result)
        # As above. 0, but XLA does not know it.
        zero = jnp.minimum(jnp.abs(result[0, 0, 0]), 0.0)
        queries, q_latent = Queries(queries.nope + zero, queries.rope + zero), q_latent + zero
    return results
