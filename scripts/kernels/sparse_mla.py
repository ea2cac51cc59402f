"""sparse_mla over selections as the indexer makes them: ascending positions of full contexts."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm_jax.model.rows import TILE_ROWS
from pallas_kernels.pool import PagedPool
from pallas_kernels.sparse_mla import Queries, Selection, UpProjections, reference
from pallas_kernels.tiles import Tiles
from scripts.kernels.pools import PAGE_SIZE, entry_bytes, page_table, random_pool
from scripts.kernels.problem import relative_error
from scripts.kernels.rows import last_rows

LATENT, ROPE = 512, 64


class Heads(NamedTuple):
    """Of the model: how many, the width of a key without its rotated part, and of a value."""

    number: int
    nope: int
    value: int


@dataclass(frozen=True)
class SparseMla:
    """One call.

    Attributes:
        segment: "decode" or "prefill".
        requests: each with pages of its own.
        rows: of each request; whole tiles in a prefill.
        heads: of the model.
        pages: of each request, all in use.
        topk: entries that a row selects.
        entry: storage format.
        weights: dtype of the up-projections and of the queries that they meet.
        planes: of the pool.
        tile_rows: rows that a prefill takes together, as the model cuts its prompts.
    """

    segment: str
    requests: int
    rows: int
    heads: Heads
    pages: int
    topk: int
    entry: str
    weights: str
    planes: int
    tile_rows: int = TILE_ROWS

    operator: ClassVar[str] = "sparse_mla"

    @property
    def function(self) -> str:
        """Of the segment."""
        return f"sparse_mla_{self.segment}"

    @property
    def name(self) -> str:
        """Sizes and format."""
        size = f"{self.requests}x{self.rows} rows, {self.heads.number} heads"
        return f"{self.segment} {size}, {self.topk} of {self.seen_by_all} entries {self.entry}"

    @property
    def settings(self) -> dict[str, Any]:
        """The softmax scale, that of the keys before absorption."""
        return {"scale": (self.heads.nope + ROPE) ** -0.5}

    @property
    def seen_by_all(self) -> int:
        """Positions of a request that its first row may see."""
        return self.pages * PAGE_SIZE - self.rows + 1

    @property
    def flops(self) -> int:
        """Of the absorbed form; a prefill also takes queries to latents, and latents to values."""
        rows = self.requests * self.rows * self.heads.number
        scores = 2 * rows * self.topk * (2 * LATENT + ROPE)
        if self.segment == "decode":
            return scores
        return scores + 2 * rows * LATENT * (self.heads.nope + self.heads.value)

    @property
    def bytes(self) -> int:
        """Distinct entries of each request once (see ``_positions``); queries and results."""
        distinct = self.requests * min(self.rows * self.topk, self.seen_by_all)
        rows = self.requests * self.rows
        moved = distinct * entry_bytes(self.entry, LATENT + ROPE) + 4 * rows * self.topk
        heads, wide = self.heads, jnp.dtype(self.weights).itemsize
        if self.segment == "decode":
            return moved + 4 * rows * heads.number * (2 * LATENT + ROPE)
        moved += rows * heads.number * (wide * (heads.nope + heads.value) + 4 * ROPE)
        return moved + wide * heads.number * LATENT * (heads.nope + heads.value)

    def inputs(self) -> tuple[Any, ...]:
        """Queries, selected entries, where the rows stand, the cache (see ``Problem``)."""
        table = page_table(self.requests, self.pages)
        pool = random_pool(self.entry, LATENT + ROPE, self.planes, table.size + 1)
        positions = self._positions()
        request = np.arange(positions.shape[0]) // self.rows
        page, offset = np.divmod(positions, PAGE_SIZE)
        entries = jnp.asarray(table[request[:, None], page] * PAGE_SIZE + offset, jnp.int32)
        count = jnp.full(positions.shape[0], self.topk, jnp.int32)
        number, nope, value = self.heads
        keys = iter(jax.random.split(jax.random.key(1), 4))

        def normal(*shape: int) -> Float[Array, "..."]:
            return jax.random.normal(next(keys), shape)

        rope = normal(positions.shape[0], number, ROPE)
        if self.segment == "decode":
            return normal(positions.shape[0], number, LATENT), rope, entries, count, pool
        queries = Queries(normal(positions.shape[0], number, nope).astype(self.weights), rope)
        up = UpProjections(
            (normal(number, nope, LATENT) * nope**-0.5).astype(self.weights),
            (normal(number, LATENT, value) * LATENT**-0.5).astype(self.weights),
        )
        selection = Selection(jnp.asarray(positions, jnp.int32), entries, count)
        return queries, selection, last_rows(self.rows, table, self.tile_rows), pool, up

    def error(self, inputs: tuple[Any, ...], outputs: Any) -> Float[Array, ""]:
        """Against the reference, a few rows at a time, since it gathers all entries of its rows."""
        if self.segment == "decode":
            *by_row, pool = inputs

            def attend(row: tuple[Array, Array, Array, Array]) -> Array:
                latent, rope, entries, count = (array[None] for array in row)
                return reference.sparse_mla_decode(
                    latent, rope, entries, count, pool, **self.settings
                )[0]

            wanted = jax.lax.map(attend, tuple(by_row))
        else:
            wanted = self._prefilled(*inputs)
        return relative_error(wanted, outputs)

    def _prefilled(
        self, queries: Queries, selection: Selection, tiles: Tiles, pool: PagedPool, up: Any
    ) -> Float[Array, "N H U"]:
        """The reference's answer, tile by tile."""

        def attend(tile: tuple[Queries, Selection, Tiles]) -> Array:
            queries, selection, tiles = tile
            own = tiles._replace(rows=jnp.arange(self.tile_rows, dtype=jnp.int32))
            alone = Tiles(*(array[None] for array in own))
            mixed = reference.sparse_mla_prefill(
                queries, selection, alone, pool, up, **self.settings
            )
            return mixed.astype(jnp.float32)

        by_tile = jax.tree.map(
            lambda array: array.reshape(-1, self.tile_rows, *array.shape[1:]), (queries, selection)
        )
        wanted = jax.lax.map(attend, (*by_tile, tiles))
        return wanted.reshape(-1, *wanted.shape[2:])

    def _positions(self) -> Int[np.ndarray, "rows K"]:
        """What each row selects: the rows of a request take turns at one random order.

        So no entry is selected twice before all have been: with few rows a cache cannot help.
        """
        rng = np.random.default_rng(1)
        turns = np.arange(self.rows * self.topk).reshape(self.rows, self.topk) % self.seen_by_all
        orders = [rng.permutation(self.seen_by_all) for _ in range(self.requests)]
        return np.sort(np.concatenate([order[turns] for order in orders]), axis=1)
