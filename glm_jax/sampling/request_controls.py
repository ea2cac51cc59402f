"""What one request asks of its control line, with the engine's checks; host-only."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from glm_jax.sampling.bad_words import LongWords, word_tokens
from glm_jax.sampling.control_update import ROW_BANS
from glm_jax.sampling.encoder import Encoder
from glm_jax.sampling.params import SamplingParams
from glm_jax.sampling.thinking import END, START, ThinkingBudget


@dataclass(frozen=True, slots=True)
class RequestControls:
    """How a request's logits are changed.

    Attributes:
        fill: The bias of tokens that `biases` does not name: 0, or -inf to forbid them.
        biases: Biases of single tokens.
        penalties: Presence, frequency, repetition; None where they are off.
        words: Bad words of several tokens.
        thinking: The thinking budget; None is no limit.
    """

    fill: float
    biases: Mapping[int, float]
    penalties: tuple[float, float, float] | None
    words: LongWords
    thinking: ThinkingBudget | None

    @property
    def reason(self) -> str:
        """Why the host must see each token before the next; empty where it need not."""
        if self.penalties is not None:
            return "penalties"
        if self.words:
            return "bad words of several tokens"
        return "thinking budget" if self.thinking is not None else ""


def controls_of(
    params: SamplingParams,
    *,
    vocab_size: int,
    tokenizer: Encoder | None,
    think_ids: tuple[int, int] | None,
    stop_ids: Iterable[int] = (),
) -> RequestControls | None:
    """Return what a request asks of its control line; None where it asks nothing.

    Args:
        params: the request's.
        vocab_size: token ids are below it.
        tokenizer: makes tokens of bad words; may be None where they are token ids.
        think_ids: the tokens that begin and end a thinking part; None where there are none.
        stop_ids: what is banned below min_tokens, if that is used.

    Raises:
        ValueError: a token id is out of range, or no token would be left to draw.
    """
    words = word_tokens(params.bad_words, tokenizer)
    biases, allowed = dict(params.logit_bias), params.allowed_token_ids
    _check_ids("logit_bias", biases, vocab_size)
    _check_ids("allowed_token_ids", allowed or (), vocab_size)
    for word in words:
        _check_ids("bad_words", word, vocab_size)
    banned = {word[0] for word in words if len(word) == 1}
    if allowed is not None:
        biases = {token: biases.get(token, 0.0) for token in allowed}
    # What is not allowed is forbidden already.
    biases |= {token: -math.inf for token in banned if allowed is None or token in biases}
    long_words = LongWords(word for word in words if len(word) > 1)
    _check_long_words(long_words)
    if allowed is not None or words:
        choice = range(vocab_size) if allowed is None else allowed
        _check_something_left(choice, banned.union(stop_ids), long_words)
    presence, frequency = float(params.presence_penalty), float(params.frequency_penalty)
    penalties = presence, frequency, float(params.repetition_penalty)
    asked = RequestControls(
        0.0 if allowed is None else -math.inf,
        biases,
        None if penalties == (0, 0, 1) else penalties,
        long_words,
        _thinking_of(params, think_ids),
    )
    return asked if biases or asked.reason else None


def _thinking_of(
    params: SamplingParams, think_ids: tuple[int, int] | None
) -> ThinkingBudget | None:
    if params.thinking_token_budget is None:
        return None
    if think_ids is None:
        raise ValueError(
            f"thinking_token_budget is {params.thinking_token_budget}, but the engine knows no "
            f"tokens {START} and {END}: it has no tokenizer, or one without them. Leave it out, or "
            "use max_tokens."
        )
    return ThinkingBudget(*think_ids, params.thinking_token_budget)


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} has token id {token}; allowed: 0 to {vocab_size - 1}. "
                "Use the ids of this model's tokenizer."
            )


def _check_long_words(words: LongWords) -> None:
    most = max(map(len, words.possible_bans()), default=0)
    if most > ROW_BANS:
        raise ValueError(
            f"bad_words has {most} words that differ only in their last token; at most {ROW_BANS} "
            "can be banned at once. Drop some."
        )


def _check_something_left(choice: Sequence[int], banned: set[int], words: LongWords) -> None:
    """Refuse a request that may reach a token where everything is forbidden."""
    for more in ((), *words.possible_bans()):
        forbidden = banned.union(more)
        # Most choices are longer than what is forbidden: nothing to look at.
        if len(choice) <= len(forbidden) and forbidden.issuperset(choice):
            raise ValueError(
                "allowed_token_ids, bad_words and min_tokens together leave no token to draw. "
                "Allow more tokens or drop bad words."
            )
