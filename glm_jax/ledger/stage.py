"""One line of the ledger: what a stage does on the busiest device, and the least time it takes."""

from typing import NamedTuple

from glm_jax.ledger.hardware import Hardware


class Demand(NamedTuple):
    """What a stage, or the part of it that one segment needs, asks of a device.

    Attributes:
        operations: of matrix products, a multiply-add counted as two.
        elementwise: other operations, roughly; no part of the floor.
        read: bytes from memory that no cache can save: weights, cache entries, scores.
        written: bytes to memory.
        cached: bytes through the cache on the chip: rows in and out, gathered entries.
        sent: bytes to other devices.
    """

    operations: float = 0.0
    elementwise: float = 0.0
    read: float = 0.0
    written: float = 0.0
    cached: float = 0.0
    sent: float = 0.0

    def __add__(self, other: object) -> "Demand":
        """Both together."""
        assert isinstance(other, Demand)
        return Demand(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, times: object) -> "Demand":
        """So many times."""
        assert isinstance(times, int | float)
        return Demand(*(value * times for value in self))


class Floor(NamedTuple):
    """The least time, in seconds, and what bounds it.

    Attributes:
        memory: bytes over the bandwidth of memory or of the cache, the longer one.
        compute: operations over the rate.
        link: bytes sent, and the time of an exchange.
    """

    memory: float
    compute: float
    link: float

    @property
    def seconds(self) -> float:
        """The longer of memory and compute, then the link: nothing overlaps an exchange."""
        return max(self.memory, self.compute) + self.link

    @property
    def bound(self) -> str:
        """The longest of the three: "memory", "compute" or "link"; "" where there is nothing."""
        longest = max(self)
        return "" if longest == 0 else self._fields[self.index(longest)]


class Stage(NamedTuple):
    """One stage of one layer.

    Attributes:
        part: which layers have it: one of ``ledger.PARTS``.
        name: what it is.
        precision: of its products: "fp8", "bf16" or "float32".
        count: of what it works on.
        unit: what that is, such as "rows" or "pairs" (of a row and a key).
        formula: of operations and bytes, in words.
        shared: what both segments need together, whoever is there: weights and their products.
        chunks: what the prefill segment needs apart.
        groups: what the decode segment needs apart.
        exchanges: between devices, one after another.
    """

    part: str
    name: str
    precision: str
    count: float
    unit: str
    formula: str
    shared: Demand = Demand()
    chunks: Demand = Demand()
    groups: Demand = Demand()
    exchanges: int = 0

    @property
    def demand(self) -> Demand:
        """All of it."""
        return self.shared + self.chunks + self.groups

    @property
    def mark(self) -> str:
        """Who runs it: "shared" (all rows at once), "chunks", "groups" or "split" (both, apart)."""
        if any(self.shared):
            return "shared"
        both = {"chunks": any(self.chunks), "groups": any(self.groups)}
        present = [name for name, there in both.items() if there]
        return present[0] if len(present) == 1 else "split"

    def floor(self, hardware: Hardware, *, only: Demand | None = None) -> Floor:
        """The least time on a device.

        Args:
            hardware: the device.
            only: a part of the demand; None is all of it.
        """
        asked = self.demand if only is None else only
        memory = (asked.read + asked.written) / hardware.memory
        return Floor(
            memory=max(memory, asked.cached / hardware.cache),
            compute=asked.operations / hardware.rate(self.precision),
            link=asked.sent / hardware.link + (self.exchanges * hardware.collective),
        )
