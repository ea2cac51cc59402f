"""What drafts: the MTP layer with its own norms, and the embedding and head of the target.

A whole step takes it out of the model (``drafter_of``), a PIECEWISE step puts it together from the
arrays that its pieces get. Nothing here knows about steps or requests.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.block import Block
from glm_jax.model.config import GlmConfig
from glm_jax.model.head import logits_of
from glm_jax.model.indexer import Indexer
from glm_jax.model.layer import Layer, Planes
from glm_jax.model.moe import MoeLayer
from glm_jax.model.norm import rms_norm
from glm_jax.model.transformer import Transformer


class Drafter(NamedTuple):
    """The weights of a draft pass.

    Attributes:
        embed: of the target.
        head: of the target.
        own: ``embed_norm``, ``hidden_norm`` and ``norm`` ``[D]``, ``merge`` ``[2D, D]``.
        layer: makes the decoder layer, in the branch of the program that runs it: a slice of
            stacked weights that enters a branch is a copy.
    """

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]
    own: Mapping[str, Array]
    layer: Callable[[], Layer]

    def merge(
        self,
        hidden: Float[Array, "N D"],
        tokens: Int[Array, " N"],
        start: Bool[Array, " N"],
        config: GlmConfig,
    ) -> Float[Array, "N D"]:
        """The layer's input: norms of the tokens' embeddings, then of ``hidden``, times W.

        Args:
            hidden: the target's final-norm rows, or y of the pass before.
            tokens: the token after each row.
            start: rows at position 0, whose embedding counts as zero.
            config: the model's.
        """
        embedded = jnp.where(start[:, None], 0, self.embed[tokens]).astype(hidden.dtype)
        halves = (
            rms_norm(embedded, self.own["embed_norm"], config.rms_norm_eps),
            rms_norm(hidden, self.own["hidden_norm"], config.rms_norm_eps),
        )
        return jnp.concatenate(halves, axis=-1) @ self.own["merge"].astype(hidden.dtype)

    def norm(self, x: Float[Array, "N D"], config: GlmConfig) -> Float[Array, "N D"]:
        """y: what the head and the next pass take of the layer's output."""
        return rms_norm(x, self.own["norm"], config.rms_norm_eps)

    def best_tokens(self, y: Float[Array, "R D"]) -> Int[Array, " R"]:
        """The greedy draft behind each row."""
        logits = logits_of(y, self.head, jnp.arange(y.shape[0]))
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def drafter_of(model: Transformer, config: GlmConfig) -> Drafter:
    """The drafter of a model that has an MTP layer."""
    own = {name: array[...] for name, array in model.mtp.items()}
    return Drafter(model.embed[...], model.head[...], own, partial(_mtp_layer, model, config))


def _mtp_layer(model: Transformer, config: GlmConfig) -> Layer:
    """The decoder layer behind the target's: the last module of each group."""
    before = range(config.num_hidden_layers)
    return as_mtp_layer(
        model.member("blocks", config.num_hidden_layers),
        model.member("indexers", sum(map(config.has_indexer, before))),
        model.member("moes", sum(map(config.is_sparse, before))),
        config,
    )


def as_mtp_layer(
    block: Block, indexer: Indexer, feed_forward: MoeLayer, config: GlmConfig
) -> Layer:
    """The MTP layer of its modules."""
    return Layer(block, indexer, feed_forward, *mtp_planes(config), sparse_before=0)


def mtp_planes(config: GlmConfig) -> Planes:
    """The last plane of each array of the cache."""
    number = config.num_hidden_layers
    return Planes(number, sum(map(config.has_indexer, range(number))))
