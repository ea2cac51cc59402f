"""Whole steps at a chosen context, sparse and dense, over a cache that was never prefilled.

The cache is filled with one random plane, repeated, and the slots are set to the context: 16K
tokens of eight requests would take minutes to prefill. No operator's time depends on the values,
only on the positions (top-k is a fixed number of counts, and a tie costs what any key costs).

One thing differs from a real prompt: the selected keys lie anywhere in the context, where a trained
indexer prefers some regions, so gathering them misses the processor's caches as often as it can.
Measured for decode rows of eight requests: 256 keys out of 1024 tokens cost the same in a context
of 1K and of 16K; out of all 16K tokens, 1.35 times as much.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bucketing.cell import Cell
from bucketing.pack import Chunk, Group, RankRows, pack
from bucketing.programs import CompileReport, compile_program
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.model.cache import Cache
from glm_jax.model.slots import Slots, empty_slots
from glm_jax.model.storage import split_model
from glm_jax.model_files import ModelFiles, load_model
from scripts.context.dense import dense_attention

PREFILL_ROWS = 512
PAGE_SIZE = 64
SEED = 5
FORMS = ("sparse", "dense")
# Of whole steps: rounding of eight layers.
TOLERANCE = 1e-4


class Work(NamedTuple):
    """What a step does: some requests decode one token each, or one prompt advances by a chunk."""

    name: str
    cell: Cell

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.cell.rows


WORKS = (
    Work("decode 1", Cell(0, 1, 1)),
    Work("decode 8", Cell(0, 8, 1)),
    Work(f"prefill {PREFILL_ROWS}", Cell(PREFILL_ROWS, 0, 1)),
)


class Steps:
    """The programs of every work in both forms, and the one cache that they all write.

    Attributes:
        lowering: of the sparse programs, which are the product's.
        model: the weights.
        cache: of the rank; donated to every step.
    """

    def __init__(
        self, found: ModelFiles, longest: int, report: Callable[[CompileReport], Any]
    ) -> None:
        """Load the model, compile six programs, fill the cache.

        Args:
            found: the model.
            longest: tokens of the longest context; the page tables are made for it.
            report: called after each program.
        """
        engine = engine_options(longest)
        self.lowering = Lowering(found.config, engine)
        self.model = load_model(
            found, dtype="float32", storage="per_layer", seed=0, device=jax.devices()[0]
        )
        _, self._params = split_model(self.model)
        # Another Lowering: a function that was traced for some shapes is not traced again.
        sources = {
            "sparse": (self.lowering, contextlib.nullcontext()),
            "dense": (Lowering(found.config, engine), dense_attention()),
        }
        self._programs = {}
        for form, (lowering, substituted) in sources.items():
            with substituted:
                for work in WORKS:
                    program, done = compile_program(lowering.lower, work.cell)
                    self._programs[work, form] = program
                    report(done)
        self.cache = random_cache(self.lowering.cache)
        self._inputs = {work: self._pack(work) for work in WORKS}

    def run(self, work: Work, form: str, context: int) -> tuple[float, StepOutputs]:
        """Run a step whose last row, or each of whose rows, sees ``context`` keys.

        Returns:
            Seconds until its tokens are on the host, and what it returned.
        """
        slots = jax.device_put(self.slots(work, context))
        jax.block_until_ready((self.cache, slots))
        started = time.perf_counter()
        program = self._programs[work, form]
        self.cache, _, outputs = program(self._params, self.cache, slots, self._inputs[work])
        for drawn in (outputs.group_tokens, outputs.chunk_tokens):
            np.asarray(drawn)
        return time.perf_counter() - started, outputs

    def compare(self, work: Work, context: int) -> None:
        """Run a step in both forms and compare their hidden rows.

        The median row counts: what rounds otherwise may swap two keys at the edge of some row's
        selection.

        Raises:
            ValueError: it differs by more than TOLERANCE of the largest value.
        """
        sparse, dense = (np.asarray(self.run(work, form, context)[1].hidden[0]) for form in FORMS)
        apart = np.median(np.max(np.abs(sparse - dense), axis=1)) / np.max(np.abs(sparse))
        if not apart <= TOLERANCE:
            raise ValueError(
                f"a dense step of {work.name} at context {context} is off by {apart:.1e} of the "
                f"largest value; allowed: {TOLERANCE:.0e}. Mend scripts/context/dense.py first."
            )

    def slots(self, work: Work, context: int) -> Slots:
        """Greedy requests, each with pages of its own, as long as the step needs them."""
        limits = self.lowering.limits
        slots = empty_slots(limits, 1, self.lowering.model.vocab_size)
        own = 1 + np.arange(limits.max_num_seqs * limits.pages_per_seq, dtype=np.int32)
        slots.page_table[0, :-1] = own.reshape(limits.max_num_seqs, limits.pages_per_seq)
        slots.computed[0, :-1] = context - (work.cell.prefill or 1)
        slots.last_token[0, :-1] = 1 + np.arange(limits.max_num_seqs)
        slots.top_p[0, :-1] = 1.0
        return slots

    def inputs(self, work: Work) -> StepInputs:
        """The packed inputs of a work; the context is in the slots."""
        return self._inputs[work]

    def _pack(self, work: Work) -> StepInputs:
        rng = np.random.default_rng(SEED)
        chunks = []
        if work.cell.prefill:
            vocabulary = self.lowering.model.vocab_size
            tokens = rng.integers(0, vocabulary, work.cell.prefill, np.int32)
            chunks = [Chunk(0, tokens, np.append(tokens[1:], np.int32(0)), sampled=True)]
        groups = [Group(g, True, 1, 0, None, None, True) for g in range(work.cell.groups)]
        return pack(work.cell, self.lowering.limits, [RankRows(chunks, groups)])


def engine_options(longest: int) -> EngineConfig:
    """Engine options under which every work has its cell."""
    groups = sorted({work.cell.groups for work in WORKS} - {0})
    return EngineConfig(
        max_model_len=longest,
        page_size=PAGE_SIZE,
        max_num_seqs=groups[-1],
        max_num_batched_tokens=PREFILL_ROWS,
        prefill_buckets=(PREFILL_ROWS,),
        group_buckets=groups,
        dtype="float32",
        weight_dtype="float32",
        kv_cache_dtype="float32",
        layer_storage="per_layer",
        layer_loop="unrolled",
        kernels="xla",
    )


def random_cache(shapes: Cache) -> Cache:
    """A cache whose planes all hold the same random values of variance 1; page 0 is zero.

    One plane is drawn: 3 GB of random numbers would take longer than the measurement of a context.
    """
    rng = np.random.default_rng(SEED)

    def fill(spec: Any) -> jax.Array:
        plane = rng.random(spec.shape[2:], dtype=np.float32)
        plane -= 0.5
        plane *= 12**0.5
        plane[0] = 0.0
        return jax.jit(lambda one: jnp.broadcast_to(one, spec.shape))(plane)

    return Cache(fill(shapes.latent), fill(shapes.index_keys))
