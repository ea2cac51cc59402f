"""What ptxas makes of one call after the other, each with its own kernels only."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from scripts.h200.assembler import Assembler, KernelCode
from scripts.h200.compilation import compile_program
from scripts.h200.gate import kernel_problems
from scripts.h200.mosaic_calls import kernel_modules, launch


class Code(NamedTuple):
    """What a call was compiled to.

    Attributes:
        registers: of a thread at launch, the most of its kernels.
        spilled: bytes of spill stores and loads, of all its kernels.
        shared: bytes of shared memory, the most of its kernels.
        compile_s: seconds of compiling.
        problems: why it should not run; empty if it may.
    """

    registers: int
    spilled: int
    shared: int
    compile_s: float
    problems: tuple[str, ...]


class Compiler:
    """Compiles calls for a described H200.

    Attributes:
        sharding: of that device.
    """

    def __init__(self, sharding: jax.sharding.NamedSharding, assembler: Assembler) -> None:
        """Compile for the device of ``sharding``, where ``assembler`` listens."""
        self.sharding = sharding
        self._assembler = assembler
        # ptxas sees a kernel once in a process, and calls can have kernels in common.
        self._assembled: dict[bytes, tuple[KernelCode, ...]] = {}

    def compile(self, call: Callable[..., Any], shapes: tuple[Any, ...]) -> Code:
        """Compile a call.

        Raises:
            Exception: whatever JAX, Mosaic or XLA raises where that is not possible.
        """
        self._assembler.known.clear()  # or other calls' kernels would count as this one's
        lowered = jax.jit(call).lower(*shapes)
        compiled = compile_program(lambda: lowered, self._assembler)
        kernels: list[KernelCode] = []
        for module in kernel_modules(lowered):
            entry, _ = launch(module)
            heard = tuple(self._assembler.known.get(entry, ()))
            kernels.extend(self._assembled.setdefault(module, heard))
        own = compiled._replace(own_kernels=tuple(dict.fromkeys(kernels)))
        return Code(
            registers=max((kernel.registers for kernel in kernels), default=0),
            spilled=sum(kernel.spilled for kernel in own.own_kernels),
            shared=max(map(own.shared, kernels), default=0),
            compile_s=own.compile_s,
            problems=kernel_problems(own),
        )
