"""The kinds of pieces that a PIECEWISE step is made of.

A piece is a part of a step compiled for a number of compact rows: a one-dimensional bucket, where a
whole step needs a cell of the grid. Layers share pieces (weights and planes are arguments), so a
dozen small programs run any step that fits their rows; the MTP layer takes those of the other full
layers. They are the same functions that a whole step runs. The cache is donated to the pieces that
write it and only read by attention.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.model.cache import Cache
from glm_jax.model.compact_rows import CompactRows, compact_rows, places_of
from glm_jax.model.config import GlmConfig
from glm_jax.model.draft_pieces import DraftPieces
from glm_jax.model.draw import draw_tokens
from glm_jax.model.indexer import IndexRows
from glm_jax.model.layer import (
    Form,
    Planes,
    after_attention,
    attend_chunks,
    attend_groups,
    before_attention,
    keys_of,
)
from glm_jax.model.members import Member, merger_of
from glm_jax.model.norm import rms_norm
from glm_jax.model.piece_function import Function, first_rank, with_rank
from glm_jax.model.rows import Rows, build_rows
from glm_jax.model.selection import empty_selection, select_chunks, select_groups, to_entries
from glm_jax.model.slots import Slots, update_slots
from glm_jax.model.step import selection_width
from glm_jax.model.transformer import Transformer
from pallas_kernels.sparse_mla import Queries, Selection, UpProjections

Values = Float[Array, "n H U"]


class Pieces:
    """The pieces of one model.

    Every array of slots, inputs and cache keeps its leading rank axis (size 1) between pieces.
    """

    def __init__(self, model: Transformer, form: Form, page_size: int) -> None:
        """Prepare; nothing is traced.

        Args:
            model: the modules, with arrays or with shapes.
            form: the model's config and how it is run.
            page_size: entries per page.
        """
        self._form = form
        self._page_size = page_size
        groups = ("blocks", "indexers", "mlps", "moes")
        self._merge = {name: merger_of(model, name) for name in groups if getattr(model, name)}
        self._drafting = DraftPieces(self._merge, form)

    @property
    def config(self) -> GlmConfig:
        """The model's config."""
        return self._form.config

    def functions(self) -> Mapping[str, Function]:
        """Every kind of piece and what it donates, by name."""
        return {
            "embed": Function(self.embed, (1,)),
            "before_full": Function(self.before_full, (3,)),
            "before_shared": Function(self.before_shared, (2,)),
            "chunks_full": Function(self.chunks_full, (5, 6)),
            "chunks_shared": Function(self.chunks_shared, (4,)),
            "groups_full": Function(self.groups_full, (5, 6)),
            "groups_shared": Function(self.groups_shared, (4,)),
            "after_dense": Function(partial(self.after, "mlps"), (2,)),
            "after_moe": Function(partial(self.after, "moes"), (2,)),
            "head": Function(self.head, (4,)),
            **self._drafting.functions(),
        }

    def embed(
        self, embed: Float[Array, "V D"], slots: Slots, inputs: StepInputs, size: int
    ) -> tuple[Slots, CompactRows, Float[Array, "n D"], Selection]:
        """Apply resets and page updates, lay out the rows, look up their tokens.

        ``size`` is the number of compact rows, static.
        """
        one, inputs = first_rank(slots), first_rank(inputs)
        one = update_slots(one, inputs)
        config = self._form.config
        rows, tokens = compact_rows(
            self._rows(one, inputs),
            one,
            inputs.group_slot,
            size,
            rope=(config.qk_rope_head_dim, config.rope_theta),
        )
        selection = empty_selection(size, selection_width(self._form, one, self._page_size))
        x = embed[tokens].astype(self._form.dtype)
        return with_rank(one), rows, x, selection

    def before_full(
        self,
        block: Member,
        indexer: Member,
        x: Float[Array, "n D"],
        cache: Cache,
        rows: CompactRows,
        planes: Planes,
    ) -> tuple[Queries, IndexRows, Values, Cache]:
        """Project and write the rows of a full layer."""
        queries, index, cache = before_attention(
            self._merge["blocks"](block),
            self._merge["indexers"](indexer),
            x,
            first_rank(cache),
            rows.entries,
            rows.turn,
            planes,
            self._form,
        )
        assert index is not None
        return queries, index, self._no_values(queries), with_rank(cache)

    def before_shared(
        self,
        block: Member,
        x: Float[Array, "n D"],
        cache: Cache,
        rows: CompactRows,
        planes: Planes,
    ) -> tuple[Queries, Values, Cache]:
        """Project and write the rows of a shared layer."""
        queries, _, cache = before_attention(
            self._merge["blocks"](block),
            None,
            x,
            first_rank(cache),
            rows.entries,
            rows.turn,
            planes,
            self._form,
        )
        return queries, self._no_values(queries), with_rank(cache)

    def chunks_full(
        self,
        block: Member,
        queries: Queries,
        index: IndexRows,
        cache: Cache,
        rows: CompactRows,
        selection: Selection,
        values: Values,
        planes: Planes,
    ) -> tuple[Selection, Values]:
        """Select and attend for the prefill rows."""
        keys = keys_of(first_rank(cache), planes, self._form, topk=selection.entries.shape[1])
        found = select_chunks(index, rows.tiles, keys)
        own = to_entries(found, rows.page_table, rows.slots, self._page_size)
        at = rows.chunk_rows
        selection = _put(selection, at, _take(own, at))
        return selection, self.chunks_shared(block, queries, cache, rows, values, selection, planes)

    def chunks_shared(
        self,
        block: Member,
        queries: Queries,
        cache: Cache,
        rows: CompactRows,
        values: Values,
        selection: Selection,
        planes: Planes,
    ) -> Values:
        """Attend for the prefill rows with the selection there is."""
        # No tile names a row past the prefill rows.
        out = attend_chunks(
            queries, selection, rows.tiles, first_rank(cache), planes, self._up(block), self._form
        )
        at = rows.chunk_rows
        return values.at[at].set(_take(out, at), mode="drop")

    def groups_full(
        self,
        block: Member,
        queries: Queries,
        index: IndexRows,
        cache: Cache,
        rows: CompactRows,
        selection: Selection,
        values: Values,
        planes: Planes,
    ) -> tuple[Selection, Values]:
        """Select and attend for the decode rows."""
        keys = keys_of(first_rank(cache), planes, self._form, topk=selection.entries.shape[1])
        chosen = _take(index, rows.group_rows)
        page_table = rows.page_table[rows.group_slots]
        found = select_groups(
            chosen.queries, chosen.weights, rows.group_positions, page_table, keys
        )
        slots = jnp.broadcast_to(rows.group_slots[:, None], rows.group_rows.shape)
        own = to_entries(found, rows.page_table, slots, self._page_size)
        selection = _put(selection, rows.group_rows, own)
        return selection, self.groups_shared(block, queries, cache, rows, values, selection, planes)

    def groups_shared(
        self,
        block: Member,
        queries: Queries,
        cache: Cache,
        rows: CompactRows,
        values: Values,
        selection: Selection,
        planes: Planes,
    ) -> Values:
        """Attend for the decode rows with the selection there is."""
        at = rows.group_rows.reshape(-1)
        chosen = _take(selection, at)
        chosen = chosen._replace(count=jnp.where(at < values.shape[0], chosen.count, 0))
        out = attend_groups(
            _take(queries, at), chosen, first_rank(cache), planes, self._up(block), self._form
        )
        return values.at[at].set(out, mode="drop")

    def after(
        self,
        group: str,
        block: Member,
        feed_forward: Member,
        x: Float[Array, "n D"],
        values: Values,
        rows: CompactRows,
    ) -> tuple[Float[Array, "n D"], Int[Array, " E"] | None]:
        """Add attention and the feed-forward; ``group`` ("mlps" or "moes") is static."""
        return after_attention(
            self._merge["blocks"](block),
            self._merge[group](feed_forward),
            x,
            values,
            rows.valid,
            self._form,
        )

    def head(
        self,
        norm: Float[Array, " D"],
        head: Float[Array, "V D"],
        x: Float[Array, "n D"],
        expert_rows: tuple[Int[Array, " E"], ...],
        slots: Slots,
        inputs: StepInputs,
    ) -> tuple[Slots, StepOutputs]:
        """Norm, draw, advance the slots; hidden rows go back to the layout of the inputs.

        ``expert_rows`` has the counts of every layer with experts.
        """
        one, inputs = first_rank(slots), first_rank(inputs)
        hidden = rms_norm(x, norm, self._form.config.rms_norm_eps)
        rows = self._rows(one, inputs)
        place = places_of(rows.valid, x.shape[0])
        one, drawn = draw_tokens(head, hidden, one, rows, inputs, place)
        safe = jnp.minimum(place, x.shape[0] - 1)
        laid_out = jnp.where(rows.valid[:, None], hidden[safe], 0.0)
        experts = self._form.config.n_routed_experts
        counts = jnp.stack(expert_rows) if expert_rows else jnp.zeros((0, experts), jnp.int32)
        requests = inputs.chunk_slot.size + inputs.group_slot.size
        drafts = jnp.zeros((requests, one.drafts.shape[-1]), jnp.int32)
        return with_rank((one, drawn.outputs(drafts, laid_out, counts)))

    def _rows(self, slots: Slots, inputs: StepInputs) -> Rows:
        """The rows in the layout of the inputs; ``compact_rows`` marks its own pads."""
        return build_rows(
            slots,
            inputs,
            page_size=self._page_size,
            pool_entries=0,
            tile_rows=self._form.tile_rows,
        )

    def _up(self, block: Member) -> UpProjections:
        return self._merge["blocks"](block).attention.up(self._form.dtype)

    def _no_values(self, queries: Queries) -> Values:
        """Zeros; attention fills in its segment's rows."""
        rows, heads, _ = queries.nope.shape
        return jnp.zeros((rows, heads, self._form.config.v_head_dim), queries.nope.dtype)


def _take(tree: Any, at: Array) -> Any:
    """Gather rows; an index past the end reads the last row."""
    return jax.tree.map(lambda array: array[jnp.minimum(at, array.shape[0] - 1)], tree)


def _put(selection: Selection, at: Array, rows: Selection) -> Selection:
    """Scatter rows; an index past the end is dropped."""
    pairs = zip(selection, rows, strict=True)
    return Selection(*(old.at[at].set(new, mode="drop") for old, new in pairs))
