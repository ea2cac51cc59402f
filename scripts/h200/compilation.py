"""Compiles one lowered program for the described H200 and says what came out."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
from jax._src.lib import xla_client

from scripts.h200.assembler import Assembler, KernelCode
from scripts.h200.hlo import read_module
from scripts.h200.mosaic_calls import shared_bytes
from scripts.h200.temporaries import Temporary, largest_temporaries
from scripts.h200.thunks import Thunks, read_thunks
from scripts.h200.weight_copies import WeightCopy, reads_weights, weight_copies


class Compiled(NamedTuple):
    """One program.

    Attributes:
        lower_s: seconds of tracing and lowering.
        compile_s: seconds of compiling.
        argument_bytes: weights, cache, slots and inputs.
        output_bytes: results, those written over donated arguments included.
        aliased_bytes: results written over donated arguments.
        temporary_bytes: scratch memory.
        flops: by XLA's count, in which a Mosaic kernel is free and a loop's body runs once.
        own_kernels: what ptxas made of our kernels; all kernels of the same names, if the process
            has compiled others before.
        xla_spills: kernels of XLA's own that spill.
        launch_shared: shared memory of our kernels, asked for at launch, by entry name.
        thunks: what the host does.
        weight_copies: where weights are written again.
        reads_weights: whether any argument is known as weights; of kernel cases none is.
        temporaries: the ten largest values of the scratch memory.
    """

    lower_s: float
    compile_s: float
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    flops: float
    own_kernels: tuple[KernelCode, ...]
    xla_spills: tuple[KernelCode, ...]
    launch_shared: Mapping[str, int]
    thunks: Thunks
    weight_copies: tuple[WeightCopy, ...]
    reads_weights: bool
    temporaries: tuple[Temporary, ...]

    @property
    def peak_bytes(self) -> int:
        """Everything at once."""
        return self.argument_bytes + self.output_bytes - self.aliased_bytes + self.temporary_bytes

    @property
    def copied_bytes(self) -> int:
        """Weights that are written again in every step."""
        return sum(copy.size for copy in self.weight_copies)

    def shared(self, kernel: KernelCode) -> int:
        """Shared memory of a kernel, in bytes."""
        return self.launch_shared.get(kernel.name, kernel.static_shared)


def compile_program(lower: Callable[[], jax.stages.Lowered], assembler: Assembler) -> Compiled:
    """Lower and compile.

    Args:
        lower: traces and lowers for the described device.
        assembler: already in place.

    Raises:
        Exception: whatever JAX or XLA raises where a program cannot be compiled.
    """
    assembler.take()
    started = time.perf_counter()
    lowered = lower()
    lowered_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        finished = time.perf_counter()
        thunks = read_thunks(Path(folder))
        module = read_module(Path(folder))
        temporaries = largest_temporaries(Path(folder), 10)
    shared, assembled = shared_bytes(lowered), assembler.take()
    own = [kernel for name in shared for kernel in assembler.known.get(name, ())]
    spills = [kernel for kernel in assembled if kernel.spilled and kernel.name not in shared]
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA tells no memory of a compiled program"
    return Compiled(
        lower_s=lowered_at - started,
        compile_s=finished - lowered_at,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=_flops(compiled),
        own_kernels=tuple(own),
        xla_spills=tuple(dict.fromkeys(spills)),
        launch_shared=shared,
        thunks=thunks,
        weight_copies=tuple(weight_copies(module)),
        reads_weights=reads_weights(module),
        temporaries=tuple(temporaries),
    )


def _flops(compiled: jax.stages.Compiled) -> float:
    """XLA's count; the executable has none of its own without a device."""
    executable = compiled.runtime_executable()
    assert executable is not None, "a compiled program has an executable"
    module = executable.hlo_modules()[0]
    client = jax.devices("cpu")[0].client
    counted = xla_client._xla.hlo_module_cost_analysis(client, module)
    return max(0.0, counted.get("flops", 0.0))
