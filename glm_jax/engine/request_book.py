"""All unfinished requests by id, with their turns, seeds and deadlines."""

from collections.abc import Container
from typing import Any

from glm_jax.engine.admission import seed_for
from glm_jax.engine.request import Request


class RequestBook(Container[str]):
    """Who was submitted and has not ended."""

    def __init__(self, base_seed: int) -> None:
        """Start empty.

        Args:
            base_seed: Seeds of requests that bring none are made from it.
        """
        self._base_seed = base_seed
        self._arrivals = 0
        self._requests: dict[str, Request] = {}
        self._deadlines: dict[str, float] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._requests)

    def __contains__(self, request_id: Any) -> bool:
        """Return whether an id is in use."""
        return request_id in self._requests

    def get(self, request_id: str) -> Request | None:
        """Return a request, or None."""
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        """Enter a request; it gets its turn and its seed."""
        request.seed = seed_for(request.params.seed, self._base_seed, self._arrivals)
        request.arrival = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline

    def remove(self, request: Request) -> None:
        """Strike a request out."""
        del self._requests[request.request_id]
        self._deadlines.pop(request.request_id, None)

    def expired(self, now: float) -> list[str]:
        """Return the ids of those whose deadline has passed."""
        return [name for name, deadline in self._deadlines.items() if deadline <= now]
