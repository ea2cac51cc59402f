"""A device in arithmetic: what decode steps take and accept; for tests of draft policies."""

import random
from collections import Counter
from typing import NamedTuple

from bucketing.axis import Axis
from bucketing.grid import Cell, Grid
from glm_jax.engine.acceptance import RequestAcceptance

GRID = Grid(Axis("prefill rows", (0, 64)), Axis("groups", (0, 1, 8)), (1, 2, 4, 6))
LENGTHS = (0, 1, 3, 5)
PROMPT = 50


class Device(NamedTuple):
    """Seconds of a step, and the rates at which drafts are accepted.

    Attributes:
        base: Seconds of a step without rows.
        row: Seconds per row.
        share: What the drafter adds to these, as a fraction.
        later_pass: Seconds of each draft after the first.
        rates: Per draft position P(accepted | all before it are).
    """

    base: float
    row: float
    share: float
    later_pass: float
    rates: tuple[float, ...]

    def seconds(self, cell: Cell, drafter: bool, drafts: int) -> float:
        """Of a step."""
        seconds = (self.base + self.row * cell.rows) * (1 + self.share * drafter)
        return seconds + self.later_pass * max(0, drafts - 1)

    def tokens(self, drafts: int) -> float:
        """Expected of a group."""
        reached = total = 1.0
        for rate in self.rates[:drafts]:
            reached *= rate
            total += reached
        return total

    def fixed_rate(self, drafts: int, batch: int) -> float:
        """Tokens per second where every request always makes so many drafts."""
        cell = GRID.cell_for(0, 0, batch, drafts + 1)
        return batch * self.tokens(drafts) / self.seconds(cell, drafts > 0, drafts)

    def best_length(self, batch: int) -> int:
        """The best fixed number of drafts."""
        return max(LENGTHS, key=lambda drafts: self.fixed_rate(drafts, batch))


class FakeRequest:
    """What a policy sees of a request, and what the device keeps of it."""

    def __init__(self, length: int) -> None:
        self.computed = PROMPT
        self.end = PROMPT + length
        self.speculates = False
        self.acceptance = RequestAcceptance()
        self.drafts = 0
        self.holes = False


class Batch:
    """A batch of constant size: a request that ends is followed by a new one at once.

    Attributes:
        used: Steps by (drafts of the longest group, whether the drafter ran).
        tokens: Expected tokens so far.
        seconds: Seconds so far, without the noise that the policy sees.
    """

    def __init__(self, policy, device, size, *, length=300, timed=True, seed=0) -> None:
        self.policy, self.device, self.size = policy, device, size
        self.length, self.timed = length, timed
        self.random = random.Random(seed)
        self.requests = [self.new_request() for _ in range(size)]
        self.start_count()

    def start_count(self) -> None:
        """Forget what was used and taken so far."""
        self.used = Counter()
        self.tokens = self.seconds = 0.0

    def new_request(self) -> FakeRequest:
        request = FakeRequest(int(self.length * self.random.uniform(0.5, 1.5)))
        self.policy.admit(request, self.size)
        return request

    def run(self, steps) -> "Batch":
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        requests, policy, device = self.requests, self.policy, self.device
        longest = max(request.drafts for request in requests)
        cell = GRID.cell_for(0, 0, len(requests), longest + 1)
        rooms = [max(0, request.end - request.computed - 2) for request in requests]
        made = policy.new_drafts(requests, rooms)
        drafter = policy.drafter(requests)
        for index, (request, drafts) in enumerate(zip(requests, made, strict=True)):
            self.tokens += device.tokens(request.drafts)
            accepted = 0
            while accepted < request.drafts and self.random.random() < device.rates[accepted]:
                accepted += 1
            policy.observe(request, request.drafts, accepted)
            request.holes |= not drafter
            assert not (drafts and request.holes), "drafts from a drafter cache with holes"
            assert drafts <= rooms[index]
            request.computed += accepted + 1
            if request.computed >= request.end:
                requests[index] = request = self.new_request()
                drafts = made[index] if request.speculates else 0
            request.drafts = drafts
        seconds = device.seconds(cell, drafter, max(made))
        self.seconds += seconds
        self.used[longest, drafter] += 1
        if self.timed:
            noisy = seconds * (1 + max(self.random.gauss(0, 0.04), -0.1))
            pairs = sum(request.computed for request in requests) * cell.width
            policy.observe_step(cell, drafter, max(made), pairs, noisy)
