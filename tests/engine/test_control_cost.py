"""Controls cost nothing to those who do not use them: what a step does more is one predicate."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from bucketing.cell import Cell
from glm_jax.engine.lowering import Lowering
from glm_jax.model.slots import slot_shapes
from scripts.hlo_lines import hlo_lines

CELLS = (Cell(0, 4, 6), Cell(64, 4, 6))
# Adding and removing the rank axis, which is 1: nothing is computed.
FREE = ("squeeze", "broadcast_in_dim")


def count_operations(jaxpr: Any, found: Counter) -> Counter:
    """Operations outside the branches of conditions, by what they take and give."""
    for equation in jaxpr.eqns:
        name, taken = equation.primitive.name, [str(one.aval) for one in equation.invars]
        given = [str(one.aval) for one in equation.outvars]
        if name == "cond":
            # Its branches read more where controls are compiled in.
            found[name, (), tuple(given)] += 1
            continue
        found[name, tuple(taken), tuple(given)] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count_operations(inner, found)
    return found


def traced(llm, cell: Cell, vocabulary: int) -> tuple[Counter, int, int]:
    """Operations, and the bytes that cross into and out of a step besides its state."""
    lowering = Lowering(llm.model_config, llm.config)
    slots = lowering._with_rank(slot_shapes(lowering.limits, vocabulary))
    inputs = lowering.inputs(cell)
    step = lowering._step.trace(lowering.params, lowering.cache, slots, inputs)
    _, _, outputs = step.out_info
    bytes_of = [
        sum(one.size * one.dtype.itemsize for one in arrays) for arrays in (inputs, outputs)
    ]
    return count_operations(step.jaxpr.jaxpr, Counter()), *bytes_of


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_outside_the_branch_a_step_only_asks_whether_anybody_has_controls(tiny_llm, cell):
    vocabulary = tiny_llm.model_config.vocab_size
    without, *bytes_without = traced(tiny_llm, cell, 0)
    with_controls, *bytes_with = traced(tiny_llm, cell, vocabulary)
    assert bytes_with == bytes_without
    assert sum(without.values()) > 1000
    more = [key for key in with_controls - without if key[0] not in FREE]
    gone = [key for key in without - with_controls if key[0] not in FREE]
    assert gone == []
    # active[owner] with its index kept in range, and wanted, any; then the condition itself.
    names = ["add", "and", "cond", "convert_element_type", "gather", "lt", "reduce_or", "select_n"]
    assert sorted(name for name, _, _ in more) == names
    rows = cell.groups * cell.width + tiny_llm.config.limits().chunks(cell)
    sizes = [given[0] for name, _, given in more if name != "cond"]
    allowed = {f"{kind}[{size}]" for kind in ("bool", "int32") for size in (rows, "")}
    assert set(sizes) <= allowed


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_compiled_step_never_copies_the_lines(tiny_llm, cell):
    slots = tiny_llm.config.max_num_seqs + 1
    lines = {
        f"{kind}[{sizes}{slots},{tiny_llm.model_config.vocab_size}]"
        for kind in ("s32", "f32")
        for sizes in ("", "1,")
    }
    program = tiny_llm.runner.programs[cell]
    made = [line for line in hlo_lines(program.as_text()) if line.shape.partition("{")[0] in lines]
    assert {line.opcode for line in made} >= {"parameter"}
    # Other names for the same memory.
    same = ("parameter", "bitcast", "get-tuple-element", "conditional", "tuple")
    assert [line.name for line in made if line.opcode not in same] == []
    held = sum(np.prod(leaf.shape) * leaf.dtype.itemsize for leaf in tiny_llm.runner._slots)
    assert program.memory_analysis().alias_size_in_bytes >= held
