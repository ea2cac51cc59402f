"""Where a program writes weights to memory again: cut out of a stack, joined or converted.

Each such copy costs its bytes twice in every step, and memory beside the weights.
"""

from collections.abc import Iterator
from typing import NamedTuple

from scripts.h200.hlo import Instruction, Module

# Name of the step's argument that holds the weights, as XLA spells it.
WEIGHTS = "params_"
# Smaller ones are norms and biases.
SMALLEST = 1 << 20

_MOVES = frozenset(
    (
        *("bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "convert", "copy"),
        *("dynamic-slice", "get-tuple-element", "iota", "multiply", "pad", "parameter", "reshape"),
        *("slice", "transpose", "tuple"),
    )
)
_NAMES_ONLY = frozenset({"bitcast", "get-tuple-element", "reshape"})


class WeightCopy(NamedTuple):
    """One instruction that makes a copy of weights.

    Attributes:
        name: of the instruction.
        size: bytes that it writes.
        weights: the arguments that it reads.
    """

    name: str
    size: int
    weights: tuple[str, ...]


def weight_copies(module: Module) -> list[WeightCopy]:
    """Copies of SMALLEST bytes or more: what reads weights and nothing else, and only moves them.

    A product by constants or by other weights counts as moving: that is how scaled weights are
    brought to a wider type. Only the program itself is read, not the bodies of its loops and
    conditionals: the layers are unrolled.
    """
    return list(_copies(module))


def reads_weights(module: Module) -> bool:
    """Whether an argument has the name that weights are known by."""
    return any(
        line.opcode == "parameter" and line.name.startswith(WEIGHTS)
        for line in module.computations[module.entry]
    )


def _copies(module: Module) -> Iterator[WeightCopy]:
    source: dict[str, tuple[str, ...]] = {}  # instruction -> the weights that its value is made of
    for line in module.computations[module.entry]:
        if line.opcode == "parameter" and line.name.startswith(WEIGHTS):
            source[line.name] = (line.name,)
        known = line.operands and all(name in source for name in line.operands)
        if not known or not _only_moves(module, line):
            continue
        weights = tuple(dict.fromkeys(name for read in line.operands for name in source[read]))
        source[line.name] = weights
        if line.opcode not in _NAMES_ONLY and line.size >= SMALLEST:
            yield WeightCopy(line.name, line.size, weights)


def _only_moves(module: Module, line: Instruction) -> bool:
    if line.opcode != "fusion":
        return line.opcode in _MOVES
    inside = module.computations[line.called]
    return all(inner.scalar or inner.opcode in _MOVES for inner in inside)
