"""A Loop of small limits with named prompts: what the host-only tests of the catalogue run on.

Three of four drafts are right. `Loop` checks every step, FakeDevice every read and write.
"""

from collections import defaultdict
from random import Random

from engine.fake_program import FakeDevice
from engine.harness import Loop, prompt_of

from bucketing.cell import Cell
from bucketing.step_inputs import StepInputs
from glm_jax.engine.plan import PlanEntry, StepPlan
from glm_jax.engine.request import Request, RowClass

DEFAULTS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "prefill_buckets": (8,),
    "group_buckets": (1,),
    "num_speculative_tokens": 3,
}


Shapes = dict[Cell, set[tuple]]


def watch(device: FakeDevice, packed: list[StepInputs]) -> Shapes:
    """Note what a device is given: per cell one line, unless a program would be compiled anew."""
    shapes: Shapes = defaultdict(set)
    run = device.run

    def noted(cell, inputs):
        packed.append(inputs)
        shapes[cell].add(
            tuple((type(one), getattr(one, "shape", 0), getattr(one, "dtype", 0)) for one in inputs)
        )
        return run(cell, inputs)

    device.run = noted
    return shapes


class Crowd(Loop):
    """Requests by name.

    Attributes:
        packed: The inputs of every step, in order.
        shapes: Of them, by cell.
    """

    def __init__(self, **options) -> None:
        self.packed: list[StepInputs] = []
        super().__init__(**{**DEFAULTS, **options})

    def _device(self):
        device = super()._device()
        self.shapes = watch(device, self.packed)
        return device

    def ask(self, name: str, length: int, **params) -> Request:
        """Queue a prompt of so many tokens; it generates 12 unless something else is said."""
        settings = {"max_tokens": 12, "ignore_eos": True, "seed": 5, **params}
        return self.add(name, prompt_of(Random(name), length), **settings)

    def decode(self, *names: str, length: int = 6, **params) -> None:
        """Queue prompts and run until all of them decode."""
        asked = [self.ask(name, length, **params) for name in names]
        while not all(request.decoding for request in asked):
            self.schedule_and_run()

    def end(self) -> None:
        """Run to the end: everyone has the tokens that it has alone, and nothing is left over."""
        self.finish()
        for name in self.requests:
            self.check_tokens(name)
        self.check_idle()


def entries(plan: StepPlan) -> dict[str, PlanEntry]:
    return {entry.request_id: entry for entry in plan.entries}


def classes(plan: StepPlan) -> dict[str, RowClass]:
    return {entry.request_id: entry.row_class for entry in plan.entries}
