"""One module of a model's group as plain leaves: what a piece gets of a layer.

With per-layer storage these are the layer's own arrays. With stacked storage they are the whole
stack and the layer's place in it, so a piece copies that layer's slice (experts excepted, they are
read in place); one program per kind then still serves all layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from glm_jax.model.transformer import GROUPS, Transformer, as_member, member_of_stack


class Member(NamedTuple):
    """Leaves of a module, or of a stack of them and the place in it."""

    leaves: tuple[Any, ...]
    place: Int[Array, ""]


def member_of(model: Transformer, group: str, index: int) -> Member:
    """Take one module of a group apart."""
    module, _ = _module(model, group, index)
    return Member(tuple(jax.tree.leaves(nnx.split(module)[1])), jnp.asarray(index, jnp.int32))


def merger_of(model: Transformer, group: str) -> Callable[[Member], Any]:
    """A function that rebuilds a module of a group inside a trace."""
    module, stacked = _module(model, group, 0)
    graph, state = nnx.split(module)
    structure = jax.tree.structure(state)

    def merge(member: Member) -> Any:
        module = nnx.merge(graph, jax.tree.unflatten(structure, member.leaves))
        return member_of_stack(module, member.place) if stacked else as_member(module)

    return merge


def _module(model: Transformer, group: str, index: int) -> tuple[Any, bool]:
    """The module that holds a member, and whether it is a stack."""
    members: Any = getattr(model, group)
    stacked = isinstance(members, GROUPS[group])
    return (members if stacked else members[index]), stacked
