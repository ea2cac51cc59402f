"""Prompts from text that the embedded model was not trained on."""

from collections.abc import Sequence
from pathlib import Path

from glm_jax import Tokenizer
from scripts.tiny.corpus import read_corpus


def read_prompts(folder: Path, count: int, length: int) -> list[list[int]]:
    """Windows of the library's own unit tests, of which training sees none.

    Args:
        folder: of the model, for its tokenizer.
        count: how many.
        length: tokens of each.

    Raises:
        ValueError: this Python's library has too few tests.
    """
    tokenizer = Tokenizer.from_path(folder)
    files = [tokenizer.encode(text, add_special_tokens=False) for text in read_corpus().test]
    windows = cut_windows(files, length)
    if len(windows) < count:
        raise ValueError(
            f"the tests of this Python's library give {len(windows)} windows of {length} tokens, "
            f"fewer than {count}. Lower --rounds or --prompt, or install the library's tests."
        )
    return windows[:count]


def cut_windows(files: Sequence[list[int]], length: int) -> list[list[int]]:
    """Cut files in windows: the second of every file, then the third of every file, and so on.

    The first ones are left out: head comments and imports look much the same in all files.
    """
    longest = max(map(len, files), default=0)
    return [
        file[start : start + length]
        for start in range(length, longest, length)
        for file in files
        if start + length <= len(file)
    ]
