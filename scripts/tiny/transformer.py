"""The decoder for training: layers, trunk, and the chained steps of the MTP layer."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from scripts.tiny.attention import Keys, attend, head_log_weights, project_keys, project_queries
from scripts.tiny.experts import CAPACITY, mix_experts
from scripts.tiny.guide import GUIDED_HEADS
from scripts.tiny.indexer import IndexInputs, index_inputs, random_keys, recent_keys, select_keys
from scripts.tiny.layers import Rotation, gated_mlp, rms_norm, rotation
from scripts.tiny.parameters import Parameters, layer_parameters
from scripts.tiny.shape import TinyShape

Selection = Literal["all", "indexer", "recent", "random"]


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a forward pass runs; static under jit.

    Attributes:
        selection: the keys that attention sees: "all", those of the "indexer", or of a control,
            the most "recent" or "random" ones (index_topk of them).
        row_stride: collect every such row for the indexer's loss (None: no indexer loss).
        block: queries per attention block.
        capacity: room of an expert over its fair share of rows.
        guided: return what guide.py needs of the heads that it guides.
        layer: index of the layer, set by the trunk.
    """

    selection: Selection = "all"
    row_stride: int | None = None
    block: int = 256
    capacity: float = CAPACITY
    guided: bool = False
    layer: int = -1


class IndexGroup(NamedTuple):
    """A full layer's index inputs and the attention of every layer that uses its selection."""

    inputs: IndexInputs
    attention: tuple[Float[Array, "batch rows S"], ...]
    selected: Bool[Array, "batch T S"] | None


class LayerResult(NamedTuple):
    """What one decoder layer leaves; load and drop are None and 0 in a dense layer."""

    x: Float[Array, "batch T D"]
    keys: Keys
    selected: Bool[Array, "batch T S"] | None
    groups: tuple[IndexGroup, ...]
    load: Float[Array, " E"] | None
    drop: Float[Array, ""] | float
    guided: tuple[Float[Array, "batch heads T S"], ...]


class Trunk(NamedTuple):
    """Result of all main layers; `hidden` is after the final norm."""

    hidden: Float[Array, "batch T D"]
    loads: tuple[Float[Array, " E"], ...]
    drop: Float[Array, ""]
    groups: tuple[IndexGroup, ...]
    guided: tuple[Float[Array, "batch heads T S"], ...]


def decoder_layer(
    shape: TinyShape,
    weights: Parameters,
    bias: Float[Array, " E"] | None,
    x: Float[Array, "batch T D"],
    turn: Rotation,
    mode: Mode,
    selected: Bool[Array, "batch T S"] | None = None,
    groups: tuple[IndexGroup, ...] = (),
) -> LayerResult:
    """Run one layer; a full layer makes a new selection, a shared layer uses the last one."""
    normed = rms_norm(x, weights["input_norm"], shape.rms_norm_eps)
    latent, queries = project_queries(shape, weights, normed, turn)
    keys = project_keys(shape, weights, normed, turn)
    if "indexer.query" in weights:
        if mode.selection == "indexer":
            selected = select_keys(shape, weights, latent, normed, turn, block=mode.block)
        elif mode.selection == "recent":
            selected = recent_keys(x.shape[1], shape.index_topk)
        elif mode.selection == "random":
            selected = random_keys(x.shape[1], shape.index_topk, mode.layer)
        if mode.row_stride is not None:
            # Detached: the indexer's loss must not pull on the trunk.
            frozen_latent, frozen_x = jax.lax.stop_gradient((latent, normed))
            inputs = index_inputs(
                shape, weights, frozen_latent, frozen_x, turn, row_stride=mode.row_stride
            )
            groups = (*groups, IndexGroup(inputs, (), selected))
    output, sampled = attend(
        shape, queries, keys, selected, block=mode.block, row_stride=mode.row_stride
    )
    if sampled is not None:
        last = groups[-1]
        groups = (*groups[:-1], last._replace(attention=(*last.attention, sampled)))
    attended = x + output @ weights["attention.o"]
    y, load, drop = feed_forward(shape, weights, bias, attended, mode)
    heads = GUIDED_HEADS.get(mode.layer, ()) if mode.guided else ()
    guided = (head_log_weights(shape, queries, keys, heads),) if heads else ()
    return LayerResult(y, keys, selected, groups, load, drop, guided)


def feed_forward(
    shape: TinyShape,
    weights: Parameters,
    bias: Float[Array, " E"] | None,
    x: Float[Array, "batch T D"],
    mode: Mode,
) -> tuple[Float[Array, "batch T D"], Float[Array, " E"] | None, Float[Array, ""] | float]:
    """Add the dense MLP (bias None) or the experts to the residual stream."""
    normed = rms_norm(x, weights["post_norm"], shape.rms_norm_eps)
    if bias is None:
        return x + gated_mlp(normed, weights["mlp.gate_up"], weights["mlp.down"]), None, 0.0
    mixed, load, drop = mix_experts(shape, weights, bias, normed, capacity=mode.capacity)
    return x + mixed, load, drop


