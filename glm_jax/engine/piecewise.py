"""Runs a PIECEWISE step: the pieces of a model in order, layer by layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache
from glm_jax.model.compact_rows import CompactRows
from glm_jax.model.config import GlmConfig
from glm_jax.model.draft_pieces import DraftMembers, draft_members
from glm_jax.model.layer import Planes
from glm_jax.model.members import Member, member_of
from glm_jax.model.slots import Slots
from glm_jax.model.transformer import Transformer
from pallas_kernels.sparse_mla import Selection

# The compiled piece of a kind.
Program = Callable[[str], Callable[..., Any]]


class _LayerParts(NamedTuple):
    """The arguments of one layer's pieces."""

    full: bool
    before: tuple[Member, ...]
    after: tuple[Member, ...]
    after_kind: str
    planes: Planes


class _Stream(NamedTuple):
    """What flows from layer to layer."""

    x: Float[Array, "n D"]
    cache: Cache
    selection: Selection


class PiecewiseStep:
    """The loop over layers, in Python.

    Attributes:
        dispatches: Programs that the last step ran.
    """

    def __init__(self, model: Transformer, config: GlmConfig) -> None:
        """Take the layers' weights apart once.

        Args:
            model: the weights on their device.
            config: its description.
        """
        self.dispatches = 0
        self._embed = model.embed[...]
        self._ends = model.norm[...], model.head[...]
        self._layers = [_parts(model, config, layer) for layer in range(config.num_hidden_layers)]
        self._drafter: tuple[DraftMembers, _LayerParts] | None = None
        if config.num_nextn_predict_layers:
            mtp = _parts(model, config, config.num_hidden_layers)
            self._drafter = draft_members(model, config), mtp

    def __call__(
        self, program: Program, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        """Run one step.

        Args:
            program: the compiled piece of a kind, all of one bucket that holds the step's rows.
            cache: donated.
            slots: donated.
            inputs: packed for the widest layout.
        """
        chunks = bool(inputs.chunk_start[0, -1])
        groups = bool(np.any(inputs.group_known))
        segments = ("chunks",) * chunks + ("groups",) * groups
        slots, rows, x, selection = program("embed")(self._embed, slots, inputs)
        stream, expert_rows = _Stream(x, cache, selection), []
        for layer in self._layers:
            stream, counts = _run_layer(program, layer, stream, rows, segments)
            if counts is not None:
                expert_rows.append(counts)
        slots, outputs = program("head")(*self._ends, stream.x, tuple(expert_rows), slots, inputs)
        self.dispatches = 2 + len(self._layers) * (2 + len(segments))
        if not (self._drafter and outputs.drafts.shape[-1] and inputs.drafter[0]):
            return stream.cache, slots, outputs
        members, layer = self._drafter
        x, starts = program("draft_begin")(members, rows, inputs, outputs)
        # The target's selection is overwritten row by row: every row selects anew.
        stream, _ = _run_layer(program, layer, stream._replace(x=x), rows, segments)
        written, slots, drafts = program("draft_end")(
            members, stream.x, stream.selection, stream.cache, slots, starts
        )
        self.dispatches += 4 + len(segments)
        cache = stream.cache if written is None else written
        return cache, slots, outputs._replace(drafts=drafts)


def _run_layer(
    program: Program,
    layer: _LayerParts,
    stream: _Stream,
    rows: CompactRows,
    segments: tuple[str, ...],
) -> tuple[_Stream, Int[Array, " E"] | None]:
    """The pieces of one layer; also the rows of each expert, None in a dense layer."""
    kind = "full" if layer.full else "shared"
    before, block = program(f"before_{kind}"), layer.before[0]
    x, cache, selection = stream
    index = None
    if layer.full:
        queries, index, values, cache = before(*layer.before, x, cache, rows, layer.planes)
    else:
        queries, values, cache = before(*layer.before, x, cache, rows, layer.planes)
    for segment in segments:
        attend = program(f"{segment}_{kind}")
        if layer.full:
            selection, values = attend(
                block, queries, index, cache, rows, selection, values, layer.planes
            )
        else:
            values = attend(block, queries, cache, rows, values, selection, layer.planes)
    x, counts = program(layer.after_kind)(*layer.after, x, values, rows)
    return _Stream(x, cache, selection), counts


def _parts(model: Transformer, config: GlmConfig, layer: int) -> _LayerParts:
    before = range(layer)
    full, sparse = config.has_indexer(layer), config.is_sparse(layer)
    index_plane = sum(map(config.has_indexer, before))
    sparse_before = sum(map(config.is_sparse, before))
    block = member_of(model, "blocks", layer)
    if sparse:
        feed_forward = member_of(model, "moes", sparse_before)
    else:
        feed_forward = member_of(model, "mlps", layer - sparse_before)
    # On the device once: a scalar sent at every dispatch costs as much as the dispatch.
    planes = Planes(*jax.device_put((np.int32(layer), np.int32(index_plane))))
    return _LayerParts(
        full=full,
        before=(block, member_of(model, "indexers", index_plane)) if full else (block,),
        after=(block, feed_forward),
        after_kind="after_moe" if sparse else "after_dense",
        planes=planes,
    )
