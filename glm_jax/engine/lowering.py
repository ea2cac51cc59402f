"""Lowers any program from the two configs alone: no weights, no cache, no device memory.

The runner's programs and those that a child process compiles come from here, so they are the same.
"""

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import numpy as np

from bucketing.cell import Cell
from bucketing.loop_inputs import LoopInputs, LoopKey, loop_input_shapes
from bucketing.piecewise import Piece
from bucketing.program_key import ProgramKey
from bucketing.step_inputs import Limits, StepInputs, input_shapes
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.xla_flags import xla_options
from glm_jax.model.cache import Cache, cache_format_of, cache_shapes
from glm_jax.model.config import GlmConfig
from glm_jax.model.decode_loop import build_decode_loop
from glm_jax.model.head import head_rows
from glm_jax.model.layer import Form
from glm_jax.model.piece_shapes import piece_arguments
from glm_jax.model.pieces import Pieces
from glm_jax.model.slots import Slots, slot_shapes, update_controls
from glm_jax.model.step import build_step
from glm_jax.model.storage import abstract_model, numpy_dtype, split_model
from glm_jax.sampling.control_update import UPDATE_LINES, empty_update

# The kind of the program that serves logits and log-probabilities of chosen rows, LOGITS_ROWS per
# call: 64 rows of a 155K vocabulary are 40 MB.
LOGITS = "logits"
LOGITS_ROWS = 64
# The program that writes the slots' control lines.
CONTROLS = Piece("controls", UPDATE_LINES)
# Options that only choose cells, pages or weights; every other one may change a program, and so a
# new option is taken to do so until it is listed here.
_SHAPELESS = frozenset(
    {
        "max_num_batched_tokens",
        "prefill_buckets",
        "group_buckets",
        "decode_widths",
        "grid_cells",
        "grid_warm",
        "gpu_memory_utilization",
        "compilation_cache",
        "piecewise_buckets",
        "execution_mode",
        "max_step_ms",
        # Its programs have keys of their own.
        "decode_loop_steps",
        "tbt_target_ms",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_num_partial_prefills",
        "watermark",
        "step_policy",
        "enable_prefix_caching",
        "scheduling_policy",
        "max_queued_requests",
        "max_overtakes",
        "split_steps",
        "seed",
        "skip_tokenizer_init",
        # Spelt out by num_pages and the limits, or already in the model's config.
        "max_model_len",
        "latent_norm_eps",
    }
)


# Options whose "auto" depends on the platform or the checkpoint.
_RESOLVED = (
    "dtype",
    "weight_dtype",
    "kv_cache_dtype",
    "layer_storage",
    "layer_loop",
    "kernels",
)


