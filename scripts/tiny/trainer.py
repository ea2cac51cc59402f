"""The training loop: compiles a step per phase, logs, saves, and stops when the budget is used."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scripts.tiny.checkpoint import (
    CHECKPOINT,
    Progress,
    TrainingState,
    initial_state,
    load_checkpoint,
    save_checkpoint,
)
from scripts.tiny.loss import Batch, Objective, training_loss
from scripts.tiny.optimizer import update
from scripts.tiny.phases import (
    ADAM_RATE,
    BIAS_RATE,
    MUON_RATE,
    PHASES,
    Budget,
    Phase,
    phase_at,
    rate_factor,
)
from scripts.tiny.shape import TinyShape
from scripts.tiny.stream import BatchStream, StreamPosition
from scripts.tiny.synthetic import RowMaker

LARGEST_GRADIENT = 1.0

Metrics = dict[str, Float[Array, ""]]
StepFunction = Callable[[TrainingState, Batch, Any], tuple[TrainingState, Metrics]]


@functools.cache
def build_step(shape: TinyShape, objective: Objective) -> StepFunction:
    """Return the jitted step, the same one for the same arguments, so that it compiles once.

    Its third argument is the factor on all rates.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainingState, batch: Batch, factor: Float[Array, ""]
    ) -> tuple[TrainingState, Metrics]:
        differentiate = jax.value_and_grad(training_loss, has_aux=True)
        (_, (metrics, loads)), gradients = differentiate(
            state.parameters, state.router_bias, batch, shape, objective
        )
        squares = [jnp.sum(gradient * gradient) for gradient in gradients.values()]
        norm = jnp.sqrt(sum(squares))
        clip = jnp.minimum(1.0, LARGEST_GRADIENT / (norm + 1e-12))
        clipped = {name: gradient * clip for name, gradient in gradients.items()}
        rates = (factor * MUON_RATE, factor * ADAM_RATE)
        parameters, optimizer = update(shape, state.parameters, clipped, state.optimizer, rates)
        # An overloaded expert becomes less likely by a fixed amount: balance without a loss term.
        push = BIAS_RATE * jnp.maximum(factor, 0.1) * jnp.sign(1 / shape.n_routed_experts - loads)
        metrics |= {"gradient": norm, "peak_load": loads.max() * shape.n_routed_experts}
        return TrainingState(parameters, optimizer, state.router_bias + push), metrics

    return step


@dataclasses.dataclass
class Trainer:
    """Trains a model in `folder`, going on from the checkpoint there if there is one.

    Attributes:
        folder: holds the checkpoint; made if missing.
        shape: sizes of the model.
        files: encoded training files.
        maker: makes synthetic rows.
        budget: when training ends, earlier sessions counted in.
        phases: the course of training.
        seed: of the first values and of the data's order.
        save_every: seconds between checkpoints.
    """

    folder: Path
    shape: TinyShape
    files: list[Int[np.ndarray, " n"]]
    maker: RowMaker
    budget: Budget
    phases: tuple[Phase, ...] = PHASES
    seed: int = 0
    save_every: float = 240.0

    def __post_init__(self) -> None:
        """Restore or start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / CHECKPOINT
        if path.exists():
            self.shape, self.state, self.progress = load_checkpoint(path)
        else:
            self.state, self.progress = initial_state(self.shape, self.seed), Progress()
        self._running: tuple[StepFunction, BatchStream] | None = None
        self._saved_at = time.monotonic()

    def fraction(self) -> float:
        """Return the used part of the budget."""
        return self.budget.fraction(self.progress.elapsed, self.progress.step)

    def train(self, report: Callable[[str], None] = print, longest: int | None = None) -> bool:
        """Run until the budget is used, or until a phase with rows beyond `longest`; then save.

        Returns whether the budget is used.
        """
        while self.fraction() < 1:
            length = self.phases[phase_at(self.phases, self.fraction())].length
            if longest is not None and length > longest:
                break
            self.advance(report)
            if time.monotonic() - self._saved_at > self.save_every:
                self.save()
        self.save()
        return self.fraction() >= 1

    def advance(self, report: Callable[[str], None] = print) -> dict[str, Any]:
        """Do one step and return its log record."""
        began = time.monotonic()
        step, stream = self._enter_phase(report)
        phase, progress = self.phases[self.progress.phase], self.progress
        factor = rate_factor(self.fraction(), progress.step)
        self.state, metrics = step(self.state, next(stream), np.float32(factor))
        numbers = {name: float(value) for name, value in metrics.items()}
        seconds = time.monotonic() - began
        progress.step += 1
        progress.tokens += phase.rows * phase.length
        progress.elapsed += seconds
        record = {"step": progress.step, "phase": phase.name, "tokens": progress.tokens}
        record |= {"seconds": seconds, "elapsed": progress.elapsed, "rate": factor} | numbers
        progress.log.append({k: _rounded(v) for k, v in record.items()})
        if progress.step % 10 == 0:
            report(summary(progress.log[-10:]))
        if not math.isfinite(numbers["lm"]):
            raise FloatingPointError(
                f"the loss is {numbers['lm']} at step {progress.step}. Lower the learning rates in "
                f"phases.py and go on from the last checkpoint in {self.folder}."
            )
        return record

    def save(self) -> None:
        """Write the checkpoint."""
        save_checkpoint(self.folder / CHECKPOINT, self.shape, self.state, self.progress)
        self._saved_at = time.monotonic()

    def _enter_phase(self, report: Callable[[str], None]) -> tuple[StepFunction, BatchStream]:
        index = phase_at(self.phases, self.fraction())
        changed = index != self.progress.phase
        if self._running is not None and not changed:
            return self._running
        phase = self.phases[index]
        if changed:
            self.save()
            self.progress.phase, self.progress.position = index, StreamPosition()
        report(f"phase {phase.name}: {phase.rows} rows of {phase.length}")
        stream = BatchStream(
            self.files,
            self.maker,
            rows=phase.rows,
            length=phase.length,
            synthetic_share=phase.synthetic_share,
            seed=(self.seed, index),
            position=self.progress.position,
        )
        self._running = build_step(self.shape, phase.objective), stream
        return self._running


def summary(records: list[dict[str, Any]]) -> str:
    """Write the means of a few log records in one line."""
    last = records[-1]
    head = f"{last['phase']} step {last['step']} tokens {last['tokens'] / 1e3:.0f}K"
    skipped = ("step", "phase", "tokens", "elapsed", "recalled")
    means = []
    for name in last:
        if name not in skipped:
            values = [r[name] for r in records if name in r and (name != "recall" or r["recalled"])]
            means.append(f"{name} {np.mean(values) if values else float('nan'):.3f}")
    return f"{head} elapsed {last['elapsed'] / 60:.1f}min " + " ".join(means)


def _rounded(value: float | int | str) -> float | int | str:
    return round(value, 5) if isinstance(value, float) else value
