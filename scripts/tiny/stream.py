"""Batches of a phase: rows of code and synthetic rows, a function of the saved position alone."""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from scripts.tiny.loss import EXTRA_TOKENS, Batch
from scripts.tiny.synthetic import Row, RowMaker


@dataclasses.dataclass
class StreamPosition:
    """How far a phase's stream has been read; saved with the training state."""

    batches: int = 0
    code_rows: int = 0


class BatchStream:
    """Endless batches for one phase.

    Code rows walk through the files in a new order and with a new offset every epoch; whether a
    row is synthetic, and what it holds, follows from the seed and the batch number. Two streams at
    the same position give the same batches.
    """

    def __init__(
        self,
        files: list[Int[np.ndarray, " n"]],
        maker: RowMaker,
        *,
        rows: int,
        length: int,
        synthetic_share: float,
        seed: tuple[int, ...],
        position: StreamPosition,
    ) -> None:
        """Set up at `position`, which is advanced in place by every batch."""
        self.files, self.maker, self.seed, self.position = files, maker, seed, position
        self.rows, self.length, self.synthetic_share = rows, length, synthetic_share
        self.total = sum(len(file) for file in files)
        self._epoch = -1
        self._tokens = np.zeros(0, np.int32)
        self._starts = np.zeros(0, np.int64)

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""
        return self

    def __next__(self) -> Batch:
        """Return the next batch."""
        rng = np.random.default_rng([*self.seed, 1, self.position.batches])
        size = self.length + EXTRA_TOKENS
        rows = []
        for _ in range(self.rows):
            if rng.random() < self.synthetic_share:
                rows.append(self.maker.make(rng, size))
            else:
                rows.append(self._code_row(size))
        self.position.batches += 1
        return Batch(
            np.stack([row.tokens for row in rows]), np.stack([row.weights for row in rows])
        )

    def _code_row(self, size: int) -> Row:
        per_epoch = (self.total - size - self.length) // self.length
        epoch, index = divmod(self.position.code_rows, per_epoch)
        if epoch != self._epoch:
            self._start_epoch(epoch, per_epoch)
        start = self._starts[index]
        self.position.code_rows += 1
        return Row(self._tokens[start : start + size], np.ones(size, np.float32))

    def _start_epoch(self, epoch: int, per_epoch: int) -> None:
        rng = np.random.default_rng([*self.seed, 0, epoch])
        order = rng.permutation(len(self.files))
        self._tokens = np.concatenate([self.files[index] for index in order])
        offset = rng.integers(0, self.length)
        self._starts = offset + self.length * rng.permutation(per_epoch)
        self._epoch = epoch
