"""Penalties, biases, bad words and thinking budgets in plain NumPy, for one row at a time.

Written from the parameters' definitions and without the sampler's code, which tests and fuzzers
compare with it. Words must be token ids.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from glm_jax import SamplingParams


def controlled_logits(
    logits: Float[np.ndarray, " V"],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    think_ids: tuple[int, int] | None = None,
) -> Float[np.ndarray, " V"]:
    """Return the logits that the token after prompt and output is drawn from.

    Args:
        logits: of the model, float32.
        params: of the request; its minimum length and what follows the penalties do not count here.
        prompt: its prompt.
        output: what it generated so far.
        think_ids: the tokens that begin and end a thinking part.
    """
    scores = np.array(logits, np.float32)
    if params.allowed_token_ids is not None:
        forbidden = np.setdiff1d(np.arange(len(scores)), params.allowed_token_ids)
        scores[forbidden] = -np.inf
    for token, bias in dict(params.logit_bias).items():
        scores[token] += np.float32(bias)
    for word in params.bad_words:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
            scores[int(word[-1])] = -np.inf
    for token in {*prompt, *output}:
        factor = np.float32(params.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        scores[token] -= np.float32(params.presence_penalty)
    if params.thinking_token_budget is not None and think_ids is not None:
        start, end = think_ids
        marks = [n for n, token in enumerate([*prompt, *output]) if token in think_ids]
        inside = bool(marks) and [*prompt, *output][marks[-1]] == start
        spent = len(prompt) + len(output) - 1 - (marks[-1] if marks else 0)
        if inside and spent >= params.thinking_token_budget:
            scores[:] = -np.inf
            scores[end] = 0
    return scores
