"""The three accounts of a mixed step, decode alone, prefill alone and both, and who pays for it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from glm_jax.ledger.ledger import LATER_PASS, Ledger, make_ledger
from glm_jax.ledger.shape import StepShape
from glm_jax.ledger.stage import Stage
from glm_jax.model.config import GlmConfig

# Drawn at single rows: of the requests, not of all rows.
_SAMPLED = ("head", "sampling")


class Bill(NamedTuple):
    """Seconds of a mixed step by who is charged with them.

    Attributes:
        rule: how stages that all rows share are divided.
        prefill: seconds of the prefill segment.
        decode: seconds of the decode segment.
    """

    rule: str
    prefill: float
    decode: float


class Accounts(NamedTuple):
    """Ledgers by kind of step: "decode", "prefill", "mixed", those that the shape has."""

    ledgers: Mapping[str, Ledger]

    @property
    def step(self) -> Ledger:
        """The step that was asked for."""
        return self.ledgers[list(self.ledgers)[-1]]

    @property
    def together(self) -> float | None:
        """Floor of the mixed step over prefill alone plus decode alone; None if it is not mixed."""
        if len(self.ledgers) < 3:
            return None
        alone = self.ledgers["prefill"].seconds + self.ledgers["decode"].seconds
        return self.step.seconds / alone

    @property
    def stretch(self) -> float | None:
        """Floor of the mixed step over decode alone: how much longer decodes wait for a token."""
        if len(self.ledgers) < 3:
            return None
        return self.step.seconds / self.ledgers["decode"].seconds

    def bills(self) -> tuple[Bill, ...]:
        """Who pays for a mixed step: nobody else is there in the other kinds.

        Stages that run apart are charged to their segment. Shared ones are divided by rows (each
        row is worth the same), by requests (each request is), or given whole to the segment that
        would need them anyway, so that the other pays only what it adds.
        """
        if len(self.ledgers) < 3:
            return ()
        step, alone = self.step, self.ledgers
        total = step.seconds
        added_decode = total - alone["prefill"].seconds
        added_prefill = total - alone["decode"].seconds
        return (
            _divided(step, "by rows"),
            _divided(step, "by requests"),
            Bill("decode pays what it adds", total - added_decode, added_decode),
            Bill("prefill pays what it adds", added_prefill, total - added_prefill),
        )


def make_accounts(config: GlmConfig, shape: StepShape, **settings: Any) -> Accounts:
    """The ledgers of a step and, if it is mixed, of its two halves alone.

    Args:
        config: the model.
        shape: the step.
        settings: of ``make_ledger``.
    """
    shapes = {shape.kind: shape}
    if shape.kind == "mixed":
        shapes = {"decode": shape.decode_alone(), "prefill": shape.prefill_alone(), **shapes}
    return Accounts({kind: make_ledger(config, one, **settings) for kind, one in shapes.items()})


def _divided(ledger: Ledger, rule: str) -> Bill:
    prefill = decode = 0.0
    for stage in ledger.stages:
        seconds = ledger.times[stage.part] * ledger.floor(stage).seconds
        share = _decode_share(ledger, stage, rule)
        decode += share * seconds
        prefill += (1 - share) * seconds
    return Bill(rule, prefill, decode)


def _decode_share(ledger: Ledger, stage: Stage, rule: str) -> float:
    """The decode segment's part of a stage's time."""
    hardware, shape = ledger.setting.hardware, ledger.shape
    if stage.mark != "shared":
        apart = {"chunks": 0.0, "groups": 1.0}
        if stage.mark in apart:
            return apart[stage.mark]
        chunks, groups = (
            stage._replace(exchanges=0).floor(hardware, only=part).seconds
            for part in (stage.chunks, stage.groups)
        )
        return groups / (chunks + groups) if chunks + groups else 0.0
    requests = len(shape.groups) / (len(shape.groups) + len(shape.chunks))
    if rule == "by requests":
        return requests
    if stage.part == LATER_PASS:
        return len(shape.groups) / shape.drafting
    if stage.name in _SAMPLED:
        drawn = sum(1 + group.drafts for group in shape.groups)
        return drawn / shape.sampled_rows
    return shape.decode_rows / shape.rows
