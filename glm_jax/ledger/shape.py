"""What a step holds: chunks of prompts, groups of decoding requests, the pads of a cell."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from bucketing.cell import Cell, chunks_for


class ChunkShape(NamedTuple):
    """The prefill rows of one request.

    Attributes:
        rows: how many.
        prefix: tokens of the request that are in the cache already.
        sampled: whether it is the prompt's last chunk, which draws a token.
    """

    rows: int
    prefix: int = 0
    sampled: bool = True

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that it may see: n prefix + n (n + 1) / 2."""
        return self.rows * self.prefix + self.rows * (self.rows + 1) // 2

    def pairs_within(self, most: int) -> int:
        """The same where a row attends to at most ``most`` keys."""
        short = min(self.rows, max(0, most - self.prefix))
        return short * self.prefix + short * (short + 1) // 2 + (self.rows - short) * most


class GroupShape(NamedTuple):
    """The decode rows of one request.

    Attributes:
        context: tokens that its last row sees, all rows of the group among them.
        known: committed tokens.
        drafts: draft tokens after them.
    """

    context: int
    known: int = 1
    drafts: int = 0

    @property
    def rows(self) -> int:
        """Known tokens and drafts."""
        return self.known + self.drafts

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that it may see."""
        return ChunkShape(self.rows, self.context - self.rows).pairs

    def pairs_within(self, most: int) -> int:
        """The same where a row attends to at most ``most`` keys."""
        return ChunkShape(self.rows, self.context - self.rows).pairs_within(most)


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step, of all devices together.

    Attributes:
        chunks: of the prefill segment.
        groups: of the decode segment.
        cell: sizes of the program; what the step leaves unused are pads. None counts no pads.
        new_drafts: drafts that the MTP layer makes for the next step; 0 leaves it out.
        max_num_seqs: slots of the engine; bounds the chunks that a cell has room for.
    """

    chunks: tuple[ChunkShape, ...] = ()
    groups: tuple[GroupShape, ...] = ()
    cell: Cell | None = None
    new_drafts: int = 0
    max_num_seqs: int = 256

    def __post_init__(self) -> None:
        """Refuse what is no step.

        Raises:
            ValueError: it names the value and what is allowed.
        """
        if not self.chunks and not self.groups:
            raise ValueError("the step has no rows. Give it prefill rows, decode requests or both.")
        for chunk in self.chunks:
            if chunk.rows < 1 or chunk.prefix < 0:
                raise ValueError(f"{chunk} is no chunk: rows are 1 or more, prefix 0 or more.")
        for group in self.groups:
            if group.known < 1 or group.drafts < 0 or group.context < group.rows:
                raise ValueError(
                    f"{group} is no group: known tokens are 1 or more, drafts 0 or more, and the "
                    "context holds them all."
                )
        if self.new_drafts < 0:
            raise ValueError(f"new_drafts is {self.new_drafts}; allowed: 0 or more.")
        if self.cell is not None:
            self._check_cell(self.cell)

    def _check_cell(self, cell: Cell) -> None:
        widest = max((group.rows for group in self.groups), default=0)
        if (
            self.prefill_rows > cell.prefill
            or len(self.chunks) > chunks_for(cell.prefill, self.max_num_seqs)
            or len(self.groups) > cell.groups
            or widest > cell.width
        ):
            raise ValueError(
                f"{self.prefill_rows} prefill rows in {len(self.chunks)} chunks and "
                f"{len(self.groups)} groups of up to {widest} rows do not fit {cell}. Take a "
                "larger cell."
            )

    @classmethod
    def of_load(
        cls, *, prefill: int, prefix: int, decode: int, drafts: int, context: int
    ) -> "StepShape":
        """One chunk beside ``decode`` like requests that verify and make ``drafts`` drafts.

        Args:
            prefill: rows of the chunk; 0 is none.
            prefix: its tokens that are in the cache already.
            decode: requests.
            drafts: of each.
            context: tokens of each.
        """
        return cls(
            chunks=(ChunkShape(prefill, prefix),) if prefill else (),
            groups=(GroupShape(context, 1, drafts),) * decode,
            new_drafts=drafts,
        )

    @property
    def prefill_rows(self) -> int:
        """Useful rows of the prefill segment."""
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def decode_rows(self) -> int:
        """Useful rows of the decode segment."""
        return sum(group.rows for group in self.groups)

    @property
    def rows(self) -> int:
        """Useful rows."""
        return self.prefill_rows + self.decode_rows

    @property
    def sampled_rows(self) -> int:
        """Rows that a token is drawn at: last rows of last chunks, known and draft rows."""
        drawn = sum(1 + group.drafts for group in self.groups)
        return drawn + sum(chunk.sampled for chunk in self.chunks)

    @property
    def drafting(self) -> int:
        """Requests that the MTP layer drafts for."""
        return len(self.groups) + sum(chunk.sampled for chunk in self.chunks)

    @property
    def kind(self) -> str:
        """Which of the three accounts it is: "decode", "prefill" or "mixed"."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.groups else "prefill"

    def decode_alone(self) -> "StepShape":
        """The groups without the chunks, in a cell without them."""
        cell = self.cell and self.cell._replace(prefill=0)
        return replace(self, chunks=(), cell=cell)

    def prefill_alone(self) -> "StepShape":
        """The chunks without the groups, in a cell without them."""
        cell = self.cell and self.cell._replace(groups=0)
        return replace(self, groups=(), cell=cell)
