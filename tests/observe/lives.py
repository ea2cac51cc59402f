"""Random lives of a whole engine on a fake device, observed."""

from random import Random

from engine.fake_executor import Story
from engine.fake_program import VOCABULARY

from glm_jax.engine.admission import RequestRefusedError

BEGINNING = [(7 * n) % VOCABULARY for n in range(24)]


class Life:
    """A story whose steps are observed, and what really happened.

    Attributes:
        story: The engine and its answers.
        written: Rows that each step wrote on the device; -1 where nobody can say.
    """

    def __init__(self, seed: int, *observers, **options) -> None:
        self.random = Random(seed)
        self.story = Story(**options)
        self.written: list[int] = []
        self.story.engine.watches += [observer.add for observer in observers]

    @property
    def records(self):
        return self.story.records

    def add(self, name: str, length: int | None = None, **params) -> bool:
        """A request; many begin alike. False where it was refused."""
        length = length or self.random.randint(1, 30)
        prompt = BEGINNING[: self.random.choice([0, 8, 16])]
        prompt += [self.random.randrange(VOCABULARY) for _ in range(length)]
        params = {"max_tokens": self.random.randint(1, 12), "ignore_eos": True, **params}
        try:
            self.story.add(name, prompt[:length], **params)
        except RequestRefusedError:
            return False
        return True

    def step(self) -> None:
        device = self.story.executor.device
        before = device.steps
        record = self.story.step().record
        if record.cell is not None and record.fault is None:
            # Of a loop and of the second half the device remembers only the last program.
            single = record.loop_steps == 1 and not record.halves
            assert device.steps - before == max(record.loop_steps, len(record.halves))
            self.written.append(len(device.written) if single else -1)

    def live(self, requests: int) -> list[str]:
        """Requests come at random moments, some are aborted; all end. Return who was queued."""
        names = []
        for number in range(requests):
            name = f"q{number}"
            if self.add(name):
                names.append(name)
            for _ in range(self.random.choice([0, 0, 1, 4])):
                self.step()
            if names and self.random.random() < 0.1:
                self.story.engine.abort(self.random.choice(names))
        while self.story.engine.has_unfinished:
            self.step()
        return names
