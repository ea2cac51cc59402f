"""Operations of a compiled CPU program by stage of the ledger: HLO times executions."""

import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from glm_jax.ledger.ledger import DENSE, FIRST_PASS, FULL, LATER_PASS, LAYER, SPARSE, STEP
from scripts.ledger.hlo_text import Instruction, parse

# A stage of the ledger: its part and its name.
Key = tuple[str, str]
# Opcodes that only move, name or make numbers from nothing.
_MOVES = frozenset(
    (
        "bitcast",
        "bitcast-convert",
        "broadcast",
        "call",
        "concatenate",
        "conditional",
        "constant",
        "copy",
        "dynamic-slice",
        "dynamic-update-slice",
        "fusion",
        "gather",
        "get-tuple-element",
        "iota",
        "pad",
        "parameter",
        "reshape",
        "reverse",
        "scatter",
        "slice",
        "sort",
        "transpose",
        "tuple",
        "while",
    )
)


class Counted(NamedTuple):
    """What a program computed in one run.

    Attributes:
        products: operations of dots, by stage.
        sums: of dots that are sums, by stage.
        elementwise: elements that other arithmetic made, by stage.
    """

    products: Mapping[Key, float]
    sums: Mapping[Key, float]
    elementwise: Mapping[Key, float]


def executions(run: Callable[[], object]) -> Counter[str]:
    """How often each instruction is executed in one run, as XLA's profiler sees it."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        return Counter(
            event.name for plane in profile.planes for line in plane.lines for event in line.events
        )


def count_work(text: str, executed: Mapping[str, int], *, index_heads: int) -> Counted:
    """Count the operations of a program.

    Args:
        text: optimised HLO.
        executed: how often each instruction ran.
        index_heads: of the model, to tell scores from their sum over heads.

    Raises:
        ValueError: a dot belongs to no stage.
    """
    computations = parse(text)
    products, sums, elementwise = (defaultdict[Key, float](float) for _ in range(3))
    for functions, instruction, computation, times in _executed(computations, executed):
        if instruction.opcode == "dot":
            left = computation[instruction.operands[0]]
            depth = _product(left.sizes[axis] for axis in instruction.contracted)
            operations = 2.0 * instruction.elements * depth * times
            key = stage_of(functions)
            if key is None:
                raise ValueError(f"{instruction.name} belongs to no stage: {' > '.join(functions)}")
            in_scores = "_score" in functions and depth == index_heads
            target = sums if in_scores or "_running_count" in functions else products
            target[key] += operations
        elif instruction.opcode not in _MOVES:
            elementwise[stage_of(functions) or (STEP, "other")] += instruction.elements * times
    return Counted(products, sums, elementwise)


def _executed(
    computations: Mapping[str, Mapping[str, Instruction]], executed: Mapping[str, int]
) -> Iterator[tuple[tuple[str, ...], Instruction, Mapping[str, Instruction], int]]:
    """Every instruction that ran: its functions, itself, its computation, how often."""
    callers = {
        name: (computation, instruction)
        for computation, lines in computations.items()
        for instruction in lines.values()
        for name in instruction.called
    }

    def functions_of(computation: str, instruction: Instruction) -> tuple[str, ...]:
        """Its own; else those of what calls it, from the inside out."""
        while not instruction.functions and computation in callers:
            computation, instruction = callers[computation]
        return instruction.functions

    def times_of(computation: str, instruction: Instruction) -> int:
        """A fusion's parts run as often as the fusion."""
        while computation in callers and callers[computation][1].opcode == "fusion":
            computation, instruction = callers[computation]
        return executed.get(instruction.name, 0)

    for name, lines in computations.items():
        for instruction in lines.values():
            times = times_of(name, instruction)
            if times:
                yield functions_of(name, instruction), instruction, lines, times


def _product(sizes: Iterator[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def stage_of(functions: tuple[str, ...]) -> Key | None:
    """The stage that a chain of functions of the model computes; None where there is none."""
    found = set(functions)
    part = None
    if "draft_tokens.<locals>.later" in found:
        part = LATER_PASS
    elif "draft" in found:
        part = FIRST_PASS
    for function, layer, name in _STAGES:
        if function in found:
            if name == "q, kv projections" and "shared_pass" in found:
                name = "q projections"
            return part or layer, name
    return None


# The first of these functions in a chain names the stage, so inner functions stand before outer.
_STAGES = (
    ("route", SPARSE, "router"),
    ("expert_matmul", SPARSE, "routed experts"),
    ("MoeLayer.__call__", SPARSE, "shared expert"),
    ("Mlp.__call__", DENSE, "dense MLP"),
    ("Attention.combine", LAYER, "output projection"),
    ("Indexer.__call__", FULL, "indexer projections"),
    ("Attention.project", LAYER, "q, kv projections"),
    ("_score", FULL, "index scores"),
    ("_positions_of_largest", FULL, "top-k"),
    ("UpProjections.absorb", LAYER, "latent up-projections"),
    ("UpProjections.expand", LAYER, "latent up-projections"),
    ("_for_every_head", LAYER, "latent up-projections"),
    ("attend_chunks", LAYER, "sparse MLA, chunks"),
    ("attend_groups", LAYER, "sparse MLA, groups"),
    ("Drafter.merge", STEP, "merge"),
    ("logits_of", STEP, "head"),
    ("sample", STEP, "sampling"),
)
