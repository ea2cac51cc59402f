"""The ledger against compiled programs: operations of products, stage by stage.

    python -m scripts.check_ledger

Compiles a decode, a prefill and a mixed cell of the embedded model for this CPU, runs each once,
and counts: the dots of the optimised HLO, each as often as XLA's own profile of that run says it
was executed. (The trip counts of the CPU's loops depend on the rows and contexts of a step, so they
stand in no program.) The ledger counts the same step with the pads of the cell and of the
operators' blocks. A stage that differs by more than 2 % fails. Weights are random, but for routers
of zeros: every row then takes the first experts, in every layer.

Two kinds of dots are sums, not products of the model, and listed apart with the elementwise work:
the weighted sum over index heads and the running counts of top-k.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bucketing.cell import Cell
from bucketing.pack import Chunk, Group, RankRows, pack
from bucketing.step_inputs import StepInputs
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine_options import resolve_options
from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.hardware import HARDWARE
from glm_jax.ledger.ledger import Ledger, make_ledger
from glm_jax.ledger.padding import Blocks, program_passes
from glm_jax.ledger.shape import ChunkShape, GroupShape, StepShape
from glm_jax.model.config import GlmConfig
from glm_jax.model.rows import WIDE_TILE_ROWS
from glm_jax.model.slots import empty_slots
from glm_jax.model.storage import ParameterStore, split_model
from glm_jax.model_files import find_model
from glm_jax.weights.random import fill_random
from pallas_kernels.expert_matmul import xla as experts
from pallas_kernels.index_topk import xla as index_topk
from pallas_kernels.sparse_mla import xla as sparse_mla
from pallas_kernels.sparse_mla.crossover import Sizes, expanded_pays, most_expanded_keys
from pallas_kernels.sparse_mla.expanded import block_keys
from scripts.ledger.program_work import Counted, Key, count_work, executions

ALLOWED = 0.02
DRAFTS = 5
OPTIONS = {
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_speculative_tokens": DRAFTS,
    "prefill_buckets": (512,),
    "group_buckets": (8,),
}


class Line(NamedTuple):
    """One stage of a step, all layers together.

    Attributes:
        key: part and name of the stage.
        ledger: operations of products by the ledger.
        program: by the program.
        sums: operations of dots that are sums.
        elementwise: elements made by other arithmetic of the program.
    """

    key: Key
    ledger: float
    program: float
    sums: float
    elementwise: float

    @property
    def difference(self) -> float:
        """Of the ledger from the program, relative to the program."""
        if self.ledger == self.program:
            return 0.0
        return self.ledger / self.program - 1 if self.program else float("inf")


def main() -> int:
    """Check all three cells; 1 where a stage differs by more than is allowed."""
    jax.config.update("jax_platforms", "cpu")
    found = find_model(None)
    config, engine = resolve_options(found.config, OPTIONS, "cpu", fp8_checkpoint=found.fp8)
    lowering = Lowering(config, engine)
    params = zero_router_params(config)
    console, failed = Console(), False
    for shape in steps(engine):
        assert shape.cell is not None
        program = lowering.lower(shape.cell).compile()
        lines = compare(lowering, program, params, shape)
        console.print(table(shape, lines))
        failed |= any(abs(line.difference) > ALLOWED for line in lines)
    console.print("failed" if failed else f"all stages within {ALLOWED:.0%}", style="bold")
    return int(failed)


def steps(engine: EngineConfig) -> tuple[StepShape, ...]:
    """A decode, a prefill and a mixed step, none of which fills its cell."""
    groups = tuple(GroupShape(900 + 70 * place, 1, DRAFTS) for place in range(7))
    chunks = (ChunkShape(300, 700), ChunkShape(170, 0), ChunkShape(20, 2000, sampled=False))

    def step(cell: Cell, **rows: Any) -> StepShape:
        seqs = engine.max_num_seqs
        return StepShape(cell=cell, new_drafts=DRAFTS, max_num_seqs=seqs, **rows)

    width = DRAFTS + 1
    return (
        step(Cell(0, 8, width), groups=groups),
        step(Cell(512, 0, 1), chunks=chunks),
        step(Cell(512, 8, width), chunks=chunks[:1], groups=groups),
    )


def zero_router_params(config: GlmConfig) -> list:
    """Random weights, in the leaves' order, with routers that choose the first experts always."""
    store = ParameterStore(config, dtype="float32", storage="per_layer")
    fill_random(config, store.destination, seed=0)
    for layer in filter(config.is_sparse, range(config.total_layers)):
        router, bias = (
            store.destination(f"layers.{layer}.moe.{name}") for name in ("router", "router_bias")
        )
        assert isinstance(router, np.ndarray)
        assert isinstance(bias, np.ndarray)
        router[...], bias[...] = 0.0, -np.arange(bias.size)
    return split_model(store.to_device(jax.devices()[0]))[1]


