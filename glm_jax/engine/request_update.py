"""Applies what a step did for a request to that request, and says what changed."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from glm_jax.engine.request import FinishReason, Request
from glm_jax.engine.results import Result
from glm_jax.engine.stopping import append_tokens


class RequestUpdate(NamedTuple):
    """What changed for one request.

    Attributes:
        request: The request.
        new_token_ids: Its new tokens.
        finish_reason: Set if it ended.
        draft_token_ids: The drafts that were verified.
        accepted: How many of them are among the new tokens, the first ones.
    """

    request: Request
    new_token_ids: list[int]
    finish_reason: FinishReason | None
    draft_token_ids: Sequence[int] = ()
    accepted: int = 0

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def offered(self) -> int:
        """Drafts that were accepted or refused: none of those that an end cut off."""
        cut = self.finish_reason is not None and self.accepted == len(self.new_token_ids)
        return self.accepted if cut else len(self.draft_token_ids)


def apply_result(result: Result) -> RequestUpdate | None:
    """Advance a request by a step; it ends where its tokens say so.

    Returns:
        None where nothing was drawn for it.
    """
    request = result.entry.request
    follow(result)
    request.needs_reset = False
    if not result.tokens:
        return None
    kept = append_tokens(request, result.tokens)
    accepted = min(len(result.tokens) - 1, len(kept))
    verified = result.entry.draft_token_ids
    return RequestUpdate(request, kept, request.finish_reason, verified, accepted)


def joined(updates: Iterable[RequestUpdate]) -> Iterable[RequestUpdate]:
    """Return one update per request, in order of its first: the steps of a loop taken together.

    They have no drafts: each step's are its own.
    """
    by_request: dict[str, RequestUpdate] = {}
    for update in updates:
        before = by_request.get(update.request_id)
        if before is not None:
            tokens = before.new_token_ids + update.new_token_ids
            update = RequestUpdate(update.request, tokens, update.finish_reason)
        by_request[update.request_id] = update
    return by_request.values()


def follow(result: Result) -> None:
    """Take over what the device holds of a request after a step: its rows and its drafts."""
    request = result.entry.request
    request.computed += result.advance
    drafts = result.drafts
    # The very last token is never computed, so nothing is verified for its sake.
    room = request.most_rows - request.computed - 1
    request.draft_token_ids = drafts if len(drafts) <= room else drafts[: max(0, room)]
