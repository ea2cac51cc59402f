"""When what happened to a request."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimes:
    """Moments of a request's life, by ``time.perf_counter``; None before they came.

    Attributes:
        arrival: it was queued.
        scheduled: it was admitted for the first time.
        first_token: the step of its first token ended.
        last_token: the step of its latest tokens ended.
    """

    arrival: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None

    def admit(self, now: float) -> None:
        """Note an admission; those after a preemption do not count."""
        if self.scheduled is None:
            self.scheduled = now

    def give(self, now: float) -> None:
        """Note that it got tokens."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