class Lowering:
    """What a step program is made from, as shapes.

    Attributes:
        model: the model's config, as served (with its final latent_norm_eps).
        engine: the engine's options, "auto" resolved.
        limits: array widths of a step.
        form: what is fixed for all steps.
        params: shapes of the weights' leaves, in the order the programs take them.
        cache: shapes of the cache, rank axis in front.
        slots: shapes of the slots, rank axis in front.
        step: the step as a Python function, for operator-by-operator execution: with the reference
            operators.
    """

    def __init__(
        self,
        model: GlmConfig,
        engine: EngineConfig,
        *,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        """Lay out every shape.

        Args:
            model: the model's config.
            engine: the engine's options.
            sharding: where all arrays live; None is the process's default device. Programs can be
                lowered and compiled for a device that is only described.

        Raises:
            ValueError: an option is still "auto"; programs depend on its value.
        """
        for name in _RESOLVED:
            if getattr(engine, name) == "auto":
                raise ValueError(
                    f"{name} is 'auto', but programs depend on it. Resolve it for the platform "
                    "before lowering, as LLM does."
                )
        self.model = model
        self.engine = engine
        self.limits: Limits = engine.limits()
        cache_format = cache_format_of(model, engine.kv_cache_dtype)
        self.form = Form(model, cache_format, engine.decode_path, engine.kernels, engine.dtype)
        self._shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
        self._model = abstract_model(
            model,
            dtype=engine.dtype,
            weight_dtype=engine.weight_dtype,
            storage=engine.layer_storage,
            make=self._shape,
        )
        self._pieces = Pieces(self._model, self.form, engine.page_size)
        merge, self.params = split_model(self._model)
        self.cache: Cache = self._with_rank(
            cache_shapes(
                model,
                self.form.cache_format,
                num_pages=engine.pool_pages,
                page_size=engine.page_size,
            )
        )
        self.slots: Slots = self._with_rank(slot_shapes(self.limits, model.vocab_size))
        plain = self.form._replace(kernels="reference")
        self.step = build_step(merge, plain, loop=engine.layer_loop)
        self._jit = partial(jax.jit, compiler_options=xla_options(engine.xla_flags))
        step = build_step(merge, self.form, loop=engine.layer_loop)
        self._step = self._jit(step, donate_argnums=(1, 2))
        self._merge = merge
        self._logits = self._jit(partial(head_rows, most=self.logprob_width))

    @classmethod
    def from_json(cls, text: str) -> "Lowering":
        """Read what ``as_json`` wrote.

        Raises:
            ValueError: the text does not hold both configs.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or set(content) != {"model", "engine"}:
            raise ValueError("the text is no lowering: it must hold 'model' and 'engine'.")
        model = {name: _frozen(value) for name, value in content["model"].items()}
        engine = {name: _frozen(value) for name, value in content["engine"].items()}
        return cls(GlmConfig(**model), EngineConfig(**engine))

    def as_json(self) -> str:
        """Both configs, for another process to lower the same programs."""
        return json.dumps(
            {"model": dataclasses.asdict(self.model), "engine": dataclasses.asdict(self.engine)}
        )

    def description(self) -> dict[str, Any]:
        """All that programs depend on besides their key, the sources and the platform."""
        options = dataclasses.asdict(self.engine)
        shaping = {name: options[name] for name in options.keys() - _SHAPELESS}
        shaping |= {"num_pages": self.engine.pool_pages, "limits": self.limits._asdict()}
        # Pieces are packed for the widest step.
        shaping |= {"widest": self.engine.widest}
        return {"model": dataclasses.asdict(self.model), "engine": shaping}

    def inputs(self, cell: Cell) -> StepInputs:
        """Shapes of a cell's inputs."""
        shapes = input_shapes(cell, self.limits)
        return StepInputs(*(self._shape(spec.shape, spec.dtype) for spec in shapes))

    def lower(self, key: ProgramKey) -> jax.stages.Lowered:
        """Trace and lower a program; compiling the result gives the program.

        Args:
            key: a cell for its whole step, a loop for several, a piece for a part of a step, or
                ``logits_key`` for logits and log-probabilities of any rows of a step, or
                ``CONTROLS``.
        """
        if isinstance(key, Cell):
            return self._step.lower(self.params, self.cache, self.slots, self.inputs(key))
        if isinstance(key, LoopKey):
            return self._lower_loop(key)
        if key.kind == LOGITS:
            return self._lower_logits(key.rows)
        if key == CONTROLS:
            update = empty_update(self.limits.max_num_seqs + 1, self.limits.num_drafts)
            shapes = jax.tree.map(lambda array: self._shape(array.shape, array.dtype), update)
            return self._jit(update_controls, donate_argnums=0).lower(self.slots, shapes)
        call, donated = self._pieces.functions()[key.kind]
        if key.kind == "embed":
            call = partial(call, size=key.rows)
        arguments = piece_arguments(
            self._pieces,
            self._model,
            self.cache,
            self.slots,
            self.inputs(self.engine.widest),
            key.rows,
        )
        return self._jit(call, donate_argnums=donated).lower(*arguments[key.kind])

    def _lower_loop(self, key: LoopKey) -> jax.stages.Lowered:
        loop = build_decode_loop(
            self._merge, self.form, loop=self.engine.layer_loop, most_steps=key.steps
        )
        shapes = loop_input_shapes(key.groups, self.limits)
        ends = LoopInputs(*(self._shape(spec.shape, spec.dtype) for spec in shapes))
        state = self.cache, self.slots, self.inputs(key.cell)
        return self._jit(loop, donate_argnums=(1, 2)).lower(self.params, *state, ends)

    def _lower_logits(self, rows: int) -> jax.stages.Lowered:
        head = self._model.head.get_value()
        dtype = numpy_dtype(self.engine.dtype)
        hidden = self._shape((1, rows, self.model.hidden_size), dtype)
        index = self._shape((LOGITS_ROWS,), np.int32)
        further = self._shape((LOGITS_ROWS, self.logprob_width), np.int32)
        return self._logits.lower(hidden, head, index, index, further)

    def _with_rank(self, shapes: Any) -> Any:
        """Put the rank axis (size 1) in front of every shape."""
        return jax.tree.map(lambda spec: self._shape((1, *spec.shape), spec.dtype), shapes)

    @property
    def logprob_width(self) -> int:
        """Most likely tokens, and further ones, of a row of the program of ``logits_key``."""
        return min(self.engine.max_logprobs, self.model.vocab_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return _bytes(self.params)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the pool."""
        return _bytes(self.cache) // self.engine.pool_pages

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots."""
        return _bytes(self.slots)


def logits_key(layout: Cell) -> Piece:
    """The key of the program that turns rows of a layout into logits and log-probabilities."""
    return Piece(LOGITS, layout.rows)


def _bytes(shapes: Any) -> int:
    return sum(spec.size * spec.dtype.itemsize for spec in jax.tree.leaves(shapes))


def _frozen(value: Any) -> Any:
    """JSON's lists as the tuples that configs hold."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
