"""What a compiled program asks the host to do, counted in XLA's dump of its thunk sequence.

A thunk is one thing the host enqueues. Inside a command buffer (a CUDA graph) it costs the host
nothing; a while loop outside one makes the host wait for the device in every turn.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_THUNK = re.compile(r"^(?P<indent> *)\d+: k(?P<kind>\w+)\s+\[[^\]]*\](?P<rest>.*)$")
_CONTROL = frozenset({"CommandBuffer", "While", "Conditional", "Sequential"})
_MOVES = frozenset({"Copy", "Memzero", "Memset32BitValue", "DeviceToDeviceCopy"})


class Thunks(NamedTuple):
    """Counts of one program; bodies of loops and both branches of conditionals count once.

    Attributes:
        command_buffers: command buffers, wherever they stand.
        one_buffer: whether the program is one command buffer and nothing else.
        kernels: kernels (copies not among them) of a step.
        outside: kernels that are in no command buffer.
        host_loops: while loops that are in no command buffer.
        host_branches: conditionals that are in no command buffer.
        culprits: names of the first operations outside, without repetition.
    """

    command_buffers: int
    one_buffer: bool
    kernels: int
    outside: int
    host_loops: int
    host_branches: int
    culprits: tuple[str, ...]


class _Thunk(NamedTuple):
    depth: int
    kind: str
    name: str
    buffered: bool


def read_thunks(folder: Path) -> Thunks:
    """Count in the dump folder of one program.

    Raises:
        FileNotFoundError: the folder holds no thunk sequence.
    """
    # The second file appears only where a pass changed something.
    for pattern in ("*.thunk_sequence_after_thunk_passes.txt", "*.thunk_sequence.txt"):
        found = sorted(folder.glob(pattern))
        if found:
            return count_thunks(found[-1].read_text())
    raise FileNotFoundError(f"{folder} holds no *.thunk_sequence*.txt: has XLA renamed its dumps?")


def count_thunks(text: str) -> Thunks:
    """Count in the text of a dump."""
    thunks = list(_thunks(text))
    outside = [thunk for thunk in thunks if not thunk.buffered]
    kernels = [thunk for thunk in thunks if thunk.kind not in _CONTROL | _MOVES]
    top = [thunk.kind for thunk in thunks if thunk.depth == 0]
    names = [thunk.name or thunk.kind for thunk in outside if thunk.kind != "CommandBuffer"]
    return Thunks(
        command_buffers=sum(thunk.kind == "CommandBuffer" for thunk in thunks),
        one_buffer=top == ["CommandBuffer"],
        kernels=len(kernels),
        outside=sum(not thunk.buffered for thunk in kernels),
        host_loops=sum(thunk.kind == "While" for thunk in outside),
        host_branches=sum(thunk.kind == "Conditional" for thunk in outside),
        culprits=tuple(dict.fromkeys(names))[:8],
    )


def _thunks(text: str) -> Iterator[_Thunk]:
    """Thunks in the order of the dump; what is inside another one is indented further."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        match = _THUNK.match(line)
        if match is None:  # "body:", "true_branch:" and the like
            continue
        depth, kind = len(match["indent"]), match["kind"]
        while above and above[-1][0] >= depth:
            above.pop()
        buffered = any(name == "CommandBuffer" for _, name in above)
        name = match["rest"].split(" grid:")[0].strip()
        yield _Thunk(depth, kind, "" if name == f"k{kind}" else name, buffered)
        above.append((depth, kind))
