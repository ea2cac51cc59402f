"""A plan as tables for a reader, and as plain values for a program."""

from typing import Any

from rich.console import Console
from rich.table import Table

from glm_jax.deployment.deployment import PAGE_SIZE
from glm_jax.deployment.plan import GPU_BYTES, Plan
from glm_jax.deployment.weight_bytes import WeightPart


def print_plan(console: Console, plan: Plan) -> None:
    """Print all figures; GB are 10^9 bytes."""
    asked = plan.deployment
    console.print(
        f"{asked.config.num_hidden_layers} layers"
        f"{' and the MTP layer' if asked.config.num_nextn_predict_layers else ''} on {asked.gpus} "
        f"H200 of {GPU_BYTES / 1e9:.0f} GB; {asked.seqs} requests of {asked.context} tokens, "
        f"{asked.drafts} drafts each, {asked.prefill} prefill rows; weights {asked.weight_dtype}, "
        f"cache {asked.kv_cache_dtype}",
        highlight=False,
    )
    console.print(_weights_table(plan))
    console.print(_cache_table(plan))
    console.print(_memory_table(plan))
    console.print(f"program: {plan.program.source}", highlight=False)
    if plan.floors is None:
        console.print("floors: only known for fp8 weights with an fp8_ds_mla cache")
    else:
        console.print(_floors_table(plan))
    console.print(_verdict(plan), style="bold", highlight=False)


def _weights_table(plan: Plan) -> Table:
    gpus = plan.deployment.gpus
    table = _table("weights, GB", "on a GPU", "10^9", "stored", "stored/GPU", "held/GPU")
    *matrices, rest = plan.weights
    for part in matrices:
        table.add_row(*_weights_row(part, gpus))
    table.add_section()
    table.add_row("matrices", "", "", "", _gb(plan.matrix_bytes), "")
    table.add_row(*_weights_row(rest, gpus))
    table.add_section()
    table.add_row(
        "all",
        "",
        f"{sum(part.elements for part in plan.weights) / 1e9:.2f}",
        _gb(sum(part.stored for part in plan.weights)),
        _gb(plan.stored_weight_bytes),
        _gb(plan.weight_bytes),
        style="bold",
    )
    table.add_row("only experts split", "", "", "", "", _gb(plan.copied_weight_bytes))
    table.caption = "stored: as in the checkpoint; held: kv_b dequantised, routers in float32"
    return table


def _weights_row(part: WeightPart, gpus: int) -> tuple[str, ...]:
    return (
        part.name,
        f"1/{gpus}" if part.split else "all",
        f"{part.elements / 1e9:.2f}",
        _gb(part.stored),
        _gb(part.stored_per_gpu(gpus)),
        _gb(part.held_per_gpu(gpus)),
    )


def _cache_table(plan: Plan) -> Table:
    asked, both = plan.deployment, (False, True)
    table = _table("cache", "without MTP layer", "with MTP layer")

    def add(name: str, *values: str) -> None:
        table.add_row(name, *values)

    per_gpu = [plan.load_bytes(mtp=mtp) for mtp in both]
    tokens = asked.seqs * asked.context
    add("bytes a token", *(f"{plan.token_bytes(mtp=mtp):,}" for mtp in both))
    add("GB of 2^20 tokens", *(_gb(plan.token_bytes(mtp=mtp) << 20) for mtp in both))
    add(f"GB of {asked.seqs} requests", *(_gb(tokens * plan.token_bytes(mtp=mtp)) for mtp in both))
    add(f"GB per GPU ({asked.seqs_per_gpu} requests)", *map(_gb, per_gpu))
    add("  and stored matrices", *(_gb(plan.matrix_bytes + size) for size in per_gpu))
    add("  and held weights", *(_gb(plan.weight_bytes + size) for size in per_gpu))
    return table


