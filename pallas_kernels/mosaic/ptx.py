"""One instruction of PTX where neither Mosaic nor MLIR has an operation for it."""

from collections.abc import Sequence

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def instruction(
    text: str,
    constraints: str,
    operands: Sequence[ir.Value],
    result: ir.Type,
    *,
    has_side_effects: bool = False,
) -> ir.Value:
    """The result of ``text``.

    Args:
        text: PTX with ``$0`` for the result and ``$1``, ... for the operands.
        constraints: LLVM's, as "=r,h": result first.
        operands: values that the constraints describe.
        result: type of the result.
        has_side_effects: the compiler must neither drop, merge nor move it out of a loop.
    """
    value = llvm.inline_asm(
        result, list(operands), text, constraints, has_side_effects=has_side_effects
    )
    assert isinstance(value, ir.Value), f"{text=} has one result"
    return value
