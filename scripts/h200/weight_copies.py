"""Where a program writes weights to memory again: cut out of a stack, joined or converted.

Each such copy costs its bytes twice in every step, and memory beside the weights.
"""

from collections.abc import Iterator, Sequence
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

# The arguments that a value is made of; none where it is made of anything else.
_Weights = tuple[str, ...]


class WeightCopy(NamedTuple):
    """One instruction that makes a copy of weights.

    Attributes:
        name: of the instruction.
        size: bytes that it writes.
        weights: the arguments that it reads.
        in_branch: whether it stands in a branch of a conditional. XLA fuses a slice of a stack
            into its matmul only where the stack is an argument of the program, never in a branch
            (jax 0.10.2), so the passes of the MTP layer have a few.
    """

    name: str
    size: int
    weights: tuple[str, ...]
    in_branch: bool = False


def weight_copies(module: Module) -> list[WeightCopy]:
    """Copies of SMALLEST bytes or more: what reads weights and nothing else, and only moves them.

    A product by constants or by other weights counts as moving: that is how scaled weights are
    brought to a wider type. The program and the branches of its conditionals are read, not the
    bodies of loops: the layers are unrolled.
    """
    return list(_copies(module, module.entry, (), ()))


def reads_weights(module: Module) -> bool:
    """Whether an argument has the name that weights are known by."""
    return any(
        line.opcode == "parameter" and line.name.startswith(WEIGHTS)
        for line in module.computations[module.entry]
    )


def _copies(
    module: Module, computation: str, whole: _Weights, parts: Sequence[_Weights]
) -> Iterator[WeightCopy]:
    """Copies in one computation.

    Args:
        module: the program.
        computation: its entry, or a branch.
        whole: the weights that a branch's argument is made of.
        parts: the same for each part of it, if it is a tuple.
    """
    source: dict[str, _Weights] = {}  # instruction -> the weights that its value is made of
    tuples: dict[str, Sequence[_Weights]] = {}
    for line in module.computations[computation]:
        weights: _Weights = ()
        if line.opcode == "parameter":
            own = computation == module.entry and line.name.startswith(WEIGHTS)
            weights, tuples[line.name] = (line.name,) if own else whole, parts
        elif line.opcode == "tuple":
            tuples[line.name] = [source.get(name, ()) for name in line.operands]
        elif line.opcode == "get-tuple-element" and tuples.get(line.operands[0]):
            weights = tuples[line.operands[0]][line.index]
        elif line.opcode == "conditional":
            for branch, name in zip(line.branches, line.operands[1:], strict=True):
                handed_on = source.get(name, ()), tuples.get(name, ())
                yield from _copies(module, branch, *handed_on)
        elif all(name in source for name in line.operands) and _only_moves(module, line):
            read = (name for operand in line.operands for name in source[operand])
            weights = tuple(dict.fromkeys(read))
            if weights and line.opcode not in _NAMES_ONLY and line.size >= SMALLEST:
                yield WeightCopy(line.name, line.size, weights, computation != module.entry)
        if weights:
            source[line.name] = weights


def _only_moves(module: Module, line: Instruction) -> bool:
    if line.opcode != "fusion":
        return line.opcode in _MOVES
    inside = module.computations[line.called]
    return all(inner.scalar or inner.opcode in _MOVES for inner in inside)
