"""What must hold of a completion whatever the engine would do alone: read from its wish only."""

from collections.abc import Sequence

from glm_jax import SamplingParams
from glm_jax.engine.outputs import CompletionOutput
from glm_jax.tokenizer import Tokenizer
from scripts.engine_fuzz.invariants import check


def check_laws(
    prompt: Sequence[int],
    params: SamplingParams,
    got: CompletionOutput,
    *,
    tokenizer: Tokenizer,
    eos: int,
    think_ids: tuple[int, int],
) -> None:
    """Check a completion against what was asked for.

    Args:
        prompt: The prompt.
        params: What was asked for; bad words as token ids.
        got: The completion.
        tokenizer: Made its text.
        eos: The model's end token.
        think_ids: The tokens that begin and end a thinking part.

    Raises:
        BrokenError: It is not what was asked for.
    """
    tokens, reason = got.token_ids, got.finish_reason
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}
    forced = _forced(prompt, tokens, params, think_ids)
    free = [(place, token) for place, token in enumerate(tokens) if place not in forced]
    for place, token in free:
        allowed = params.allowed_token_ids
        check(allowed is None or token in allowed, f"token {token} at {place} is not allowed")
        early = place < params.min_tokens
        check(not (early and token in ends), f"token {token} ends it at {place}")
        for word in map(list, params.bad_words):
            found = tokens[max(0, place + 1 - len(word)) : place + 1]
            check(found != word, f"bad word {word} ends at {place}")
    check(not ends.intersection(tokens[params.min_tokens : -1]), f"it goes on: {tokens}, {ends}")
    most = params.max_tokens
    check(most is None or len(tokens) <= most, f"{len(tokens)} tokens of {most}")
    check(reason != "length" or len(tokens) == most, f"{len(tokens)} tokens of {most}")
    if reason == "stop" and not isinstance(got.stop_reason, str):
        last = None if tokens[-1] == eos and not params.ignore_eos else tokens[-1]
        check(tokens[-1] in ends and got.stop_reason == last, f"stopped by {got.stop_reason}")
    if params.detokenize and reason in ("stop", "length"):
        _check_text(params, got, tokenizer)


def _forced(
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
    think_ids: tuple[int, int],
) -> set[int]:
    """Check the thinking budget; return the places of tokens that it forced."""
    budget, (start, end) = params.thinking_token_budget, think_ids
    if budget is None:
        return set()
    forced: set[int] = set()
    spent: int | None = None
    for place, token in enumerate([*prompt, *tokens], -len(prompt)):
        if place >= 0 and spent is not None and spent >= budget:
            check(token == end, f"token {token} at {place} is behind the thinking budget")
            forced.add(place)
        if token in think_ids:
            spent = 0 if token == start else None
        elif spent is not None:
            spent += 1
    return forced


def _check_text(params: SamplingParams, got: CompletionOutput, tokenizer: Tokenizer) -> None:
    """Check the text of a completion that ended by itself."""
    tokens, include = got.token_ids, params.include_stop_str_in_output
    hidden = got.finish_reason == "stop" and not include and not isinstance(got.stop_reason, str)
    shown = tokens[:-1] if hidden else tokens
    whole = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    if not isinstance(got.stop_reason, str):
        check(got.text == whole, f"text {got.text!r} of {whole!r}")
        if not params.min_tokens:
            check(not any(stop in got.text for stop in params.stop), f"{got.text!r} goes on")
        return
    stop = got.stop_reason
    check(stop in params.stop, f"stopped by {stop!r}")
    check(not include or got.text.endswith(stop), f"{got.text!r} without {stop!r}")
    seen = got.text if include else got.text + stop
    check(whole.startswith(seen), f"text {got.text!r} and {stop!r} of {whole!r}")
