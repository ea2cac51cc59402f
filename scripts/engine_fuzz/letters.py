"""A tokenizer for the golden model: letters, pieces of UTF-8, and the marks of a thinking part."""

import tokenizers
from tokenizers import decoders, models

from glm_jax.sampling.thinking import END, START
from glm_jax.tokenizer import Tokenizer

_LETTERS = [*map(chr, range(0x21, 0x7F)), "\u0120", "\u010a"]
# Byte by byte: e with an accent, the euro sign, and a byte that is never alone.
_BYTES = ["\u00c3", "\u00a9", "\u00e2", "\u0124", "\u00ac", "\u00f0"]
_WORDS = ["ab", "the", "\u0120a", "\u0120in", "e\u00c3", "\u00a9e", "<t", "\u010a\u010a"]


def letters(vocab_size: int) -> Tokenizer:
    """Return a tokenizer whose last two ids are <think> and </think>."""
    words = [*_LETTERS, *_BYTES, *_WORDS]
    words += [f"z{number}" for number in range(vocab_size - 2 - len(words))]
    vocabulary = {word: number for number, word in enumerate(words[: vocab_size - 2])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([START, END])
    return Tokenizer(backend)
