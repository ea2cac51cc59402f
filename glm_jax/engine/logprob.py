"""How likely one token was at one position, as a caller gets it."""

from typing import NamedTuple


class Logprob(NamedTuple):
    """How likely a token was at one position, by the model's raw logits.

    Attributes:
        logprob: Natural logarithm of its probability.
        rank: 1 for the most likely token. Of the prompt's or the drawn token it is the number of
            tokens at least as likely, as in vLLM; None for ids of ``logprob_token_ids`` that are
            not among the most likely ones asked for.
        decoded_token: Its text; None where nothing is detokenised.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# Of one position, by token id: the prompt's or the drawn token first.
PositionLogprobs = dict[int, Logprob]
