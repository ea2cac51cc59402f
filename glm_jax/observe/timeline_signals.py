"""The four signals of mixed steps on one time axis: rows, times between tokens, load, modes."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from glm_jax.engine.modes import Mode
from glm_jax.engine.outputs import StepRecord
from glm_jax.observe.gap import gaps_of
from glm_jax.observe.step_log import StepLogFile
from glm_jax.observe.timeline_counters import decode_rows, prefill_rows


class Wait(NamedTuple):
    """The time between two tokens of a request.

    Attributes:
        request_id: Whose; with the number of its life where an id was used again.
        time: When the later one came, in seconds since the log began.
        seconds: Between them.
        prefill_rows: Rows of prompts that were computed meanwhile.
    """

    request_id: str
    time: float
    seconds: float
    prefill_rows: int


class Signals(NamedTuple):
    """What the steps of a log did, those without rows and lost ones left out.

    Attributes:
        starts: Of each step, in seconds since the first one or the first arrival.
        ends: Likewise.
        prefill: Rows of prompts in each.
        decode: Rows of decoding requests in each, drafts included; of a loop, of all its steps.
        pads: Pad rows.
        mixed: Whether it served both.
        kinds: "prefill", "decode" or "mixed".
        modes: FULL, PIECEWISE or EAGER.
        busy: The part of the time since the step before in which the device had work: from the
            dispatch until its outputs were there.
        waits: All times between tokens.
    """

    starts: Float[np.ndarray, " steps"]
    ends: Float[np.ndarray, " steps"]
    prefill: Int[np.ndarray, " steps"]
    decode: Int[np.ndarray, " steps"]
    pads: Int[np.ndarray, " steps"]
    mixed: Bool[np.ndarray, " steps"]
    kinds: tuple[str, ...]
    modes: tuple[str, ...]
    busy: Float[np.ndarray, " steps"]
    waits: list[Wait]

    @property
    def busy_share(self) -> float:
        """The part of all the time in which the device had work."""
        since = np.diff(self.ends, prepend=0.0)
        return float(np.sum(self.busy * since) / self.ends[-1])

    def steps_by_mode(self) -> dict[str, int]:
        """Return how many steps ran in each mode; FULL and PIECEWISE always, EAGER if there are."""
        counts = {mode.value: self.modes.count(mode.value) for mode in Mode}
        return {mode: count for mode, count in counts.items() if count or mode != Mode.EAGER.value}


def signals_of(log: StepLogFile) -> Signals:
    """Return the signals of a log.

    Raises:
        ValueError: No step of it has rows.
    """
    records = log.records
    ran = [record for record in records if record.cell is not None and record.fault is None]
    if not ran:
        raise ValueError("no step of the log has rows, so there is nothing to draw.")
    zero = min(
        [ran[0].started, *(arrival.time for record in records for arrival in record.arrived)]
    )
    starts = np.array([record.started for record in ran]) - zero
    ends = starts + np.array([record.wall_time for record in ran])
    return Signals(
        starts,
        ends,
        np.array([prefill_rows(record) for record in ran]),
        np.array([decode_rows(record) for record in ran]),
        np.array([record.pad_rows for record in ran]),
        np.array([record.kind == "mixed" for record in ran]),
        tuple(record.kind for record in ran),
        tuple(record.mode for record in ran),
        _busy(ran, ends),
        _waits(records, zero),
    )


def _busy(ran: list[StepRecord], ends: Float[np.ndarray, " steps"]) -> Float[np.ndarray, " steps"]:
    work = np.array([record.phases.dispatch + record.phases.device for record in ran])
    since = np.diff(ends, prepend=0.0)
    # Rounded times may say a little more than all.
    return np.divide(work, since, out=np.ones_like(work), where=since > work)


def _waits(records: list[StepRecord], zero: float) -> list[Wait]:
    rows = np.cumsum([0, *(prefill_rows(record) for record in records)])
    lives: dict[str, int] = {}
    number: dict[tuple[str, int], int] = {}
    for place, record in enumerate(records):
        for name in record.tokens:
            number[name, place] = lives.get(name, 0)
        for name in record.ended:
            lives[name] = lives.get(name, 0) + 1
    waits = []
    for gap in gaps_of(records):
        last = records[gap.last]
        life = number[gap.request_id, gap.last]
        waits.append(
            Wait(
                f"{gap.request_id} #{life + 1}" if life else gap.request_id,
                last.started + last.wall_time - zero,
                gap.seconds,
                int(rows[gap.last + 1] - rows[gap.first]),
            )
        )
    return waits
