"""An answer to a problem, checked before it is timed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from scripts.kernels.problem import Problem
from scripts.kernels.timing import Repeated, repeat, seconds_of, turns_for

# Largest error, relative to the reference's largest value. Float32 on a CPU, in another order; on a
# GPU the kernels round operands to bfloat16 (8 bits) and XLA those of float32 products to TF32.
TOLERANCE = {"cpu": 1e-4, "gpu": 2e-2}


class Trial(NamedTuple):
    """One function that answers a problem.

    Attributes:
        error: as ``Problem.error``; None where there are no outputs.
        repeated: ready to be timed; None where that makes no sense.
        reason: why it is not timed, empty where it is.
    """

    error: float | None
    repeated: Repeated | None
    reason: str

    @property
    def wrong(self) -> bool:
        """Whether it gave outputs that it should not have given."""
        return self.error is not None and self.repeated is None


def checker(problem: Problem) -> Callable[[tuple[Any, ...], Any], float]:
    """The problem's error, compiled once for all answers, with products in full float32."""
    error = jax.jit(problem.error)

    def check(inputs: tuple[Any, ...], outputs: Any) -> float:
        with jax.default_matmul_precision("highest"):
            return float(error(inputs, outputs))

    return check


def attempt(
    call: Callable[..., Any],
    inputs: tuple[Any, ...],
    check: Callable[[tuple[Any, ...], Any], float],
    tolerance: float,
) -> Trial:
    """Run a call once and check what it says; an answer that is not right is not timed.

    Args:
        call: traceable.
        inputs: of the call.
        check: of ``checker``.
        tolerance: largest error.
    """
    try:
        compiled = jax.jit(call).lower(*inputs).compile()
        outputs = jax.block_until_ready(compiled(*inputs))
        found = check(inputs, outputs)
        if not found <= tolerance:  # nor is NaN
            return Trial(found, None, f"wrong: its error is over {tolerance:g}")
        turns = turns_for(seconds_of(compiled, inputs))
        return Trial(found, repeat(call, inputs, turns), "")
    except Exception as error:  # of JAX, Mosaic or XLA, or the implementation's own refusal
        return Trial(None, None, first_line(error))


def first_line(error: Exception) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
