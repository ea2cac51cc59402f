"""Prompts of the demo: the sources of the Python standard library, or plain token ids."""

import argparse
import inspect
import itertools
import tarfile
import typing
from collections.abc import Iterator

from glm_jax.demo.scenario import Scenario
from glm_jax.tokenizer import Tokenizer

# Long modules, taken in this order.
SOURCES = (argparse, inspect, tarfile, typing)


def make_prompts(
    scenario: Scenario, tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Return the prompts of the decoding requests and then the long one; the same in every run.

    Without a tokenizer they are pseudo-random token ids below `vocab_size`.
    """
    tokens = _scattered(vocab_size) if tokenizer is None else _sources(tokenizer)
    lengths = [scenario.prompt_length] * scenario.requests + [scenario.arrival_length]
    return [list(itertools.islice(tokens, length)) for length in lengths]


def _sources(tokenizer: Tokenizer) -> Iterator[int]:
    for module in itertools.cycle(SOURCES):
        yield from tokenizer.encode(inspect.getsource(module), add_special_tokens=False)


def _scattered(vocab_size: int) -> Iterator[int]:
    # Knuth's multiplicative hash: no generator state, no runs of equal tokens.
    for index in itertools.count(1):
        yield (index * 2654435761 % 2**32) * vocab_size >> 32
