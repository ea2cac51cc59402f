"""The least time of a logged step by the ledger; worked out when a log is read."""

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.outputs import StepRecord
from glm_jax.ledger.formats import Formats, make_formats
from glm_jax.ledger.hardware import Hardware
from glm_jax.ledger.ledger import make_ledger
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.model.config import GlmConfig
from glm_jax.observe.log_header import LogHeader


class StepFloor:
    """Floors of the steps of one engine.

    Attributes:
        model: The model.
        hardware: Of the device.
    """

    def __init__(self, header: LogHeader, hardware: Hardware) -> None:
        """Take what the steps have in common.

        Args:
            header: Of the log.
            hardware: Of the device.

        Raises:
            ValueError: The log does not name its model.
        """
        if header.model is None:
            raise ValueError(
                "the step log does not name its model, so no floor can be worked out. Write it "
                "with --step-log of `glm-jax generate`."
            )
        self.model: GlmConfig = header.model
        self.hardware = hardware
        self._formats = _formats(header.model, header.engine)
        self._max_num_seqs = header.engine.max_num_seqs

    def seconds(self, record: StepRecord) -> float | None:
        """Return the floor of a step, pads left out; of a loop, its first step's for each.

        None for a step without rows.
        """
        if record.cell is None:
            return None
        shape = step_shape(record, self._max_num_seqs)
        ledger = make_ledger(self.model, shape, formats=self._formats, hardware=self.hardware)
        return ledger.seconds * record.loop_steps


def step_shape(record: StepRecord, max_num_seqs: int) -> StepShape:
    """Return the ledger's view of a step.

    Args:
        record: The step; it has rows.
        max_num_seqs: Slots of the engine.
    """
    requests = list(zip(record.request_ids, record.rows, strict=True))
    return StepShape(
        chunks=tuple(
            ChunkShape(rows.known, rows.start, name in record.tokens)
            for name, rows in requests[: record.chunks]
        ),
        groups=tuple(
            GroupShape(rows.start + rows.known + rows.drafts, rows.known, rows.drafts)
            for _, rows in requests[record.chunks :]
        ),
        cell=record.cell,
        new_drafts=record.new_drafts,
        max_num_seqs=max_num_seqs,
    )


def _formats(model: GlmConfig, engine: EngineConfig) -> Formats:
    kinds = {"weights": engine.weight_dtype, "cache": engine.kv_cache_dtype}
    dtype = "float32" if engine.dtype == "auto" else engine.dtype
    return make_formats(
        model, **{name: dtype if kind == "auto" else kind for name, kind in kinds.items()}
    )
