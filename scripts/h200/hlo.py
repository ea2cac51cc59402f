"""The instructions of an optimised program, read from XLA's dump of it."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>\S+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>\S+) = "
    # XLA numbers the parts of a wide tuple: /*index=5*/.
    r"(?P<shape>\((?:[^=]|/\*index=\d+\*/)*?\)|\S+) (?P<opcode>[\w-]+)\((?P<rest>.*)$"
)
_ASSIGNMENT = re.compile(r"^\s+(?:ROOT )?%\S+ = ")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d*\w*)\[(?P<dimensions>[\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.-]+)")
_NAME = re.compile(r"%([\w.-]+)")
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
    """

    name: str
    opcode: str
    size: int
    scalar: bool
    operands: tuple[str, ...]
    called: str


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
    entry, current = "", None
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head["name"], [])
            entry = head["name"] if head["entry"] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            current.append(_instruction(found))
        elif _ASSIGNMENT.match(line):
            raise ValueError(f"no instruction of the known form: {line[:200]}")
    if not entry:
        raise ValueError("the dump has no ENTRY computation: has XLA changed its text?")
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry)


def _instruction(found: re.Match[str]) -> Instruction:
    operands, _, attributes = found["rest"].partition(")")
    called = _CALLED.search(attributes) if found["opcode"] == "fusion" else None
    arrays = list(_ARRAY.finditer(found["shape"]))
    return Instruction(
        name=found["name"],
        opcode=found["opcode"],
        size=sum(map(_bytes, arrays)),
        scalar=len(arrays) == 1 and not arrays[0]["dimensions"],
        operands=tuple(_NAME.findall(operands)),
        called=called[1] if called else "",
    )


def _bytes(array: re.Match[str]) -> int:
    bits = _BITS.match(array["type"])
    width = max(1, int(bits[1]) // 8) if bits else 1  # pred, token
    return width * math.prod(int(size) for size in array["dimensions"].split(",") if size)
