"""Host time of a decode step: schedule, pack, dispatch and commit, with the device's work removed.

`python -m scripts.bench_host [--groups 8] [--steps 400] [--model FOLDER] [--json]`. The program is
a no-op of the same signature and leaves: it takes every weight, the cache, the slots and the
inputs, donates what a step donates, and returns the arrays that the host reads.
"""

import argparse
import json
import platform
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bucketing.step_inputs import StepInputs, StepOutputs
from glm_jax import LLM, SamplingParams
from glm_jax.engine import lowering
from glm_jax.engine.outputs import HostPhases, StepRecord
from glm_jax.model.cache import Cache
from glm_jax.model.slots import Slots
from glm_jax.model.step import Step

PROMPT_TOKENS = 16
HOST_PHASES = ("schedule", "pack", "dispatch", "commit")
# The first steps fill caches (neutral arrays, page lists); they are not measured.
WARM_UP_STEPS = 50


def build_noop(*_: Any, **__: Any) -> Step:
    """Stand in for ``build_step``; every leaf is used, so that XLA drops no argument."""

    def noop(
        params: list, cache: Cache, slots: Slots, inputs: StepInputs
    ) -> tuple[Cache, Slots, StepOutputs]:
        leaves = jax.tree.leaves((params, inputs))
        touched = sum(leaf.ravel()[:1].astype(jnp.float32).sum() for leaf in leaves if leaf.size)
        groups, width = inputs.group_tokens.shape[1:]
        rows = inputs.prefill_tokens.shape[1] + groups * width
        requests = inputs.chunk_slot.shape[1] + groups
        outputs = StepOutputs(
            chunk_tokens=jnp.ones_like(inputs.chunk_slot),
            group_tokens=jnp.ones_like(inputs.group_tokens),
            group_accepted=jnp.zeros_like(inputs.group_slot),
            drafts=jnp.ones((1, requests, slots.drafts.shape[-1]), jnp.int32),
            expert_load=jnp.zeros((1, 2)),
            expert_rows=jnp.zeros((1, 1, 1), jnp.int32),
            hidden=jnp.full((1, rows, 1), touched),
        )
        return cache, slots._replace(computed=slots.computed + 1), outputs

    return noop


def measure(llm: LLM, groups: int, steps: int) -> list[StepRecord]:
    """Decode with ``groups`` requests and return the records of the measured steps."""
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(groups):
        llm.engine.add_request(f"r{number}", [1] * PROMPT_TOKENS, params)
    records: list[StepRecord] = []
    while len(records) < WARM_UP_STEPS + steps:
        record = llm.engine.step().record
        if record.fault is not None:
            raise RuntimeError(f"a step failed: {record.fault}")
        if record.kind == "decode" and len(record.request_ids) == groups:
            records.append(record)
    for number in range(groups):
        llm.engine.abort(f"r{number}")
    return records[WARM_UP_STEPS:]


def summary(records: list[StepRecord]) -> dict[str, dict[str, float]]:
    """Median and spread of each phase, and of their sum, in milliseconds."""
    columns = {
        name: np.array([getattr(record.phases, name) for record in records])
        for name in HostPhases._fields
    }
    columns["host total"] = np.sum([columns[name] for name in HOST_PHASES], axis=0)
    columns["whole step"] = np.array([record.wall_time for record in records])
    return {
        name: {
            "median_ms": round(float(np.median(seconds)) * 1e3, 4),
            "p10_ms": round(float(np.percentile(seconds, 10)) * 1e3, 4),
            "p90_ms": round(float(np.percentile(seconds, 90)) * 1e3, 4),
        }
        for name, seconds in columns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8, help="decoding requests")
    parser.add_argument("--steps", type=int, default=400, help="measured steps")
    parser.add_argument("--drafts", type=int, default=0, help="of every group; none is accepted")
    parser.add_argument("--model", default=None, help="checkpoint folder; default: embedded")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    arguments = parser.parse_args()
    # The no-op must not be kept as the model's programs, nor they be taken for it.
    jax.config.update("jax_enable_compilation_cache", False)
    with mock.patch.object(lowering, "build_step", build_noop):
        # All prompts fit into the first step, so these two cells serve every step.
        rows, width = PROMPT_TOKENS * arguments.groups, arguments.drafts + 1
        llm = LLM(
            arguments.model,
            max_num_seqs=arguments.groups,
            max_num_batched_tokens=rows,
            num_speculative_tokens=arguments.drafts,
            decode_widths=(width,),
            grid_cells=((rows, 0, width), (0, arguments.groups, width)),
            execution_mode="full",
        )
    records = measure(llm, arguments.groups, arguments.steps)
    result = {
        "groups": arguments.groups,
        "drafts": arguments.drafts,
        "steps": len(records),
        "leaves": llm.runner.num_leaves,
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "phases": summary(records),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"{len(records)} decode steps of {arguments.groups} groups, {result['leaves']} leaves")
    for name, row in result["phases"].items():
        spread = f"p10 {row['p10_ms']:.3f}  p90 {row['p90_ms']:.3f}"
        print(f"{name:>12}  {row['median_ms']:8.3f} ms   {spread}")


if __name__ == "__main__":
    main()