def run_trunk(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array, "sparse E"],
    tokens: Int[Array, "batch T"],
    mode: Mode,
) -> Trunk:
    """Run the main layers on whole sequences; `bias` rows follow `shape.sparse_layers`."""
    turn = rotation(jnp.arange(tokens.shape[1]), shape.qk_rope_head_dim, shape.rope_theta)
    x = parameters["embed"][tokens]
    selected, groups, loads, drops, guided = None, (), [], [], ()
    for layer in range(shape.num_hidden_layers):
        weights = layer_parameters(parameters, f"layers.{layer}")
        layer_bias = None if shape.is_dense(layer) else bias[shape.sparse_layers.index(layer)]
        layer_mode = dataclasses.replace(mode, layer=layer)
        result = decoder_layer(
            shape, weights, layer_bias, x, turn, layer_mode, selected=selected, groups=groups
        )
        x, selected, groups = result.x, result.selected, result.groups
        guided = guided + result.guided
        if result.load is not None:
            loads.append(result.load)
            drops.append(result.drop)
    hidden = rms_norm(x, parameters["norm"], shape.rms_norm_eps)
    return Trunk(hidden, tuple(loads), jnp.mean(jnp.stack(drops)), groups, guided)


class Drafts(NamedTuple):
    """Result of the MTP layer; `hidden[j]` (after its norm) predicts token i + j + 2 at row i."""

    hidden: tuple[Float[Array, "batch T D"], ...]
    load: Float[Array, " E"]
    groups: tuple[IndexGroup, ...]


def run_drafts(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array, " E"],
    hidden: Float[Array, "batch T D"],
    tokens: Int[Array, "batch T_plus"],
    mode: Mode,
    *,
    steps: int,
) -> Drafts:
    """Run the MTP layer `steps` times, each on the last step's normed output.

    Step j (from 0) reads token i + j + 1 at row i, at position i + j. Keys, values and selection
    are those of step 0, as in GLM-5.2 and later (index_share_for_mtp_iteration).
    """
    weights = layer_parameters(parameters, f"layers.{shape.num_hidden_layers}")
    count = hidden.shape[1]
    first: LayerResult | None = None
    outputs, recycled = [], hidden
    for step in range(steps):
        positions = jnp.arange(count) + step
        turn = rotation(positions, shape.qk_rope_head_dim, shape.rope_theta)
        merged = merge_draft_inputs(
            shape, parameters, tokens[:, step + 1 : step + 1 + count], recycled
        )
        if first is None:
            first = decoder_layer(shape, weights, bias, merged, turn, mode)
            x = first.x
        else:
            x = later_draft_layer(shape, weights, bias, merged, turn, mode, first)
        recycled = rms_norm(x, parameters["mtp.norm"], shape.rms_norm_eps)
        outputs.append(recycled)
    if first is None or first.load is None:
        raise ValueError(f"{steps=}: the MTP layer has to run at least once, and it has experts.")
    return Drafts(tuple(outputs), first.load, first.groups)


def merge_draft_inputs(
    shape: TinyShape,
    parameters: Parameters,
    tokens: Int[Array, "batch T"],
    hidden: Float[Array, "batch T D"],
) -> Float[Array, "batch T D"]:
    """Merge the next token's embedding (first) and the hidden state into the MTP layer's input."""
    embedded = rms_norm(
        parameters["embed"][tokens], parameters["mtp.embed_norm"], shape.rms_norm_eps
    )
    carried = rms_norm(hidden, parameters["mtp.hidden_norm"], shape.rms_norm_eps)
    return jnp.concatenate([embedded, carried], -1) @ parameters["mtp.merge"]


def later_draft_layer(
    shape: TinyShape,
    weights: Parameters,
    bias: Float[Array, " E"],
    x: Float[Array, "batch T D"],
    turn: Rotation,
    mode: Mode,
    first: LayerResult,
) -> Float[Array, "batch T D"]:
    """Run the MTP layer with the keys and the selection of its first step."""
    normed = rms_norm(x, weights["input_norm"], shape.rms_norm_eps)
    _, queries = project_queries(shape, weights, normed, turn)
    output, _ = attend(
        shape, queries, first.keys, first.selected, block=mode.block, row_stride=None
    )
    attended = x + output @ weights["attention.o"]
    y, _, _ = feed_forward(shape, weights, bias, attended, mode)
    return y
