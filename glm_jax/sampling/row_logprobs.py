"""What the head program says of chosen rows of a step; host-only."""

from typing import Any, NamedTuple

from jaxtyping import Float32, Int32


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
