"""An optimised CPU program as text: its instructions, and the functions that each came from."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from scripts.hlo_lines import Line, hlo_lines, names_in

_DIMENSIONS = re.compile(r"^\w+\[(?P<sizes>[\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


class Instruction(NamedTuple):
    """One line of a computation.

    Attributes:
        name: of the instruction.
        opcode: such as "dot".
        sizes: of its result; () for a tuple.
        operands: names.
        called: computations that it runs: of a fusion, a loop, a condition.
        functions: that it was traced in, outermost first; () where XLA kept none.
        contracted: dimensions of the first operand that a dot sums over.
    """

    name: str
    opcode: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    functions: tuple[str, ...]
    contracted: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Numbers of the result."""
        return math.prod(self.sizes)


def parse(text: str) -> Mapping[str, Mapping[str, Instruction]]:
    """Instructions by computation and name.

    Raises:
        ValueError: the text has no table of functions: JAX or XLA were told to drop it.
    """
    frames = _frames(text)
    computations: dict[str, dict[str, Instruction]] = {}
    for line in hlo_lines(text):
        instructions = computations.setdefault(line.computation, {})
        instructions[line.name] = _instruction(line, frames)
    return computations


def _instruction(line: Line, frames: Mapping[int, tuple[str, ...]]) -> Instruction:
    sizes = _DIMENSIONS.match(line.shape)
    frame, contracted = _FRAME.search(line.attributes), _CONTRACTED.search(line.attributes)
    called = _CALLED.findall(line.attributes)
    for branches in _BRANCHES.findall(line.attributes):
        called += names_in(branches)
    return Instruction(
        name=line.name,
        opcode=line.opcode,
        sizes=_numbers(sizes["sizes"]) if sizes else (),
        operands=line.operands,
        called=tuple(called),
        functions=frames[int(frame[1])] if frame else (),
        contracted=_numbers(contracted[1]) if contracted else (),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _frames(text: str) -> Mapping[int, tuple[str, ...]]:
    """The chain of functions of every stack frame, outermost first."""
    names = dict(re.findall(r'^(\d+) "(.*)"$', _table(text, "FunctionNames"), re.MULTILINE))
    places = dict(
        re.findall(
            r"^(\d+) \{file_name_id=\d+ function_name_id=(\d+)",
            _table(text, "FileLocations"),
            re.MULTILINE,
        )
    )
    lines = re.findall(
        r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)",
        _table(text, "StackFrames"),
        re.MULTILINE,
    )
    chains: dict[int, tuple[str, ...]] = {0: ()}
    for frame, place, parent in lines:
        # Parents are written one too high, so that 1 means none; they stand before their children.
        chains[int(frame)] = (*chains[int(parent) - 1], names[places[place]])
    return chains


def _table(text: str, title: str) -> str:
    _, found, rest = text.partition(f"\n{title}\n")
    if not found:
        raise ValueError(f"the program's text has no {title}: XLA's debug information is off.")
    return re.split(r"\n(?=[^\d])", rest, maxsplit=1)[0]
