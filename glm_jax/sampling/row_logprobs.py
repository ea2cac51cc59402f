"""What the head program is asked about chosen rows of a step, and what it says; host-only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Float32, Int32


class RowQuestion(NamedTuple):
    """Tokens whose log-probabilities are wanted, besides the most likely ones.

    Attributes:
        rows: Of the step; at least one.
        targets: A token of each row.
        further: More tokens of each row, at most ``max_logprobs``.
    """

    rows: Sequence[int]
    targets: Sequence[int]
    further: Sequence[Sequence[int]]


class RowLogprobs(NamedTuple):
    """Natural logarithms of probabilities at each row, of raw logits: before all processing.

    Attributes:
        target: Of the row's target token.
        rank: How many tokens are at least as likely as the target, itself included: 1 is the best.
        top_ids: The most likely tokens, best first; the lowest id first among equals.
        top: Theirs.
        further: Of the row's further tokens.
    """

    target: Float32[Any, " S"]
    rank: Int32[Any, " S"]
    top_ids: Int32[Any, "S n"]
    top: Float32[Any, "S n"]
    further: Float32[Any, "S b"]
