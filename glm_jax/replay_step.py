"""What ``glm-jax replay`` does."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from rich.console import Console

from bucketing.loop_inputs import LoopKey
from bucketing.piecewise import PieceBuckets
from bucketing.program_key import ProgramKey
from bucketing.programs import ProgramTable
from glm_jax.compilation_cache import compile_service
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import CONTROLS, Lowering
from glm_jax.engine.modes import Mode
from glm_jax.engine.runner import Runner
from glm_jax.model.config import GlmConfig
from glm_jax.model.piece_shapes import kinds_of
from glm_jax.model_files import find_model, load_model
from glm_jax.observe.log_header import LogHeader
from glm_jax.observe.recorded_call import RecordedCall, read_call
from glm_jax.observe.replay import replay
from glm_jax.observe.step_line import LoggedStep
from glm_jax.observe.step_log import read_step_log
from glm_jax.progress import compiling_bar, loading_bar


def run(options: argparse.Namespace) -> int:
    """Replay a log up to a step and print whether that step and those before it are equal.

    Returns:
        0 where every bit is equal, 1 where not.

    Raises:
        ValueError: The log carries no plans, has no such step, or is of another model.
    """
    log = read_step_log(options.log)
    steps = _wanted(log.steps, options.step)
    calls = [read_call(call) for step in steps for call in step.calls]
    runner = _runner(options.model, log.header, calls)
    replayed = list(replay(calls, runner, log.header.engine.limits()))
    last = steps[-1]
    # Those of the step itself come last.
    own = replayed[len(replayed) - sum(_runs(read_call(call)) for call in last.calls) :]
    equal = sum(one.equal for one in replayed)
    record = last.record
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"step {record.index}: {record.kind}, cell {record.cell and tuple(record.cell)}, "
        f"{record.mode}, {len(record.request_ids)} requests: "
        f"{'every bit equal' if own and all(one.equal for one in own) else 'DIFFERENT'}"
    )
    console.print(f"{equal} of {len(replayed)} programs from the beginning on are equal")
    return 0 if equal == len(replayed) else 1


def _runs(call: RecordedCall) -> bool:
    return call.kind in ("run", "loop")


def _wanted(steps: Sequence[LoggedStep], number: int | None) -> list[LoggedStep]:
    """Return the steps up to the one asked for."""
    if not any(step.calls for step in steps):
        raise ValueError("the log carries no plans. Write one with --log-plans.")
    known = [step.record.index for step in steps if step.calls]
    if number is None:
        number = known[-1]
    if number not in known:
        raise ValueError(
            f"step {number} ran nothing that the log knows; it knows {known[0]} to {known[-1]}."
        )
    return [step for step in steps if step.record.index <= number]


def _runner(model: str | Path | None, header: LogHeader, calls: Iterable[RecordedCall]) -> Runner:
    """Return a runner of the log's model with the programs that the calls need."""
    found, config, engine = find_model(model), header.model, header.engine
    device = jax.devices()[0]
    if config is None or (header.device and header.device != device.platform):
        raise ValueError(
            f"the log was written on {header.device!r} of "
            f"{'an unknown model' if config is None else 'a known model'}; this is "
            f"{device.platform!r}. Replay it where it was written."
        )
    with loading_bar(found.name) as progress:
        transformer = load_model(
            found._replace(config=config),
            dtype=engine.dtype,
            weight_dtype=engine.weight_dtype,
            storage=engine.layer_storage,
            seed=engine.seed,
            device=device,
            progress=progress,
        )
    lowering, programs = Lowering(config, engine), ProgramTable()
    keys = _keys(config, engine, calls)
    with compiling_bar(len(keys)) as on_done:
        compile_service(lowering, programs).warm(keys, on_done)
    return Runner(transformer, lowering, programs)


def _keys(
    config: GlmConfig, engine: EngineConfig, calls: Iterable[RecordedCall]
) -> tuple[ProgramKey, ...]:
    """Return the programs that the calls run."""
    pieces = PieceBuckets(kinds_of(config, engine.num_drafts), engine.piecewise_axis(), ())
    keys: dict[ProgramKey, None] = {}
    for call in calls:
        if call.kind == "control":
            keys[CONTROLS] = None
        if call.served is None or call.served.mode is Mode.EAGER:
            continue
        cell = call.served.layout
        if call.kind == "loop":
            keys[LoopKey(cell.groups, cell.width, engine.decode_loop_steps)] = None
        elif call.served.mode is Mode.PIECEWISE:
            keys |= dict.fromkeys(pieces.pieces(call.served.bucket))
        else:
            keys[cell] = None
    return tuple(keys)
