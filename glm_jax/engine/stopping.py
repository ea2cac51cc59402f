"""When a request ends, checked per token in order; stop strings are found with the text."""

from collections.abc import Sequence

from glm_jax.engine.request import FinishReason, Request


def append_tokens(request: Request, tokens: Sequence[int]) -> list[int]:
    """Append drawn tokens up to the first that ends the request; return those that were kept.

    Sets `finish_reason` and `stop_value`. At the same token a stop beats the length limit; tokens
    after the ending one are dropped.
    """
    kept: list[int] = []
    params = request.params
    eos = () if params.ignore_eos else request.eos_token_ids
    earliest = request.prompt_length + params.min_tokens
    for token in tokens:
        request.append(token)
        kept.append(token)
        if request.length >= earliest:
            if token in eos:
                request.finish_reason = FinishReason.STOP
                break
            if token in params.stop_token_ids:
                request.finish_reason, request.stop_value = FinishReason.STOP, token
                break
        if request.length >= request.max_length:
            request.finish_reason = FinishReason.LENGTH
            break
    return kept


def end_at_stop_string(request: Request, matched: str, surplus: int) -> None:
    """Let a completed stop string be the end: it beats a limit reached by its own or a later token.

    Args:
        request: already taken out of the queues.
        matched: the stop string.
        surplus: tokens after the one that completed it; they are dropped.
    """
    request.length -= surplus
    request.finish_reason, request.stop_value = FinishReason.STOP, matched


def end_with_error(request: Request, error: str) -> None:
    """Let an error be the end, whatever ended the request before."""
    request.finish_reason, request.stop_value, request.error = FinishReason.ERROR, None, error