def compare(lowering: Lowering, program: Any, params: list, shape: StepShape) -> list[Line]:
    """Both counts of one step, stage by stage in the ledger's order.

    Args:
        lowering: of the program.
        program: compiled for the shape's cell.
        params: as ``zero_router_params`` gives them.
        shape: the step; requests take slots 0, 1, ..., chunks first.
    """
    arrays = cache_and_slots(lowering, shape)
    inputs = step_inputs(lowering, shape)
    executed = executions(lambda: program(params, *arrays, inputs))
    counted = count_work(program.as_text(), executed, index_heads=lowering.model.index_n_heads)
    return _lines(padded_ledger(lowering, shape), counted)


def cache_and_slots(lowering: Lowering, shape: StepShape) -> tuple[Any, Any]:
    """A zero cache, and slots in which every request has what stands before its rows."""
    slots = empty_slots(lowering.limits, 1, lowering.model.vocab_size)
    computed = [chunk.prefix for chunk in shape.chunks]
    computed += [group.context - group.rows for group in shape.groups]
    pages = lowering.limits.pages_per_seq
    for slot, length in enumerate(computed):
        slots.computed[0, slot] = length
        slots.page_table[0, slot] = 1 + slot * pages + np.arange(pages)
    cache = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), lowering.cache)
    # From host arrays: zeros made on the device would be programs of their own.
    return jax.device_put((cache, slots))


def step_inputs(lowering: Lowering, shape: StepShape) -> StepInputs:
    """The packed step: greedy, any tokens."""
    assert shape.cell is not None
    chunks, groups = [], []
    for slot, chunk in enumerate(shape.chunks):
        tokens = np.arange(chunk.rows, dtype=np.int32) % lowering.model.vocab_size
        drafts = shape.new_drafts if chunk.sampled else 0
        chunks.append(Chunk(slot, tokens, tokens, chunk.sampled, drafts))
    for slot, group in enumerate(shape.groups, start=len(chunks)):
        groups.append(
            Group(slot, True, group.known, group.drafts, None, None, True, shape.new_drafts)
        )
    rows = RankRows(chunks=chunks, groups=groups, drafter=shape.new_drafts > 0)
    return pack(shape.cell, lowering.limits, [rows])


def padded_ledger(lowering: Lowering, shape: StepShape) -> Ledger:
    """The ledger of the program: whole blocks of the CPU's operators."""
    config = lowering.model
    first = config.num_experts_per_tok
    shares = [1.0] * first + [0.0] * (config.n_routed_experts - first)
    return make_ledger(
        config,
        shape,
        formats=make_formats(config, weights="float32", cache="float32"),
        hardware=HARDWARE["h200"]["specified"],
        passes=program_passes(config, shape, cpu_blocks(lowering, shape), shares),
    )


def cpu_blocks(lowering: Lowering, shape: StepShape) -> Blocks:
    """How the CPU's operators cut the work of this engine."""
    assert shape.cell is not None
    config, limits = lowering.model, lowering.limits
    page_size, table = limits.page_size, limits.pages_per_seq * limits.page_size
    selected = min(config.index_topk, table)
    sizes = Sizes(
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.kv_lora_rank,
        config.v_head_dim,
        selected,
    )
    block = block_keys(page_size)
    # The operator is given the prefill rows alone.
    rows, heads = max(1, shape.cell.prefill), config.num_attention_heads
    most = min(table // block * block, most_expanded_keys(sizes, heads, rows, block))
    return Blocks(
        tile_rows=WIDE_TILE_ROWS,
        score_keys=max(1, index_topk.SCORE_KEYS // page_size) * page_size,
        attend_rows=sparse_mla.BLOCK_ROWS,
        expand_keys=block,
        expert_rows=(experts.MIN_BLOCK_ROWS, experts.MAX_BLOCK_ROWS),
        selected=selected,
        expands=lambda first, last: last < most and bool(expanded_pays(sizes, first, last)),
    )


def _lines(ledger: Ledger, counted: Counted) -> list[Line]:
    asked: dict[Key, float] = {}
    for stage in ledger.stages:
        key = stage.part, stage.name
        asked[key] = ledger.times[stage.part] * stage.demand.operations
    counted_keys = [key for part in counted for key in sorted(part) if key not in asked]
    keys = [*asked, *dict.fromkeys(counted_keys)]
    lines = [
        Line(
            key,
            asked.get(key, 0.0),
            counted.products.get(key, 0.0),
            counted.sums.get(key, 0.0),
            counted.elementwise.get(key, 0.0),
        )
        for key in keys
    ]
    return [line for line in lines if any(line[1:])]


def table(shape: StepShape, lines: Sequence[Line]) -> Table:
    """Both counts, in millions of operations."""
    shown = Table(title=f"{shape.kind}: {shape.rows} rows in {shape.cell}", title_justify="left")
    for name in ("part", "stage"):
        shown.add_column(name, no_wrap=True)
    for name in ("ledger", "program", "difference", "sums", "elementwise"):
        shown.add_column(name, justify="right")
    for line in lines:
        wrong = abs(line.difference) > ALLOWED
        numbers = (line.ledger, line.program, line.sums, line.elementwise)
        ledger, program, sums, other = (f"{value / 1e6:,.2f}" for value in numbers)
        shown.add_row(
            *line.key,
            ledger,
            program,
            f"{line.difference:+.2%}",
            sums,
            other,
            style="red" if wrong else "",
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
