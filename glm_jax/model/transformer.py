"""The network's modules in either storage form, and the loop over layers in either loop form.

Storage: ``per_layer`` keeps one leaf per weight and layer; ``stacked`` keeps one leaf per weight
with the layers in front, few leaves for a cheap dispatch. Loop: ``unrolled`` indexes layers
statically; ``scan`` runs the longest repeating run of layers as one ``lax.scan`` body (fast to
compile, but it copies a layer's weights per turn). One layer function serves all forms.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm_jax.model.block import Block
from glm_jax.model.cache import Cache
from glm_jax.model.config import GlmConfig
from glm_jax.model.indexer import Indexer
from glm_jax.model.layer import Context, Layer, Stream, run_layer
from glm_jax.model.linear import module_of_layer
from glm_jax.model.mlp import Mlp
from glm_jax.model.moe import Moe, MoeLayer
from glm_jax.model.norm import rms_norm
from glm_jax.model.selection import empty_selection

GROUPS = {"blocks": Block, "indexers": Indexer, "mlps": Mlp, "moes": Moe}


class Transformer(nnx.Module):
    """All weights. Each group holds a list of modules, or one module of stacked leaves."""

    def __init__(self, tree: dict) -> None:
        """Wrap arrays (or shapes) laid out by ``parameter_tree``."""
        self.embed = nnx.Param(tree["embed"])  # [V, D]
        self.norm = nnx.Param(tree["norm"])  # [D]
        self.head = nnx.Param(tree["head"])  # [V, D]
        for name, module in GROUPS.items():
            members = tree[name]
            stacked = isinstance(members, dict)
            setattr(self, name, module(members) if stacked else nnx.List(map(module, members)))
        self.mtp = nnx.Dict({name: nnx.Param(array) for name, array in tree["mtp"].items()})

    def member(self, group: str, index: int | Int[Array, ""]) -> Any:
        """One module of a group; a traced index needs stacked storage."""
        members: Any = getattr(self, group)
        stacked = isinstance(members, GROUPS[group])
        return member_of_stack(members, index) if stacked else as_member(members[index])


def member_of_stack(stack: Any, index: int | Int[Array, ""]) -> Any:
    """One module of a stack; experts stay in it, for a slice of them would be copied."""
    if isinstance(stack, Moe):
        return MoeLayer(stack, index)
    return module_of_layer(stack, index)


def as_member(module: Any) -> Any:
    """A module of its own, in the form that a layer takes."""
    return MoeLayer(module) if isinstance(module, Moe) else module


class _Run(NamedTuple):
    """``repeats`` turns of the layers first .. first + period - 1."""

    first: int
    period: int
    repeats: int


def run_layers(
    model: Transformer,
    x: Float[Array, "N D"],
    cache: Cache,
    context: Context,
    *,
    loop: str,
    topk: int,
) -> Stream:
    """All decoder layers and the final norm; ``topk`` is the width of the selection."""
    config = context.form.config
    sparse_layers = sum(map(config.is_sparse, range(config.num_hidden_layers)))
    counts = jnp.zeros((sparse_layers, config.n_routed_experts), jnp.int32)
    stream = Stream(x, cache, empty_selection(x.shape[0], topk), counts)
    for run in _runs(config, loop):
        if run.repeats == 1:
            for layer in range(run.first, run.first + run.period):
                stream = run_layer(layer_at(model, config, layer, 0, 0), stream, context)
        else:
            stream = _scan_run(model, run, stream, context)
    return stream._replace(x=rms_norm(stream.x, model.norm[...], config.rms_norm_eps))


def layer_at(
    model: Transformer,
    config: GlmConfig,
    layer: int,
    period: int,
    turn: int | Int[Array, ""],
) -> Layer:
    """The layer ``turn`` periods after ``layer``; all its group indices advance alike."""

    def rank(flags: list[bool]) -> int | Int[Array, ""]:
        return sum(flags[:layer]) + turn * sum(flags[layer : layer + period])

    full = [config.has_indexer(i) for i in range(config.num_hidden_layers)]
    sparse = [config.is_sparse(i) for i in range(config.num_hidden_layers)]
    dense = [not flag for flag in sparse]
    group, index = ("moes", rank(sparse)) if sparse[layer] else ("mlps", rank(dense))
    plane = layer + turn * period
    return Layer(
        block=model.member("blocks", plane),
        indexer=model.member("indexers", rank(full)) if full[layer] else None,
        feed_forward=model.member(group, index),
        plane=plane,
        index_plane=rank(full),
        sparse_before=rank(sparse),
    )


def _scan_run(model: Transformer, run: _Run, stream: Stream, context: Context) -> Stream:
    """One ``lax.scan`` over the turns of a run."""

    def body(carry: Stream, turn: Int[Array, ""]) -> tuple[Stream, None]:
        for layer in range(run.first, run.first + run.period):
            carry = run_layer(
                layer_at(model, context.form.config, layer, run.period, turn), carry, context
            )
        return carry, None

    return jax.lax.scan(body, stream, jnp.arange(run.repeats))[0]


def _runs(config: GlmConfig, loop: str) -> Iterator[_Run]:
    """Cut the layers into an unrolled head, a scanned run, an unrolled tail."""
    layers = config.num_hidden_layers
    if loop == "unrolled":
        yield _Run(0, layers, 1)
        return
    best = _longest_run(config)
    if best.first:
        yield _Run(0, best.first, 1)
    yield best
    end = best.first + best.period * best.repeats
    if end < layers:
        yield _Run(end, layers - end, 1)


def _longest_run(config: GlmConfig) -> _Run:
    """The run that saves most layer bodies; a single turn of everything when nothing repeats."""
    layers = config.num_hidden_layers
    kinds = [(config.has_indexer(i), config.is_sparse(i)) for i in range(layers)]
    best = _Run(0, layers, 1)
    for period in range(1, layers // 2 + 1):
        for first in range(layers - 2 * period + 1):
            same = first + period
            while same < layers and kinds[same] == kinds[same - period]:
                same += 1
            repeats = (same - first) // period
            if (repeats - 1) * period > (best.repeats - 1) * best.period:
                best = _Run(first, period, repeats)
    return best
