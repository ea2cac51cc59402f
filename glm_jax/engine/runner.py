"""Owns what lives on the device - weights, cache, slots, programs - and runs packed steps.

Nothing here traces or compiles on the request path, except the head program, which is compiled at
the first request that asks for whole-prompt logits of a given cell.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from bucketing.grid import Cell, Grid
from bucketing.programs import CompileReport, ProgramTable
from bucketing.step_inputs import Limits, StepInputs, StepOutputs, input_shapes
from glm_jax.model.cache import Cache, CacheFormat, cache_shapes, make_zeros
from glm_jax.model.config import GlmConfig
from glm_jax.model.head import logits_of
from glm_jax.model.slots import Slots, empty_slots
from glm_jax.model.step import build_step
from glm_jax.model.storage import split_model
from glm_jax.model.transformer import Transformer

# Rows per call of the head program: 64 rows of a 155K vocabulary are 40 MB of logits.
HEAD_ROWS = 64
# Drafts kept per slot; the model has no drafter in the step yet.
NUM_DRAFTS = 0


class Runner:
    """Runs steps of one model on one device.

    The cache and the slots are donated to every step. If a program raises, both are lost; ``reset``
    makes new, empty ones.
    """

    def __init__(
        self,
        model: Transformer,
        config: GlmConfig,
        limits: Limits,
        *,
        num_pages: int,
        cache_dtype: str,
        layer_loop: str,
    ) -> None:
        """Allocate the cache and prepare (not compile) the programs.

        Args:
            model: the weights, on their device.
            config: the model's description.
            limits: array widths of a step.
            num_pages: pages of the pool, page 0 included.
            cache_dtype: "float32" or "bfloat16".
            layer_loop: "unrolled" or "scan".
        """
        self.limits = limits
        self._cache_format = CacheFormat(cache_dtype)
        merge, self._params = split_model(model)
        step = build_step(merge, config, self._cache_format, loop=layer_loop)
        self._step = jax.jit(step, donate_argnums=(1, 2))
        self._head = jax.jit(lambda hidden, head, rows: logits_of(hidden[0], head, rows))
        self._head_weight = model.head[...]
        self._heads: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._cache_shapes = _with_rank(
            cache_shapes(
                config, self._cache_format, num_pages=num_pages, page_size=limits.page_size
            )
        )
        self.programs = ProgramTable(self._lower)
        self._make_cache = make_zeros(self._cache_shapes)
        self._cache: Cache | None = None
        self._slots: Slots
        self.reset()

    @property
    def num_leaves(self) -> int:
        """Arrays passed to a step besides its inputs."""
        return len(self._params) + len(Cache._fields) + len(Slots._fields)

    def compile(self, grid: Grid, on_done: Callable[[CompileReport], Any] | None = None) -> None:
        """Compile every cell of the grid."""
        self.programs.compile(grid.cells(), on_done)

    def run(self, cell: Cell, inputs: StepInputs) -> StepOutputs:
        """Dispatch one step; the outputs stay on the device until fetched.

        Raises:
            NoProgramError: the cell was not compiled; nothing is lost.
        """
        program = self.programs[cell]
        self._cache, self._slots, outputs = program(self._params, self._cache, self._slots, inputs)
        return outputs

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> Float[np.ndarray, "rows V"]:
        """Float32 logits of chosen rows of a step."""
        hidden = outputs.hidden
        if hidden.shape not in self._heads:
            index = jax.ShapeDtypeStruct((HEAD_ROWS,), np.int32)
            lowered = self._head.lower(hidden, self._head_weight, index)
            self._heads[hidden.shape] = lowered.compile()
        program = self._heads[hidden.shape]
        parts = []
        for start in range(0, len(rows), HEAD_ROWS):
            wanted = rows[start : start + HEAD_ROWS]
            index = np.zeros(HEAD_ROWS, np.int32)
            index[: len(wanted)] = wanted
            parts.append(np.asarray(program(hidden, self._head_weight, index))[: len(wanted)])
        return np.concatenate(parts)

    def reset(self) -> None:
        """Make a new zero cache and empty slots: at the start, and after a lost step."""
        if self._cache is not None:
            # Whatever survived the fault goes first: two pools at once may not fit.
            for array in self._cache:
                array.delete()
        self._cache = self._make_cache()
        self._slots = jax.device_put(empty_slots(self.limits, NUM_DRAFTS, 1))

    def snapshot(self) -> Cache:
        """A host copy of the whole cache, for tests and tools that inspect pages."""
        return jax.tree.map(np.array, self._cache)

    def _lower(self, cell: Cell) -> jax.stages.Lowered:
        inputs = jax.tree.map(_shape_of, input_shapes(cell, self.limits), is_leaf=_is_array)
        params, slots = jax.tree.map(_shape_of, (self._params, self._slots))
        return self._step.lower(params, self._cache_shapes, slots, inputs)


def _with_rank(shapes: Cache) -> Cache:
    """Put the rank axis (size 1) in front."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct((1, *spec.shape), spec.dtype), shapes)


def _is_array(value: object) -> bool:
    return hasattr(value, "shape")


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
