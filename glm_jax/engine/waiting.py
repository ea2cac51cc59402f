"""The requests that wait for a slot, in the order in which they are served."""

from bisect import insort
from collections.abc import Iterator

from glm_jax.engine.request import Request


class WaitingQueue:
    """Waiting and preempted requests: first come first served, or lower priority value first.

    A preempted request stands where it came from: before all that arrived after it.
    """

    def __init__(self, *, by_priority: bool) -> None:
        """Start empty.

        Args:
            by_priority: Whether the priority counts before the arrival.
        """
        self._by_priority = by_priority
        self._requests: list[Request] = []

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Go through them, next first."""
        return iter(self._requests)

    def turn(self, request: Request) -> tuple[int, int]:
        """Return what requests are ordered by."""
        return (request.priority if self._by_priority else 0, request.arrival)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        insort(self._requests, request, key=self.turn)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be here."""
        self._requests.remove(request)
