"""Seconds per call of things that compute the same, taken in turns."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.kernels.problem import of_layer

# A program runs for about this long: far above the clock's and the dispatch's noise.
PROGRAM_SECONDS = 0.03
MOST_TURNS = 1000


class Spread(NamedTuple):
    """Seconds per call: median, 10th and 90th percentile of the rounds."""

    median: float
    low: float
    high: float


class Repeated(NamedTuple):
    """A compiled program of several calls; takes the inputs of one, which it does not keep."""

    run: Callable[..., Any]
    turns: int


def repeat(call: Callable[..., Any], inputs: tuple[Any, ...], turns: int) -> Repeated:
    """Compile a program that makes a call ``turns`` times.

    In one program, not many dispatches: a dispatch takes tens of microseconds of host time, longer
    than the kernels of a small step, and in a step there is none between operators either. The trip
    count is static, so that a GPU's host enqueues the turns without waiting for any. Compiled for
    an H200, a turn is one command buffer: the operator's kernels and a few of a single thread.
    """
    compiled = jax.jit(chain(call, turns)).lower(*inputs).compile()
    return Repeated(compiled, turns)


def turns_for(seconds: float) -> int:
    """How many calls of that length fill PROGRAM_SECONDS."""
    return max(1, min(MOST_TURNS, math.ceil(PROGRAM_SECONDS / seconds)))


def chain(call: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """A function that makes a call ``turns`` times, one after the other, and returns the last.

    Each turn reads the next plane of the cache and the next layer's weights, as a step's layers
    do: what a small problem reads would otherwise stay in the device's cache. One number of the
    first input depends on the turn before, or XLA would take work out of the loop (a barrier does
    not keep it from that); whole outputs are carried on, or it might compute a part of them.
    """

    def program(*inputs: Any) -> Any:
        def turn(index: Any, state: tuple[Any, Any]) -> tuple[Any, Any]:
            first, _ = state
            outputs = call(*of_layer((first, *inputs[1:]), index))
            return _after(outputs, first), outputs

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(call, *inputs)
        )
        return jax.lax.fori_loop(0, turns, turn, (inputs[0], nothing))[1]

    return program


def _after(outputs: Any, first: Any) -> Any:
    """The same values, once there are outputs; one number is written where it stands."""
    numbers, *others = jax.tree.leaves(first)
    some = jax.tree.leaves(outputs)[0]
    # No output is this number, but XLA cannot know.
    never = some[(0,) * some.ndim].astype(jnp.float32) == 0.5**99
    origin = (0,) * numbers.ndim
    touched = numbers.at[origin].set(jnp.where(never, 0, numbers[origin]))
    return jax.tree.unflatten(jax.tree.structure(first), [touched, *others])


def measure(
    programs: Mapping[str, Repeated],
    inputs: tuple[Any, ...],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Spread]:
    """Run all programs in every round, the order turning; a round before the first warms up."""
    names = list(programs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            taken = seconds_of(programs[name].run, inputs, clock)
            if number >= 0:
                seconds[name].append(taken / programs[name].turns)
    return {name: _spread(values) for name, values in seconds.items()}


def seconds_of(
    run: Callable[..., Any],
    inputs: tuple[Any, ...],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds until a result is there."""
    started = clock()
    jax.block_until_ready(run(*inputs))
    return clock() - started


def _spread(values: list[float]) -> Spread:
    median, low, high = np.percentile(values, (50, 10, 90))
    return Spread(float(median), float(low), float(high))
