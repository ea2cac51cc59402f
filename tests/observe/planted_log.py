"""Step logs made up by a rule, with causes of late tokens planted in them.

A step takes START + PER_ROW * rows + PER_PAIR * pairs, HOST of it on the host, give or take NOISE.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from bucketing.cell import Cell
from glm_jax.engine.chunking import scored_pairs
from glm_jax.engine.declined import Declined, Reason
from glm_jax.engine.outputs import HostPhases, RequestRows, StepRecord
from glm_jax.engine.step_notes import GroupDrafts
from glm_jax.observe.compile_event import CompileEvent

START, PER_ROW, PER_PAIR, HOST, PAUSE = 4e-3, 0.1e-3, 1e-9, 0.5e-3, 0.1e-3
NOISE = 0.01
GROUPS, CHUNK = 8, 64


class Planted(NamedTuple):
    """What is special in a step.

    Attributes:
        prefill: Rows of a prompt "new" in a segment of `bucket` rows.
        groups: Of the cell.
        out: Requests that are not in it; `again` has its rows computed again.
        device: Seconds it takes longer on the device.
        host: The same on the host, inside the step; `pause` before it.
        accept: Drafts accepted of each group; usually all, or all but one.
        experts: Load of the busiest expert, in means.
        predicted: Seconds; None is the truth.
        starved: Whether the time on the device was a wait for a core.
    """

    prefill: int = 0
    bucket: int = 0
    groups: int = GROUPS
    out: Sequence[str] = ()
    again: str = ""
    mode: str = "FULL"
    device: float = 0.0
    host: float = 0.0
    pause: float = 0.0
    accept: int | None = None
    experts: float = 2.0
    declined: Sequence[Declined] = ()
    preempted: Sequence[str] = ()
    predicted: float | None = None
    starved: bool = False


class PlantedLog:
    """Requests r0, r1, ... that decode together, and what is planted among them.

    Attributes:
        records: The steps so far.
        compiles: The programs that appeared.
        drafts: Verified per group and step.
        mixing: Whether prefill rows cost time.
    """

    def __init__(self, seed: int, *, requests=6, drafts=0, mixing=True) -> None:
        self.random = Random(seed)
        self.drafts = drafts
        self.mixing = mixing
        self.records: list[StepRecord] = []
        self.compiles: list[CompileEvent] = []
        self.lengths = {f"r{n}": self.random.randint(50, 400) for n in range(requests)}
        self.now = 100.0

    @property
    def last(self) -> StepRecord:
        return self.records[-1]

    def decode(self, count=1, **planted) -> None:
        for _ in range(count):
            self.step(**planted)

    def chunks(self, count=1, **planted) -> None:
        """Mixed steps with full chunks."""
        for _ in range(count):
            self.step(prefill=CHUNK, bucket=CHUNK, **planted)

    def step(self, **planted) -> None:
        """Add a step; what is planted in it is a Planted."""
        plant = Planted(**planted)
        decoding = [name for name in self.lengths if name not in (*plant.out, plant.again)]
        cell = Cell(plant.bucket, plant.groups, 1 + self.drafts)
        names, rows, tokens, drafts = [], [], {}, []
        if plant.prefill:
            names, rows = [plant.again or "new"], [RequestRows(plant.prefill, 0, 0, True)]
        for name in decoding:
            names.append(name)
            rows.append(RequestRows(1, self.drafts, self.lengths[name], False))
            accepted = self._accepted(plant.accept)
            if self.drafts:
                drafts.append(GroupDrafts(name, (7,) * self.drafts, accepted))
            tokens[name] = 1 + accepted
            self.lengths[name] += 1 + accepted
        pairs = sum(scored_pairs(one.start, one.known + one.drafts) for one in rows)
        usual = self.usual(cell, pairs)
        wall = usual * self.random.uniform(1 - NOISE, 1 + NOISE) + plant.device + plant.host
        # Whatever makes a step longer keeps the cores as busy, unless it takes them away.
        used = wall - plant.device if plant.starved else wall
        phases = HostPhases(
            schedule=HOST / 2, pack=HOST / 2 + plant.host, device=wall - HOST - plant.host
        )
        self.now += PAUSE + plant.pause
        self.records.append(
            StepRecord(
                index=len(self.records),
                kind=("mixed" if decoding else "prefill") if plant.prefill else "decode",
                cell=cell,
                prefill_rows=plant.prefill,
                prefill_pad_rows=plant.bucket - plant.prefill,
                decode_rows=len(decoding) * cell.width,
                decode_pad_rows=(plant.groups - len(decoding)) * cell.width,
                request_ids=tuple(names),
                phases=phases,
                wall_time=wall,
                cpu_time=2.0 * used,
                mode=plant.mode,
                mode_reason="" if plant.mode == "FULL" else "cell not compiled yet",
                pairs=pairs,
                expert_rows_max=int(plant.experts * 100),
                expert_rows_mean=100.0,
                drafts=tuple(drafts),
                started=self.now,
                rows=tuple(rows),
                chunks=int(plant.prefill > 0),
                predicted=usual if plant.predicted is None else plant.predicted,
                tokens=tokens,
                declined=tuple(plant.declined),
                preempted=tuple(plant.preempted),
            )
        )
        self.now += wall

    def _accepted(self, accept) -> int:
        if not self.drafts:
            return 0
        return self.drafts - self.random.randint(0, 1) if accept is None else accept

    def usual(self, cell: Cell, pairs: int) -> float:
        rows = cell.rows if self.mixing else cell.groups * cell.width
        return START + PER_ROW * rows + PER_PAIR * pairs

    def mixing_cost(self) -> float:
        """What a full chunk adds to a step."""
        return PER_ROW * CHUNK if self.mixing else 0.0

    def compile(self, *, before=0.03, after=0.02, source="compiled") -> None:
        """A program that was compiled beside the last step, and a little before and after it."""
        end = self.last.started + self.last.wall_time
        self.compiles.append(
            CompileEvent(
                "P=64 G=8 Q=1", source, end + after - self.last.started + before, end + after
            )
        )

    def preempt(self, name: str, *, pages=0, queue=0, writing=0, chunks=2, **planted) -> None:
        """A request loses its pages, waits for so many steps, and is computed again."""
        self.step(out=[name], preempted=[name], declined=[_note(Reason.PREEMPTION, name)])
        for reason, count in (
            (Reason.NO_PAGES, pages),
            (Reason.NO_SLOTS, queue),
            (Reason.WRITING, writing),
        ):
            for _ in range(count):
                self.step(out=[name], declined=[_note(reason, name)], **planted)
        for _ in range(chunks):
            self.step(prefill=CHUNK, bucket=CHUNK, again=name)
        # The final chunk draws its token.
        self.records[-1] = replace(self.last, tokens={**self.last.tokens, name: 1})


def _note(reason: Reason, name: str) -> Declined:
    return Declined(reason, (name,), 1)