def _memory_table(plan: Plan) -> Table:
    asked, known = plan.deployment, plan.program.temporaries
    table = _table("memory of a GPU", "GB", "pages", "requests")
    per_seq, size = asked.pages_per_seq, plan.page_bytes
    table.add_row("weights", _gb(plan.weight_bytes), "", "")
    for name, temporaries in known.items():
        table.add_row(f"program, {name}", _gb(temporaries, 3), "", "")
    if not known:
        table.add_row("program", "unknown", "", "")
    table.add_row(
        f"room for pages of {PAGE_SIZE} tokens",
        _gb(plan.free_bytes),
        f"{plan.pages:,}",
        str(plan.seqs_that_fit // asked.gpus),
    )
    table.add_row(
        "needed",
        _gb(plan.needed_pages * size),
        f"{plan.needed_pages:,}",
        str(asked.seqs_per_gpu),
    )
    table.caption = f"a page: {size:,} bytes, MTP layer included; a request: {per_seq} pages"
    return table


def _floors_table(plan: Plan) -> Table:
    asked, floors = plan.deployment, plan.floors
    assert floors is not None
    table = _table("least ms of a step", "rows", "bytes", "operations", "NVLink", "floor")
    for name, cell in asked.steps().items():
        floor = floors[name]
        table.add_row(name, f"{cell.rows}", *(f"{1e3 * seconds:.1f}" for seconds in floor))
    table.caption = (
        "bytes: over bandwidth; operations: over peak rate; floor: the greater per operator, and "
        "NVLink"
    )
    return table


def _verdict(plan: Plan) -> str:
    asked = plan.deployment
    fits = plan.needed_pages <= plan.pages
    reserve = "" if plan.program.temporaries else " without the program"
    return (
        f"{'fits' if fits else 'does not fit'}: {plan.used_share:.1%} of the memory{reserve} "
        f"(gpu_memory_utilization); {plan.seqs_that_fit} requests of {asked.context} tokens fit"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """All figures as plain values: bytes and seconds."""
    asked = plan.deployment
    return {
        "layers": asked.config.num_hidden_layers,
        "gpus": asked.gpus,
        "context": asked.context,
        "seqs": asked.seqs,
        "drafts": asked.drafts,
        "prefill": asked.prefill,
        "weight_dtype": asked.weight_dtype,
        "kv_cache_dtype": asked.kv_cache_dtype,
        "weights": {
            "parts": [
                part._asdict()
                | {
                    "stored_per_gpu": part.stored_per_gpu(asked.gpus),
                    "held_per_gpu": part.held_per_gpu(asked.gpus),
                }
                for part in plan.weights
            ],
            "elements": sum(part.elements for part in plan.weights),
            "stored": sum(part.stored for part in plan.weights),
            "stored_matrices_per_gpu": plan.matrix_bytes,
            "stored_per_gpu": plan.stored_weight_bytes,
            "held_per_gpu": plan.weight_bytes,
            "held_per_gpu_only_experts_split": plan.copied_weight_bytes,
        },
        "cache": {
            ("with_mtp" if mtp else "without_mtp"): {
                "per_token": plan.token_bytes(mtp=mtp),
                "load_per_gpu": plan.load_bytes(mtp=mtp),
            }
            for mtp in (False, True)
        },
        "program": {"steps": dict(plan.program.temporaries), "source": plan.program.source},
        "memory": {
            "gpu": GPU_BYTES,
            "free": plan.free_bytes,
            "page": plan.page_bytes,
            "pages": plan.pages,
            "needed_pages": plan.needed_pages,
            "seqs_that_fit": plan.seqs_that_fit,
            "used_share": plan.used_share,
        },
        "floors": None
        if plan.floors is None
        else {name: floor._asdict() for name, floor in plan.floors.items()},
    }


def _table(first: str, *rest: str) -> Table:
    table = Table(caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right")
    return table


def _gb(size: int, digits: int = 1) -> str:
    return f"{size / 1e9:.{digits}f}"
