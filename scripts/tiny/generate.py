"""Continues prompts by running the whole row for every token: slow, short, and independent.

The engine is what generates for users; these samples judge the weights without it.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape
from scripts.tiny.tokenizer import EOS_IDS, PAD_ID
from scripts.tiny.transformer import Mode, run_trunk


@functools.partial(jax.jit, static_argnums=(0, 5))
def _next_logits(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array, "sparse E"],
    tokens: Int[Array, "batch T"],
    last: Int[Array, " batch"],
    mode: Mode,
) -> Float[Array, "batch V"]:
    hidden = run_trunk(shape, parameters, bias, tokens, mode).hidden
    rows = jnp.take_along_axis(hidden, last[:, None, None], 1)[:, 0]
    return rows @ parameters["head"].T


def generate(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array | np.ndarray, "sparse E"],
    prompts: Sequence[Sequence[int]],
    *,
    count: int,
    temperature: float,
    seed: int = 0,
) -> list[list[int]]:
    """Return up to `count` new tokens for each prompt; 0 temperature takes the largest logit."""
    rng = np.random.default_rng(seed)
    longest = max(len(prompt) for prompt in prompts) + count
    width = -(-longest // 64) * 64
    rows = np.full((len(prompts), width), PAD_ID, np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts])
    capacity = shape.n_routed_experts / shape.num_experts_per_tok
    mode = Mode(selection="indexer", capacity=capacity)
    for _ in range(count):
        last = (lengths - 1).astype(np.int32)
        logits = np.asarray(_next_logits(shape, parameters, bias, rows, last, mode))
        if temperature > 0:
            # The Gumbel form of sampling from softmax(logits / temperature).
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        rows[np.arange(len(rows)), lengths] = logits.argmax(-1)
        lengths += 1
    return [_until_end(row[len(p) : len(p) + count]) for row, p in zip(rows, prompts, strict=True)]


def _until_end(tokens: Int[np.ndarray, " n"]) -> list[int]:
    ends = np.flatnonzero(np.isin(tokens, EOS_IDS))
    return tokens[: ends[0] if len(ends) else None].tolist()


def sample_texts(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array | np.ndarray, "sparse E"],
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    count: int = 48,
) -> list[dict[str, str]]:
    """Continue prompts greedily and at temperature 0.7."""
    encoded = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]
    results = [{"prompt": prompt} for prompt in prompts]
    for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
        outputs = generate(shape, parameters, bias, encoded, count=count, temperature=temperature)
        for result, output in zip(results, outputs, strict=True):
            result[name] = tokenizer.decode(output, skip_special_tokens=False)
    return results
