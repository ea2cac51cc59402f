"""Owns what lives on the device - weights, cache, slots, programs - and runs packed steps.

Nothing here traces or compiles on the request path. A step whose cell has no program yet runs
piece by piece.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from bucketing.cell import Cell
from bucketing.loop_inputs import LoopInputs, LoopKey, LoopOutputs
from bucketing.piecewise import Piece, PieceBuckets
from bucketing.program_key import ProgramKey
from bucketing.programs import CompileReport, NoProgramError, ProgramTable, compile_program
from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax.engine.lowering import CONTROLS, LOGITS, LOGITS_ROWS, Lowering
from glm_jax.engine.modes import Mode, Served
from glm_jax.engine.piecewise import PiecewiseStep
from glm_jax.model.cache import Cache, make_zeros
from glm_jax.model.piece_shapes import kinds_of
from glm_jax.model.slots import Slots
from glm_jax.model.storage import split_model
from glm_jax.model.transformer import Transformer
from glm_jax.sampling.control_update import ControlUpdate
from glm_jax.sampling.row_logprobs import RowLogprobs, RowQuestion


class Runner:
    """Runs steps of one model on one device.

    The cache and the slots are donated to every step. If a program raises, both are lost; ``reset``
    makes new, empty ones.

    Attributes:
        model: the weights.
        lowering: what the programs are made from.
        limits: array widths of a step.
        programs: the compiled programs; more may appear at any time.
        pieces: the buckets of PIECEWISE steps.
        dispatches: programs that the last step ran; 0 for EAGER.
        drafts_write_ahead: whether making drafts writes the cache behind a step's rows: where the
            later passes of the MTP layer select keys of their own, they write them too.
        resets: how often cache and slots were made anew.
    """

    def __init__(
        self,
        model: Transformer,
        lowering: Lowering,
        programs: ProgramTable | None = None,
    ) -> None:
        """Allocate the cache; compile no step.

        Args:
            model: the weights, on their device.
            lowering: what the programs are made from; of the same model and storage.
            programs: the table that the programs come from; by default a new one, which
                ``compile`` fills.
        """
        self.model = model
        self.lowering = lowering
        self.limits = lowering.limits
        _, self._params = split_model(model)
        _check_leaves(self._params, lowering)
        self._head_weight = model.head[...]
        self.programs = programs if programs is not None else ProgramTable()
        self.pieces = PieceBuckets(
            kinds_of(lowering.model, self.limits.num_drafts),
            lowering.engine.piecewise_axis(),
            self.programs,
        )
        self.dispatches = 0
        self.drafts_write_ahead = not lowering.model.index_share_for_mtp_iteration
        self._piecewise = PiecewiseStep(model, lowering.model)
        self._cells = frozenset(lowering.engine.grid().cells())
        self._make_cache = make_zeros(lowering.cache)
        self._cache: Cache | None = None
        self._slots: Slots
        self.resets = -1
        self.reset()

    @property
    def num_leaves(self) -> int:
        """Arrays passed to a step besides its inputs."""
        return len(self._params) + len(Cache._fields) + len(Slots._fields)

    def compile(
        self, keys: Iterable[ProgramKey], on_done: Callable[[CompileReport], Any] | None = None
    ) -> None:
        """Compile the programs that are missing, here and now, without any store."""
        for key in keys:
            if key not in self.programs:
                program, report = compile_program(self.lowering.lower, key)
                self.programs.add(key, program, report)
                if on_done is not None:
                    on_done(report)

    def serve(self, cell: Cell, rows: int, loop_steps: int = 1) -> Served:
        """Say how a step will run.

        Args:
            cell: what it was planned for.
            rows: its useful rows.
            loop_steps: more than one asks for the decode loop of the cell, if it is compiled.

        Raises:
            NoProgramError: neither the cell nor the pieces for so many rows are compiled.
        """
        mode = self.lowering.engine.execution_mode
        if mode == "eager":
            return Served(Mode.EAGER, cell, "execution_mode is eager")
        if mode != "piecewise" and cell in self.programs:
            looped = loop_steps > 1 and self._loop_key(cell) in self.programs
            return Served(Mode.FULL, cell, loop=looped)
        bucket = None if mode == "full" else self.pieces.bucket_for(rows)
        if bucket is None:
            raise NoProgramError(
                f"a step of {rows} rows has no program: execution_mode is {mode!r}, {cell} is "
                f"{'compiled' if cell in self.programs else 'not compiled'}, pieces are ready for "
                f"{self.pieces.largest} rows. Compile the cell, or the pieces."
            )
        if mode == "piecewise":
            reason = "execution_mode is piecewise"
        elif cell in self._cells:
            reason = "cell not compiled yet"
        else:
            reason = "outside the grid"
        return Served(Mode.PIECEWISE, self.lowering.engine.widest, reason, bucket)

    def control(self, updates: Iterable[ControlUpdate]) -> None:
        """Change the control lines of the slots, before the step that reads them.

        Args:
            updates: for one call of the controls program each.

        Raises:
            NoProgramError: it is not compiled; nothing is lost.
        """
        for update in updates:
            self._slots = self.programs[CONTROLS](self._slots, update)

    def run(self, served: Served, inputs: StepInputs) -> StepOutputs:
        """Dispatch one step; the outputs stay on the device until fetched.

        Args:
            served: from ``serve``.
            inputs: packed for its layout.

        Raises:
            NoProgramError: the programs are not compiled; nothing is lost.
        """
        assert self._cache is not None
        state = self._cache, self._slots, inputs
        if served.mode is Mode.FULL:
            result = self.programs[served.layout](self._params, *state)
            self.dispatches = 1
        elif served.mode is Mode.PIECEWISE:
            pieces = {
                piece.kind: self.programs[piece] for piece in self.pieces.pieces(served.bucket)
            }
            result = self._piecewise(pieces.__getitem__, *state)
            self.dispatches = self._piecewise.dispatches
        else:
            with jax.disable_jit():
                result = self.lowering.step(self._params, *jax.device_put(state))
            self.dispatches = 0
        self._cache, self._slots, outputs = result
        return outputs

    def run_loop(self, served: Served, inputs: StepInputs, ends: LoopInputs) -> LoopOutputs:
        """Dispatch a decode loop; the outputs stay on the device until fetched.

        Args:
            served: from ``serve``, as a loop.
            inputs: packed for the loop's first step.
            ends: what ends the loop.

        Raises:
            NoProgramError: the loop is not compiled; nothing is lost.
        """
        program = self.programs[self._loop_key(served.layout)]
        result = program(self._params, self._cache, self._slots, inputs, ends)
        self.dispatches = 1
        self._cache, self._slots, outputs = result
        return outputs

    def _loop_key(self, cell: Cell) -> LoopKey:
        return LoopKey(cell.groups, cell.width, self.lowering.engine.decode_loop_steps)

    def logits(self, outputs: StepOutputs, rows: Sequence[int]) -> Float[np.ndarray, "rows V"]:
        """Float32 logits of chosen rows of a step."""
        parts = self._head_rows(outputs, RowQuestion(rows, [0] * len(rows), [()] * len(rows)))
        # One part is fetched before the next is made: they are large.
        return np.concatenate([np.asarray(logits)[:count] for count, logits, _ in parts])

    def logprobs(self, outputs: StepOutputs, question: RowQuestion) -> RowLogprobs:
        """Log-probabilities at chosen rows of a step, by its raw logits."""
        parts = [(count, found) for count, _, found in self._head_rows(outputs, question)]
        fetched = [[np.asarray(array)[:n] for array in found] for n, found in parts]
        return RowLogprobs(*map(np.concatenate, zip(*fetched, strict=True)))

    def _head_rows(
        self, outputs: StepOutputs, question: RowQuestion
    ) -> Iterator[tuple[int, jax.Array, RowLogprobs]]:
        """Yield, part by part, how many rows are meant, and what the head program makes of them."""
        rows, targets, further = question
        hidden = outputs.hidden
        program = self.programs[Piece(LOGITS, hidden.shape[1])]
        for start in range(0, len(rows), LOGITS_ROWS):
            part = slice(start, min(start + LOGITS_ROWS, len(rows)))
            count = part.stop - start
            index, target = np.zeros((2, LOGITS_ROWS), np.int32)
            index[:count], target[:count] = rows[part], targets[part]
            ids = np.zeros((LOGITS_ROWS, self.lowering.logprob_width), np.int32)
            for line, more in enumerate(further[part]):
                ids[line, : len(more)] = more
            yield count, *program(hidden, self._head_weight, index, target, ids)

    def reset(self) -> None:
        """Make a new zero cache and empty slots: at the start, and after a lost step."""
        self.resets += 1
        if self._cache is not None:
            # Whatever survived the fault goes first: two pools at once may not fit.
            for array in self._cache:
                array.delete()
        self._cache = self._make_cache()
        empty = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), self.lowering.slots)
        self._slots = jax.device_put(empty)

    def snapshot(self) -> Cache:
        """A host copy of the whole cache, for tests and tools that inspect pages."""
        return jax.tree.map(np.array, self._cache)


def _check_leaves(params: list, lowering: Lowering) -> None:
    """Programs take the weights by position: refuse others than they were lowered for."""
    held = [(leaf.shape, leaf.dtype) for leaf in params]
    wanted = [(leaf.shape, leaf.dtype) for leaf in lowering.params]
    if held != wanted:
        raise ValueError(
            f"the model has {len(held)} leaves that are not the {len(wanted)} its programs take. "
            "Lower with the model's own config, dtype, weight_dtype and layer_storage."
        )
