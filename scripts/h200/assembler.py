"""Listens to ptxas, which XLA runs for every kernel: registers, spills, shared memory.

XLA finds ptxas on PATH. A script of that name, in front of it, runs the real one with -v and keeps
what it says.
"""

import importlib.util
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import NamedTuple

# $$ is the process id of the script: XLA runs several at once. XLA also asks for --version.
_SCRIPT = """#!/bin/sh
case " $* " in *" --version "* | *" -v "*) ;; *) set -- "$@" -v ;; esac
"{ptxas}" "$@" 2>"{log}.$$"
status=$?
cat "{log}.$$" >&2
exit $status
"""
_VERSION = re.compile(r", V(\d+(?:\.\d+)*)")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
# C7510 and its neighbours: "wgmma.mma_async instructions are serialized due to ...".
_SERIALIZED = re.compile(r"serializ.* in (?:the )?function '([^']+)'")


class KernelCode(NamedTuple):
    """What ptxas made of one kernel.

    Attributes:
        name: of the entry function.
        registers: per thread, at launch.
        spilled: bytes of spill stores and loads per thread.
        static_shared: bytes of shared memory declared in the kernel.
        serialized: whether ptxas had to run its tensor-core instructions one after another.
    """

    name: str
    registers: int
    spilled: int
    static_shared: int
    serialized: bool


class Assembler:
    """Stands between XLA and ptxas for the rest of the process.

    Attributes:
        version: of ptxas, for example "13.0.88"; registers and spills depend on it.
        known: all kernels assembled so far, by name. Mosaic keeps what it has compiled: a kernel
            that a second program has in common with the first one is not assembled again.
    """

    def __init__(self, folder: Path) -> None:
        """Put the script into ``folder`` and ``folder`` in front of PATH.

        Raises:
            RuntimeError: there is no ptxas.
        """
        ptxas = _find_ptxas()
        if ptxas is None:
            raise RuntimeError(
                "no ptxas on PATH: install the wheels nvidia-cuda-nvcc and nvidia-nvvm, or CUDA."
            )
        said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True)
        version = _VERSION.search(said.stdout)
        self.version = version[1] if version else "unknown"
        self.known: dict[str, list[KernelCode]] = {}
        self._folder = folder
        script = folder / "ptxas"
        script.write_text(_SCRIPT.format(ptxas=ptxas, log=folder / "said"))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")])

    def take(self) -> list[KernelCode]:
        """The kernels assembled since the last call."""
        kernels = []
        for log in sorted(self._folder.glob("said.*")):
            kernels.extend(read_log(log.read_text()))
            log.unlink()
        for kernel in kernels:
            variants = self.known.setdefault(kernel.name, [])
            if kernel not in variants:
                variants.append(kernel)
        return kernels


def read_log(text: str) -> list[KernelCode]:
    """Kernels in what ``ptxas -v`` printed."""
    serialized = set(_SERIALIZED.findall(text))
    kernels = []
    # Each entry's properties follow its name.
    for part in re.split(r"(?=Compiling entry function)", text):
        name, used = _ENTRY.search(part), _USED.search(part)
        if name is None or used is None:
            continue
        frame, shared = _FRAME.search(part), _SHARED.search(part)
        kernels.append(
            KernelCode(
                name=name[1],
                registers=int(used[1]),
                spilled=int(frame[2]) + int(frame[3]) if frame else 0,
                static_shared=int(shared[1]) if shared else 0,
                serialized=name[1] in serialized,
            )
        )
    return kernels


def _find_ptxas() -> str | None:
    """The wheel's ptxas, whose version is ours to choose, before one on PATH."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for found in sorted(Path(place).glob("*/bin/ptxas")):
            return str(found)
    return shutil.which("ptxas")
