"""The thinking part of an output, and its budget of tokens; host-only."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm_jax.sampling.encoder import Encoder

START, END = "<think>", "</think>"


class ThinkingBudget(NamedTuple):
    """How long a request may think.

    Attributes:
        start: The token that begins a thinking part.
        end: The token that ends it.
        most: Tokens between them.
    """

    start: int
    end: int
    most: int


class ThinkingPart(NamedTuple):
    """Where a text stands.

    A part begins behind the start token and ends with the end token, wherever they are: a prompt
    may end inside one (vLLM counts the same). A second start begins a new count.

    Attributes:
        inside: Whether the last token is in a thinking part.
        tokens: Tokens of it so far.
    """

    inside: bool = False
    tokens: int = 0

    def after(self, new: Iterable[int], budget: ThinkingBudget) -> "ThinkingPart":
        """Return where the text stands with more tokens."""
        inside, tokens = self
        for token in new:
            if token == budget.start:
                inside, tokens = True, 0
            elif token == budget.end:
                inside = False
            elif inside:
                tokens += 1
        return ThinkingPart(inside, tokens)

    def forced(self, drafts: Sequence[int], budget: ThinkingBudget) -> list[bool]:
        """Return for the next token, and the one behind each draft, whether it must be the end."""
        part, rows = self, []
        for draft in (*drafts, None):
            rows.append(part.inside and part.tokens >= budget.most)
            if draft is not None:
                part = part.after((draft,), budget)
        return rows


def thinking_ids(tokenizer: Encoder | None) -> tuple[int, int] | None:
    """Return the ids of the start and the end token; None where a model has none."""
    if tokenizer is None:
        return None
    start, end = tokenizer.token_id(START), tokenizer.token_id(END)
    return None if start is None or end is None else (start, end)
