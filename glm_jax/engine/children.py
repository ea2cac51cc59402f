"""n > 1: one prompt, n requests that each draw a continuation of their own.

They share the prompt's full pages through the prefix cache: the first computes them, the others
wait and begin with them.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from glm_jax.engine.outputs import DraftCounts, RequestOutput
from glm_jax.sampling.params import SamplingParams

_SEEDS = 2**64


class Child(NamedTuple):
    """One of the requests that a user's request is served by.

    Attributes:
        request_id: Its own; that of the user's request where there is only one.
        parent_id: That of the user's request.
        index: Of its completion.
        params: What it asks for: n is 1.
    """

    request_id: str
    parent_id: str
    index: int
    params: SamplingParams


def children_of(request_id: str, params: SamplingParams) -> list[Child]:
    """Return the requests that a user's request is served by.

    With a seed, completion i is that of a request of its own with seed + i. The prompt's
    log-probabilities are asked for once.
    """
    if params.n == 1:
        return [Child(request_id, request_id, 0, params)]
    children = []
    for index in range(params.n):
        seed = None if params.seed is None else (params.seed + index) % _SEEDS
        wanted = params.prompt_logprobs if index == 0 else None
        own = dataclasses.replace(params, n=1, seed=seed, prompt_logprobs=wanted)
        children.append(Child(f"{index}_{request_id}", request_id, index, own))
    return children


def joined_output(request_id: str, outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return the result of a user's request, from those of its children in order."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    completions = [
        dataclasses.replace(output.outputs[0], index=index) for index, output in enumerate(outputs)
    ]
    total = DraftCounts(
        sum(output.drafts.verified_groups for output in outputs),
        sum(output.drafts.draft_tokens for output in outputs),
        sum(output.drafts.accepted_tokens for output in outputs),
    )
    return dataclasses.replace(
        first,
        request_id=request_id,
        outputs=completions,
        finished=all(output.finished for output in outputs),
        drafts=total,
    )
