"""Shapes of the arguments of every piece, so that it can be compiled without weights or data."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from bucketing.step_inputs import StepInputs
from glm_jax.model.cache import Cache
from glm_jax.model.config import GlmConfig
from glm_jax.model.draft_pieces import draft_members
from glm_jax.model.layer import Planes
from glm_jax.model.members import member_of
from glm_jax.model.pieces import Pieces
from glm_jax.model.slots import Slots
from glm_jax.model.transformer import Transformer


def kinds_of(config: GlmConfig, num_drafts: int) -> tuple[str, ...]:
    """The kinds of pieces that a model has layers for; its MTP layer runs if there are drafts."""
    layers = range(config.total_layers if num_drafts else config.num_hidden_layers)
    kinds = ["embed"]
    for selection, wanted in (("full", True), ("shared", False)):
        if any(config.has_indexer(layer) is wanted for layer in layers):
            kinds += [f"{part}_{selection}" for part in ("before", "chunks", "groups")]
    if not all(map(config.is_sparse, layers)):
        kinds.append("after_dense")
    if any(map(config.is_sparse, layers)):
        kinds.append("after_moe")
    return (*kinds, "head", *(("draft_begin", "draft_end") if num_drafts else ()))


def piece_arguments(
    pieces: Pieces,
    model: Transformer,
    cache: Cache,
    slots: Slots,
    inputs: StepInputs,
    size: int,
) -> Mapping[str, tuple[Any, ...]]:
    """The arguments of each kind of piece for ``size`` compact rows, as shapes.

    Args:
        pieces: the pieces.
        model: its modules, with arrays or shapes.
        cache: shapes of the cache, rank axis included.
        slots: shapes of the slots, rank axis included.
        inputs: shapes of the inputs of the widest layout.
        size: compact rows.
    """
    embed = _shapes(model.embed), slots, inputs
    embedded = jax.eval_shape(partial(pieces.embed, size=size), *embed)
    slots, rows, x, selection = embedded
    plane: Any = jax.ShapeDtypeStruct((), np.int32)
    planes = Planes(plane, plane)
    first = {
        group: _shapes(member_of(model, group, 0))
        for group in ("blocks", "indexers", "mlps", "moes")
        if getattr(model, group)
    }
    block = first["blocks"]
    arguments: dict[str, tuple[Any, ...]] = {"embed": embed}
    before = block, x, cache, rows, planes
    queries, values, _ = jax.eval_shape(pieces.before_shared, *before)
    arguments["before_shared"] = before
    arguments["chunks_shared"] = block, queries, cache, rows, values, selection, planes
    arguments["groups_shared"] = arguments["chunks_shared"]
    if "indexers" in first:
        before = block, first["indexers"], x, cache, rows, planes
        queries, index, values, _ = jax.eval_shape(pieces.before_full, *before)
        arguments["before_full"] = before
        arguments["chunks_full"] = block, queries, index, cache, rows, selection, values, planes
        arguments["groups_full"] = arguments["chunks_full"]
    if "mlps" in first:
        arguments["after_dense"] = block, first["mlps"], x, values, rows
    if "moes" in first:
        arguments["after_moe"] = block, first["moes"], x, values, rows
    ends = _shapes(model.norm), _shapes(model.head)
    config = pieces.config
    counts = jax.ShapeDtypeStruct((config.n_routed_experts,), np.int32)
    sparse_layers = sum(map(config.is_sparse, range(config.num_hidden_layers)))
    arguments["head"] = *ends, x, (counts,) * sparse_layers, slots, inputs
    if slots.drafts.shape[-1]:
        members = _shapes(draft_members(model, config))
        slots, outputs = jax.eval_shape(pieces.head, *arguments["head"])
        begin = members, rows, inputs, outputs
        x, starts = jax.eval_shape(pieces.functions()["draft_begin"].call, *begin)
        arguments["draft_begin"] = begin
        arguments["draft_end"] = members, x, selection, cache, slots, starts
    return arguments


def _shapes(tree: Any) -> Any:
    """Shapes for arrays; a parameter of an abstract model holds one already."""
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)
