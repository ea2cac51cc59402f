"""What a request must satisfy to be queued at all, and the seed it gets."""

from collections.abc import Container

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.pages import PagePool
from glm_jax.engine.request import Request, RequestStatus

_MASK = 2**64 - 1


class RequestRefusedError(ValueError):
    """The request can never run; it was not queued."""


class QueueFullError(RequestRefusedError):
    """As many requests wait as may; this one may come again later."""


def check_request(
    request: Request, config: EngineConfig, pages: PagePool, live: Container[str]
) -> None:
    """Set `max_length`, or refuse a request that could not run to its end even alone.

    Raises:
        RequestRefusedError: With the limit that it breaks.
    """
    name, prompt = request.request_id, request.prompt_length
    if request.status is not RequestStatus.WAITING or name in live:
        raise RequestRefusedError(
            f"request id {name!r} is in use. Give each unfinished request its own id and object."
        )
    if prompt == 0:
        raise RequestRefusedError(f"request {name!r} has an empty prompt; send at least one token.")
    if prompt >= config.max_model_len:
        raise RequestRefusedError(
            f"request {name!r} has a prompt of {prompt} tokens; at most "
            f"{config.max_model_len - 1} leave room for one new token. Shorten the prompt or raise "
            "max_model_len."
        )
    wished = (
        config.max_model_len if request.params.max_tokens is None else request.params.max_tokens
    )
    request.max_length = min(prompt + wished, config.max_model_len)
    needed = pages.pages_for(request.most_rows)
    if needed > pages.capacity:
        raise RequestRefusedError(
            f"request {name!r} needs {needed} pages for {prompt} prompt tokens and "
            f"{request.max_length - prompt} new ones; the pool has {pages.capacity}. "
            "Lower max_tokens or raise num_pages."
        )
    stop_ids = request.banned_ids() if request.params.min_tokens else ()
    allowed = config.limits().stop_ids
    if len(stop_ids) > allowed:
        raise RequestRefusedError(
            f"request {name!r} has {len(stop_ids)} EOS and stop ids to ban below min_tokens; at "
            f"most {allowed} are possible. Shorten stop_token_ids or drop min_tokens."
        )


def check_queue(request: Request, config: EngineConfig, waiting: int) -> None:
    """Refuse a request where no more may wait.

    Raises:
        QueueFullError: With the limit.
    """
    most = config.max_queued_requests
    if most is not None and waiting >= most:
        raise QueueFullError(
            f"request {request.request_id!r} finds {waiting} waiting; max_queued_requests is "
            f"{most}. Send it again later, or raise max_queued_requests."
        )


def seed_for(wished: int | None, base: int, arrival: int) -> int:
    """Return a request's 64-bit seed: the wished one, or one mixed from the engine's and its turn.

    The mix is splitmix64's, so that neighbouring arrivals share no low bits.
    """
    if wished is not None:
        return wished & _MASK
    z = (base + (arrival + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
