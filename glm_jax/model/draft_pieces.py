"""The two pieces around the MTP layer of a PIECEWISE step; the layer itself runs as any full one.

"draft_begin" makes the layer's input once the tokens are drawn. "draft_end" has all later passes:
they run over one row per request.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache
from glm_jax.model.compact_rows import CompactRows
from glm_jax.model.config import GlmConfig
from glm_jax.model.drafter import Drafter, as_mtp_layer
from glm_jax.model.draw import Drawn
from glm_jax.model.layer import Form, Layer
from glm_jax.model.members import Member, member_of
from glm_jax.model.mtp import (
    DraftRows,
    Pass,
    draft_rows,
    draft_tokens,
    following_tokens,
    last_rows,
)
from glm_jax.model.piece_function import Function, first_rank, with_rank
from glm_jax.model.slots import Slots, keep_drafts
from glm_jax.model.transformer import Transformer
from pallas_kernels.sparse_mla import Selection


class DraftMembers(NamedTuple):
    """The weights of the drafter: ``Drafter`` with its layer taken apart."""

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]
    own: Mapping[str, Array]
    block: Member
    indexer: Member
    feed_forward: Member


def draft_members(model: Transformer, config: GlmConfig) -> DraftMembers:
    """Take the drafter of a model apart; ``model`` holds arrays or shapes."""
    before = range(config.num_hidden_layers)
    return DraftMembers(
        embed=model.embed.get_value(),
        head=model.head.get_value(),
        own={name: array.get_value() for name, array in model.mtp.items()},
        block=member_of(model, "blocks", config.num_hidden_layers),
        indexer=member_of(model, "indexers", sum(map(config.has_indexer, before))),
        feed_forward=member_of(model, "moes", sum(map(config.is_sparse, before))),
    )


class DraftPieces:
    """The pieces of one model's drafter."""

    def __init__(self, merge: Mapping[str, Callable[[Member], Any]], form: Form) -> None:
        """Prepare; nothing is traced.

        Args:
            merge: what rebuilds a module of each group.
            form: the model's config and how it is run.
        """
        self._merge = merge
        self._form = form

    def functions(self) -> Mapping[str, Function]:
        """Both pieces and what they donate."""
        return {
            "draft_begin": Function(self.draft_begin, ()),
            # Passes that share the first one's selection only read the cache.
            "draft_end": Function(self.draft_end, (4,) if self._shares else (3, 4)),
        }

    def draft_begin(
        self, members: DraftMembers, rows: CompactRows, inputs: StepInputs, outputs: StepOutputs
    ) -> tuple[Float[Array, "n D"], DraftRows]:
        """The input of the MTP layer, and where drafts begin; ``outputs`` are those of "head"."""
        inputs, outputs = first_rank(inputs), first_rank(outputs)
        drawn = Drawn(outputs.chunk_tokens, outputs.group_tokens, outputs.group_accepted)
        taken = jnp.minimum(rows.taken, outputs.hidden.shape[0] - 1)
        following = jnp.where(rows.valid, following_tokens(inputs, drawn)[taken], 0)
        start = rows.positions == 0
        x = self._drafter(members).merge(outputs.hidden[taken], following, start, self._form.config)
        size = rows.valid.shape[0]
        place = jnp.full(outputs.hidden.shape[0], size, jnp.int32)
        place = place.at[rows.taken].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
        return x, draft_rows(inputs, drawn, rows.positions, place)

    def draft_end(
        self,
        members: DraftMembers,
        x: Float[Array, "n D"],
        selection: Selection,
        cache: Cache,
        slots: Slots,
        starts: DraftRows,
    ) -> tuple[Cache | None, Slots, Int[Array, "ranks R k"]]:
        """The drafter behind its layer's first pass.

        Args:
            members: the weights.
            x: the layer's output.
            selection: of the layer.
            cache: with the layer's entries.
            slots: advanced by "head".
            starts: of "draft_begin".

        Returns:
            The cache, None where no pass writes it; the slots; the drafts.
        """
        one, drafter = first_rank(slots), self._drafter(members)
        requests, num_drafts = starts.lengths.shape[0], one.drafts.shape[-1]
        # No more requests draft than there are rows, however many the layout has room for.
        size = min(x.shape[0], requests)
        number = jnp.nonzero(starts.lengths > 0, size=size, fill_value=requests)[0]
        some = DraftRows(*(array[jnp.minimum(number, requests - 1)] for array in starts))
        some = some._replace(lengths=jnp.where(number < requests, some.lengths, 0))
        first = Pass(drafter.norm(x, self._form.config), selection, first_rank(cache))
        made, written = draft_tokens(
            drafter,
            last_rows(first, some),
            some,
            one.page_table,
            self._form,
            num_drafts=num_drafts,
        )
        one = keep_drafts(one, some.slots, some.lengths, made.tokens)
        drafts = jnp.zeros((requests, num_drafts), jnp.int32)
        drafts = drafts.at[number].set(made.tokens, mode="drop")
        return None if self._shares else with_rank(written), *with_rank((one, drafts))

    @property
    def _shares(self) -> bool:
        return self._form.config.index_share_for_mtp_iteration

    def _drafter(self, members: DraftMembers) -> Drafter:
        def layer() -> Layer:
            return as_mtp_layer(
                self._merge["blocks"](members.block),
                self._merge["indexers"](members.indexer),
                self._merge["moes"](members.feed_forward),
                self._form.config,
            )

        return Drafter(members.embed, members.head, members.own, layer)
