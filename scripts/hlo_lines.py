"""The lines of an optimised program in XLA's text form, whatever is wanted of them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>\S+) \(.*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>\S+) = "
    # XLA numbers the parts of a wide tuple: /*index=5*/.
    r"(?P<shape>\((?:[^=]|/\*index=\d+\*/)*?\)|\S+) (?P<opcode>[\w-]+)\((?P<rest>.*)$"
)
_ASSIGNMENT = re.compile(r"^\s+(?:ROOT )?%\S+ = ")
_NAME = re.compile(r"%([\w.-]+)")


class Line(NamedTuple):
    """One instruction.

    Attributes:
        computation: that it stands in.
        entry: whether that is the program itself.
        name: of the instruction.
        shape: of its result, as text.
        opcode: such as "fusion".
        operands: names.
        attributes: what follows them, as text.
    """

    computation: str
    entry: bool
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


def hlo_lines(text: str) -> Iterator[Line]:
    """Yield every instruction, in order.

    Raises:
        ValueError: a line is an instruction of another form.
    """
    computation, entry = "", False
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            computation, entry = head["name"], head["entry"] is not None
        elif computation and (found := _INSTRUCTION.match(line)):
            operands, _, attributes = found["rest"].partition(")")
            yield Line(
                computation,
                entry,
                found["name"],
                found["shape"],
                found["opcode"],
                names_in(operands),
                attributes,
            )
        elif _ASSIGNMENT.match(line):
            raise ValueError(f"no instruction of the known form: {line[:200]}")


def names_in(text: str) -> tuple[str, ...]:
    """The names of instructions or computations in a piece of text."""
    return tuple(_NAME.findall(text))
