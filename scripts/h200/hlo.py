"""The instructions of an optimised program, read from XLA's dump of it."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from scripts.hlo_lines import Line, hlo_lines

_ARRAY = re.compile(r"(?P<type>[a-z]+\d*\w*)\[(?P<dimensions>[\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_BRANCHES = re.compile(
    r"(?:true_computation=%?(?P<true>[\w.-]+), false_computation=%?(?P<false>[\w.-]+)"
    r"|branch_computations=\{(?P<all>[^}]*)\})"
)
_INDEX = re.compile(r"index=(\d+)")
_BITS = re.compile(r"^[a-z]+(\d+)")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: of the instruction.
        opcode: such as "fusion".
        size: bytes of its result, all parts of a tuple together.
        scalar: whether its result is one number.
        operands: names.
        called: the computation of a fusion; empty for others.
        branches: the computations of a conditional, in the order of its operands from the second.
        index: the part of a tuple that is taken out of it; 0 for others.
    """

    name: str
    opcode: str
    size: int
    scalar: bool
    operands: tuple[str, ...]
    called: str
    branches: tuple[str, ...]
    index: int


class Module(NamedTuple):
    """A program.

    Attributes:
        computations: instructions by computation, in their order.
        entry: name of the computation that is the program.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


def read_module(folder: Path) -> Module:
    """Parse the dump folder of one program.

    Raises:
        FileNotFoundError: the folder holds no optimised program.
    """
    found = sorted(folder.glob("*gpu_after_optimizations.txt"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no *gpu_after_optimizations.txt")
    return parse_module(found[-1].read_text())


def parse_module(text: str) -> Module:
    """Parse the text of a dump.

    Raises:
        ValueError: there is no entry computation in it, or a line of another form.
    """
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    for line in hlo_lines(text):
        computations.setdefault(line.computation, []).append(_instruction(line))
        entry = line.computation if line.entry else entry
    if not entry:
        raise ValueError("the dump has no ENTRY computation: has XLA changed its text?")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def _instruction(line: Line) -> Instruction:
    called = _CALLED.search(line.attributes) if line.opcode == "fusion" else None
    taken = _INDEX.search(line.attributes) if line.opcode == "get-tuple-element" else None
    arrays = list(_ARRAY.finditer(line.shape))
    return Instruction(
        name=line.name,
        opcode=line.opcode,
        size=sum(map(_bytes, arrays)),
        scalar=len(arrays) == 1 and not arrays[0]["dimensions"],
        operands=line.operands,
        called=called[1] if called else "",
        branches=_branches(line.attributes) if line.opcode == "conditional" else (),
        index=int(taken[1]) if taken else 0,
    )


def _branches(attributes: str) -> tuple[str, ...]:
    found = _BRANCHES.search(attributes)
    if found is None:
        raise ValueError(f"a conditional without branches: {attributes[:200]}")
    if found["all"] is None:
        return found["true"], found["false"]
    return tuple(name.strip().removeprefix("%") for name in found["all"].split(","))


def _bytes(array: re.Match[str]) -> int:
    bits = _BITS.match(array["type"])
    width = max(1, int(bits[1]) // 8) if bits else 1  # pred, token
    return width * math.prod(int(size) for size in array["dimensions"].split(",") if size)
