"""index_topk over full contexts: every request's rows are the last ones of its pages."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm_jax.model.rows import TILE_ROWS
from pallas_kernels.index_topk import reference
from pallas_kernels.pool import PagedPool
from pallas_kernels.tiles import Tiles
from scripts.kernels.pools import PAGE_SIZE, entry_bytes, page_table, random_pool
from scripts.kernels.problem import relative_error
from scripts.kernels.rows import last_rows

WIDTH = 128


@dataclass(frozen=True)
class IndexTopk:
    """One call.

    Attributes:
        segment: "decode" or "prefill".
        requests: each with pages of its own.
        rows: of each request; whole tiles in a prefill.
        heads: index heads.
        pages: of each request, all in use.
        topk: K, at most the context of a request's first row.
        keys: storage format.
        planes: of the pool.
        tile_rows: rows that a prefill takes together, as the model cuts its prompts.
    """

    segment: str
    requests: int
    rows: int
    heads: int
    pages: int
    topk: int
    keys: str
    planes: int
    tile_rows: int = TILE_ROWS

    operator: ClassVar[str] = "index_topk"

    @property
    def function(self) -> str:
        """Of the segment."""
        return f"index_topk_{self.segment}"

    @property
    def name(self) -> str:
        """Sizes and format."""
        size = f"{self.requests}x{self.rows} rows, {self.heads} heads"
        return f"{self.segment} {size}, {self.context} keys {self.keys}"

    @property
    def settings(self) -> dict[str, Any]:
        """How many to select."""
        return {"topk": self.topk}

    @property
    def context(self) -> int:
        """Positions of a request."""
        return self.pages * PAGE_SIZE

    @property
    def flops(self) -> int:
        """Scores of the keys that each row may see."""
        pairs = self.rows * self.context - self.rows * (self.rows - 1) // 2
        return 2 * self.requests * pairs * self.heads * WIDTH

    @property
    def bytes(self) -> int:
        """Every request's keys once; queries, weights and selections in 32 bits."""
        keys = self.requests * self.context * entry_bytes(self.keys, WIDTH)
        return keys + 4 * self.requests * self.rows * (self.heads * (WIDTH + 1) + self.topk)

    def inputs(self) -> tuple[Any, ...]:
        """Queries, weights, where the rows stand, keys (see ``Problem``)."""
        pool = random_pool(self.keys, WIDTH, self.planes, self.requests * self.pages + 1)
        numbers, signs = jax.random.split(jax.random.key(1))
        queries = jax.random.normal(numbers, (self.requests, self.rows, self.heads, WIDTH))
        weights = jax.random.normal(signs, (self.requests, self.rows, self.heads))
        table = page_table(self.requests, self.pages)
        if self.segment == "prefill":
            tiles = last_rows(self.rows, table, self.tile_rows)
            flat = queries.reshape(-1, self.heads, WIDTH), weights.reshape(-1, self.heads)
            return *flat, tiles, pool
        positions = np.arange(self.context - self.rows, self.context, dtype=np.int32)
        positions = np.broadcast_to(positions, (self.requests, self.rows))
        return queries, weights, jnp.asarray(positions), jnp.asarray(table), pool

    def error(self, inputs: tuple[Any, ...], outputs: Any) -> Float[Array, ""]:
        """How far the scores of the chosen fall short of the reference's, rank by rank.

        Not which positions: near the K-th score, rounding alone decides. Tile by tile, since the
        reference keeps the products of all heads.
        """
        chosen, count = outputs
        if self.segment == "prefill":
            queries, weights, tiles, keys = inputs
            tiles_of: Tiles = tiles
            positions, table = tiles_of.positions, tiles_of.page_table
            by_tile = (-1, self.tile_rows)
            queries = queries.reshape(*by_tile, *queries.shape[1:])
            weights = weights.reshape(*by_tile, self.heads)
            chosen, count = chosen.reshape(*by_tile, self.topk), count.reshape(by_tile)
        else:
            queries, weights, positions, table, keys = inputs
        shortfall = functools.partial(_shortfall, keys, self.topk)
        worst = jnp.max(jax.lax.map(shortfall, (queries, weights, positions, table, chosen)))
        counted = jnp.all(count == jnp.minimum(positions + 1, self.topk))
        return jnp.where(counted, worst, jnp.inf)


def _shortfall(
    keys: PagedPool, topk: int, tile: tuple[Array, Array, Array, Array, Array]
) -> Float[Array, ""]:
    queries, weights, positions, table, chosen = tile
    best, _ = reference.index_topk_decode(
        queries[None], weights[None], positions[None], table[None], keys, topk=topk
    )
    context = keys.read_pages(table).reshape(-1, WIDTH)
    dots = jnp.maximum(jnp.einsum("rmi,si->rms", queries, context), 0.0)
    scores = jnp.einsum("rms,rm->rs", dots, weights)
    hidden = jnp.arange(context.shape[0]) > positions[:, None]
    ranked = jnp.where(hidden, -jnp.inf, scores)

    def scores_of(positions: Int[Array, "R K"]) -> Float[Array, "R K"]:
        return jnp.sort(jnp.take_along_axis(ranked, positions, axis=1), axis=1)

    wanted = scores_of(best[0])
    # Each position once, and none below 0, which would index from the end.
    apart = jnp.all(jnp.diff(jnp.sort(chosen, axis=1), axis=1, prepend=-1) > 0)
    return jnp.where(apart, relative_error(wanted, scores_of(chosen)), jnp.inf)
