"""The largest values in a program's scratch memory, read from XLA's dump of its buffers."""

import re
from pathlib import Path
from typing import NamedTuple

_ALLOCATION = re.compile(r"\n(?=allocation )")
_VALUE = re.compile(
    r"value: <\d+ (?P<name>\S+) @\d+> \(size=(?P<size>\d+),offset=\d+\): (?P<shape>\S+)"
)


class Temporary(NamedTuple):
    """One value; many share their memory with others that live at other times."""

    name: str
    shape: str
    size: int


def largest_temporaries(folder: Path, number: int) -> list[Temporary]:
    """The largest values of the dump folder of one program; of equal shapes only the first.

    Raises:
        FileNotFoundError: the folder holds no buffer assignment.
    """
    found = sorted(folder.glob("*gpu_after_optimizations-buffer-assignment.txt"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no *-buffer-assignment.txt")
    return largest_values(found[-1].read_text(), number)


def largest_values(text: str, number: int) -> list[Temporary]:
    """The same, from the text of a dump."""
    by_shape: dict[str, Temporary] = {}
    for allocation in _ALLOCATION.split(text):
        if "preallocated-temp" not in allocation.partition("\n")[0]:
            continue
        for value in _VALUE.finditer(allocation):
            own = Temporary(value["name"], value["shape"], int(value["size"]))
            by_shape.setdefault(own.shape, own)
    return sorted(by_shape.values(), key=lambda value: -value.size)[:number]
