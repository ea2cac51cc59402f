"""Compiles GPU kernels and whole step programs for an H200, on a machine that has none.

    python -m scripts.compile_h200 [--kernels [OPERATOR ...]]
        [--programs embedded glm-5.3:6 glm-5.3:6@fp8] [--json FILE]

Needs the wheels jax-cuda13-plugin and jax-cuda13-pjrt of jax's own version (--no-deps), and ptxas
with libdevice: CUDA, or the wheels nvidia-cuda-nvcc and nvidia-nvvm (13.0.88). Exit status 1: a
case did not compile, one of our kernels spills registers or has its tensor-core instructions
serialised, a program is not ONE command buffer, or it copies weights or the cache. (Copies of
weights in a branch are only counted: see ``weight_copies``.)
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from glm_jax.deployment.described_device import described_device
from scripts.facts import facts_of
from scripts.h200.assembler import Assembler
from scripts.h200.compilation import Compiled, compile_program
from scripts.h200.gate import kernel_problems, program_problems
from scripts.h200.kernel_cases import kernel_cases
from scripts.h200.programs import programs_of
from scripts.kernels.trial import first_line

KERNEL_COLUMNS = (
    "kernel",
    "registers",
    "spilled",
    "shared KiB",
    "s",
    "temp MiB",
    "peak GiB",
    "GFLOP",
)
PROGRAM_COLUMNS = (
    "program", "buffers", "outside", "loops", "branches", "kernels", "registers", "spilled",
    "shared KiB", "s", "copied MiB", "temp MiB", "peak GiB", "GFLOP",
)  # fmt: skip

# Of the tables, in characters, wherever they are printed.
WIDTH = 170


class Result(NamedTuple):
    """One line of the report.

    Attributes:
        kind: "kernel" or "program".
        name: of the case.
        compiled: what came out; None where nothing did.
        flops: floating-point operations.
        problems: why the gate is shut; empty if it is open.
    """

    kind: str
    name: str
    compiled: Compiled | None
    flops: float
    problems: tuple[str, ...]


def check_kernels(
    operators: Sequence[str], sharding: jax.sharding.Sharding, assembler: Assembler
) -> Iterator[Result]:
    """Compile the kernel cases of some operators; of all if none is named."""
    for case in kernel_cases():
        if operators and case.operator not in operators:
            continue
        name = f"{case.operator} {case.name}"
        try:
            compiled = compile_program(lambda: case.lower(sharding), assembler)  # noqa: B023
        except Exception as error:  # of JAX, Mosaic or XLA: the next case may still compile
            yield Result("kernel", name, None, case.flops, (first_line(error),))
            continue
        problems = kernel_problems(compiled)
        if not compiled.launch_shared:
            problems += ("there is no kernel of ours in it",)
        yield Result("kernel", name, compiled, case.flops, problems)


def check_programs(
    names: Sequence[str],
    implementation: str,
    sharding: jax.sharding.Sharding,
    assembler: Assembler,
) -> Iterator[Result]:
    """Compile the decode and the mixed step of each model."""
    for name in names:
        for program in programs_of(name, sharding, implementation):
            title = f"{name} {program.step}"
            try:
                compiled = compile_program(program.lower, assembler)
            except Exception as error:  # as above
                yield Result("program", title, None, 0.0, (first_line(error),))
                continue
            problems = kernel_problems(compiled) + program_problems(compiled, program.cache_arrays)
            yield Result("program", title, compiled, compiled.flops, problems)


def verdict(result: Result) -> str:
    """One line of progress."""
    text = f"{result.kind} {result.name}: {'; '.join(result.problems) or 'ok'}"
    for kernel in result.compiled.xla_spills if result.compiled else ():
        text += f" (XLA's own {kernel.name} spills {kernel.spilled} bytes)"
    return text


def as_json(result: Result, facts: dict[str, Any]) -> dict[str, Any]:
    """One line of the JSON file."""
    line: dict[str, Any] = {"kind": result.kind, "name": result.name, **facts}
    line |= {"problems": result.problems, "flops": result.flops}
    compiled = result.compiled
    if compiled is None:
        return line
    line |= {
        name: getattr(compiled, name)
        for name in (
            "argument_bytes", "output_bytes", "aliased_bytes", "temporary_bytes", "peak_bytes",
        )
    }  # fmt: skip
    line |= {"lower_s": round(compiled.lower_s, 2), "compile_s": round(compiled.compile_s, 2)}
    line["own_kernels"] = [
        kernel._asdict() | {"shared": compiled.shared(kernel)} for kernel in compiled.own_kernels
    ]
    line["weight_copies"] = [copy._asdict() for copy in compiled.weight_copies]
    line["temporaries"] = [value._asdict() for value in compiled.temporaries]
    line["xla_spills"] = {kernel.name: kernel.spilled for kernel in compiled.xla_spills}
    return line | {"thunks": compiled.thunks._asdict()}


def tables(results: Sequence[Result]) -> Iterator[Table]:
    """A table of kernels and one of programs."""
    for kind, columns in (("kernel", KERNEL_COLUMNS), ("program", PROGRAM_COLUMNS)):
        chosen = [result for result in results if result.kind == kind]
        if not chosen:
            continue
        table = Table(*columns, box=None)
        table.columns[0].no_wrap = True
        for column in table.columns[1:]:
            column.justify = "right"
        for result in chosen:
            table.add_row(result.name, *_cells(result, len(columns) - 1))
        yield table


def _cells(result: Result, columns: int) -> list[str]:
    compiled = result.compiled
    if compiled is None:
        return ["-"] * columns
    own, thunks = compiled.own_kernels, compiled.thunks
    host: list[str] = []
    copied: list[str] = []
    if result.kind == "program":
        counts = thunks.outside, thunks.host_loops, thunks.host_branches, thunks.kernels
        host = [str(thunks.command_buffers), *map(str, counts)]
        copied = [f"{compiled.copied_bytes / 2**20:.1f}"]
    return [
        *host,
        str(max((kernel.registers for kernel in own), default=0)),
        str(sum(kernel.spilled for kernel in own)),
        f"{max(map(compiled.shared, own), default=0) / 1024:.1f}",
        f"{compiled.lower_s + compiled.compile_s:.1f}",
        *copied,
        f"{compiled.temporary_bytes / 2**20:.1f}",
        f"{compiled.peak_bytes / 2**30:.2f}",
        f"{result.flops / 1e9:.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kernels",
        nargs="*",
        choices=sorted({case.operator for case in kernel_cases()}),
        help="compile kernels; without names those of all operators",
    )
    parser.add_argument(
        "--programs",
        nargs="*",
        default=[],
        help='"embedded", presets, "preset:layers"; with "@fp8" weights and cache in FP8',
    )
    parser.add_argument("--implementation", default="mosaic_gpu", help="of the operators")
    parser.add_argument("--json", type=Path, help="append one JSON line per case to this file")
    options = parser.parse_args()
    if options.kernels is None and not options.programs:
        parser.error("nothing to compile: give --kernels, --programs, or both")
    console, results = Console(width=WIDTH), []
    with tempfile.TemporaryDirectory() as folder:
        sharding, assembler = described_device(), Assembler(Path(folder))
        device = next(iter(sharding.mesh.devices.flat))
        facts = facts_of(f"{device.device_kind} (described)") | {"ptxas": assembler.version}
        sources = []
        if options.kernels is not None:
            sources.append(check_kernels(options.kernels, sharding, assembler))
        sources.append(
            check_programs(options.programs, options.implementation, sharding, assembler)
        )
        for result in (result for source in sources for result in source):
            results.append(result)
            print(verdict(result), file=sys.stderr, flush=True)
            if options.json:
                with options.json.open("a") as file:
                    file.write(json.dumps(as_json(result, facts)) + "\n")
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    for table in tables(results):
        console.print(table)
    failed = [result.name for result in results if result.problems]
    if failed:
        console.print(f"FAILED: {len(failed)} of {len(results)}: {'; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
