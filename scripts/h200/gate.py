"""Why a compiled kernel or step is not let through."""

from collections.abc import Sequence

from scripts.h200.compilation import Compiled


def program_problems(compiled: Compiled, cache_arrays: Sequence[int]) -> tuple[str, ...]:
    """What is wrong with a whole step that writes a cache, arrays of so many bytes, in place."""
    problems = []
    if not compiled.thunks.one_buffer:
        first = ", ".join(compiled.thunks.culprits)
        problems.append(f"not one command buffer; outside: {first}")
    if compiled.aliased_bytes < sum(cache_arrays):
        problems.append("the cache is copied: not all of it is written in place")
    # What is written in place at the end may still be copied on the way, around a branch.
    for value in compiled.temporaries:
        if value.size in cache_arrays:
            problems.append(f"the cache is copied: {value.name} {value.shape} is as large")
    if not compiled.reads_weights:
        problems.append("no argument is called as weights are: copies of them cannot be found")
    for copy in compiled.weight_copies:
        if copy.in_branch:  # known, and counted in the table
            continue
        problems.append(f"{copy.name} copies {copy.size >> 20} MiB of weights")
    return tuple(problems)


def kernel_problems(compiled: Compiled) -> tuple[str, ...]:
    """What is wrong with our own kernels in a program; XLA's own may spill."""
    heard = {kernel.name for kernel in compiled.own_kernels}
    problems = [
        f"{name} did not go through ptxas" for name in compiled.launch_shared.keys() - heard
    ]
    for kernel in compiled.own_kernels:
        if kernel.spilled:
            problems.append(f"{kernel.name} spills {kernel.spilled} bytes")
        if kernel.serialized:
            problems.append(f"{kernel.name}: tensor-core instructions are serialised")
    return tuple(dict.fromkeys(problems))
