"""Prometheus metrics: vLLM's names for what vLLM has, "glm_jax:" for what only this engine has."""

from collections.abc import Sequence
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# vLLM's buckets, so that its dashboards fit.
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
WHOLE_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTHS = (*(size * 10**power for power in range(6) for size in (1, 2, 5)), 1_000_000)
COMPLETIONS = (1, 2, 5, 10, 20)
# Ours: a step of a small model on a CPU takes less than what vLLM's buckets begin with.
STEP = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)
HOST = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RATIOS = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0)


class Families:
    """Makes metrics that all carry the model's name and the engine's number.

    Attributes:
        registry: Where they are.
    """

    def __init__(self, model_name: str, engine: str) -> None:
        """Start with a registry of its own, since a process may have several engines."""
        self.registry = CollectorRegistry(auto_describe=True)
        self._values = model_name, engine
        self._names = "model_name", "engine"

    def counter(self, name: str, meaning: str) -> Counter:
        """Return a counter; its name on the page ends in _total."""
        family = Counter(name, meaning, self._names, registry=self.registry)
        return family.labels(*self._values)

    def gauge(self, name: str, meaning: str) -> Gauge:
        """Return a gauge."""
        return Gauge(name, meaning, self._names, registry=self.registry).labels(*self._values)

    def histogram(self, name: str, meaning: str, buckets: Sequence[float | int]) -> Histogram:
        """Return a histogram."""
        family = Histogram(name, meaning, self._names, buckets=buckets, registry=self.registry)
        return family.labels(*self._values)

    def counters(self, name: str, meaning: str, *labels: str) -> "Labelled[Counter]":
        """Return counters by labels."""
        family = Counter(name, meaning, (*self._names, *labels), registry=self.registry)
        return Labelled(family, self._values)

    def gauges(self, name: str, meaning: str, *labels: str) -> "Labelled[Gauge]":
        """Return gauges by labels."""
        family = Gauge(name, meaning, (*self._names, *labels), registry=self.registry)
        return Labelled(family, self._values)

    def histograms(
        self, name: str, meaning: str, buckets: Sequence[float | int], *labels: str
    ) -> "Labelled[Histogram]":
        """Return histograms by labels."""
        names = (*self._names, *labels)
        family = Histogram(name, meaning, names, buckets=buckets, registry=self.registry)
        return Labelled(family, self._values)


_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class Labelled(Generic[_Kind]):
    """A family whose children are remembered: asking the library takes a lock and two look-ups."""

    def __init__(self, family: _Kind, values: Sequence[str]) -> None:
        """Remember nothing yet."""
        self._family = family
        self._values = values
        self._children: dict[tuple[str, ...], _Kind] = {}

    def of(self, *labels: str) -> _Kind:
        """Return the child with these labels."""
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._family.labels(*self._values, *labels)
        return child
