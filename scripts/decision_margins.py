"""How close drawn tokens were to others: for comparing runs that may differ by rounding only."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from glm_jax import LLM, SamplingParams
from scripts.reference_controls import controlled_logits

# The designed tolerance: a first difference is explained by rounding below this margin.
TOLERANCE = 1e-4


class Decision(NamedTuple):
    """A drawn token, and how much the logits must change for another one to be drawn.

    The margin of a greedy draw is the gap of the two largest logits; otherwise the least of the gap
    of the two best sampling scores and the gaps at the truncation's edges (top-p: in probability).
    """

    token: int
    margin: float


def decisions(
    llm: LLM,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
    *,
    think_ids: tuple[int, int] | None = None,
) -> list[Decision]:
    """Return the decision that drew each token of a generated sequence.

    Args:
        llm: computes the logits by its step programs; its head program may be compiled.
        prompt: the request's prompt.
        tokens: what it generated, at least one.
        params: how it draws; bad words as token ids.
        think_ids: the tokens that begin and end a thinking part.
    """
    logits = llm.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    return [
        decide(
            controlled_logits(row, params, prompt, list(tokens[:index]), think_ids=think_ids),
            params,
            position=len(prompt) + index,
            banned=params.stop_token_ids if index < params.min_tokens else (),
        )
        for index, row in enumerate(logits)
    ]


def decide(
    logits: Float[np.ndarray, " V"],
    params: SamplingParams,
    *,
    position: int,
    banned: Sequence[int] = (),
) -> Decision:
    """Draw as ``glm_jax.sampling.sampler`` does, in float64 on the host."""
    scores = logits.astype(np.float64)
    scores[list(banned)] = -np.inf
    if params.temperature == 0:
        return Decision(int(np.argmax(scores)), _gap(scores))
    scores /= params.temperature
    kept, edge = _truncate(scores, params)
    seed = params.seed or 0
    words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
    noise = np.asarray(_noise(words, np.int32(position), size=len(scores)))
    scores = np.where(kept, scores + noise, -np.inf)
    margin = min(_gap(scores) * params.temperature, edge)
    return Decision(int(np.argmax(scores)), margin)


def _gap(values: Float[np.ndarray, " V"]) -> float:
    second, first = np.partition(values, -2)[-2:]
    return float(first - second)


def _truncate(scores: Float[np.ndarray, " V"], params: SamplingParams) -> tuple[np.ndarray, float]:
    """Which tokens stay, and how close the nearest token is to the edge."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    edges = [np.inf]
    keep = np.ones(len(ranked), bool)
    if params.min_p > 0:
        distance = ranked - ranked[0] - np.log(params.min_p)
        keep &= distance >= 0
        edges.append(np.abs(distance).min() * params.temperature)
    # Among forbidden tokens there is no edge.
    if 0 < params.top_k < np.isfinite(ranked).sum():
        keep[params.top_k :] = False
        edges.append((ranked[params.top_k - 1] - ranked[params.top_k]) * params.temperature)
    if params.top_p < 1:
        weights = np.where(keep, np.exp(ranked - ranked[0]), 0.0)
        weights /= weights.sum()
        before = np.cumsum(weights) - weights
        edges.append(np.abs(before[1:] - params.top_p).min())
        keep &= before < params.top_p
        keep[0] = True
    kept = np.zeros(len(ranked), bool)
    kept[order[keep]] = True
    return kept, float(min(edges))


@partial(jax.jit, static_argnames="size")
def _noise(
    words: UInt[Array, "2"], position: Int[Array, ""], *, size: int
) -> Float[Array, " size"]:
    """The sampler's noise: by the request's seed and the position of the drawn token only."""
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)
