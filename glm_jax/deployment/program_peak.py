"""The memory of a deployment's step programs, compiled for one H200 that is only described.

One GPU runs one rank: its share of the groups and of the chunk, and its experts, so that each
expert gets as many rows as it would on average. Collectives and their buffers are not in it: the
engine runs on one device today.

Scratch memory is reused from layer to layer, so the first layers that hold every kind of layer
need what all need, and compile in a fraction of the time (GLM-5.3 in FP8 for one of 8 GPUs, jax
0.10.2: 7 layers 105.95 MB in the decode step and 336 MB in the mixed one, 10 layers 105.96 and
332 MB).
"""

import jax

from bucketing.programs import CompileReport, compile_program
from glm_jax.deployment.deployment import PAGE_SIZE, Deployment
from glm_jax.deployment.described_device import described_device
from glm_jax.deployment.plan import ProgramNeed
from glm_jax.engine.lowering import Lowering
from glm_jax.engine_options import resolve_options
from glm_jax.model.config import GlmConfig
from glm_jax.progress import compiling_bar


def measure_programs(deployment: Deployment) -> ProgramNeed:
    """Compile the decode and the mixed step of one rank; no array is made.

    Returns:
        The memory by step; none, with the reason, where a program cannot be compiled.
    """
    layers = slice_layers(deployment.config)
    cells = deployment.steps_of_rank()
    temporaries = {}
    try:
        place = described_device()
    except RuntimeError as error:
        return _not_compiled(error)
    lowering = rank_lowering(deployment, layers, place)
    try:
        with compiling_bar(len(cells)) as advance:
            for name, cell in cells.items():
                _, report = compile_program(lowering.lower, cell)
                temporaries[name] = needed_bytes(report)
                advance(report)
    except Exception as error:  # of JAX, Mosaic or XLA, of many types: the plan goes on without
        return _not_compiled(error)
    total = deployment.config.num_hidden_layers
    return ProgramNeed(
        temporaries,
        f"compiled for a described H200, one rank, the first {layers} of {total} layers: they hold "
        "every kind, and layers share scratch memory; without collectives",
    )


def _not_compiled(error: Exception) -> ProgramNeed:
    first = next(iter(str(error).strip().splitlines()), "")
    return ProgramNeed({}, f"not compiled: {type(error).__name__}: {first[:300]}")


def slice_layers(config: GlmConfig) -> int:
    """The least number of first layers among which every kind of the model's layers is."""
    kinds = list(zip(config.mlp_layer_types, config.indexer_types, strict=True))
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def first_layers(config: GlmConfig, layers: int) -> GlmConfig:
    """The same model with fewer layers.

    Raises:
        ValueError: the model has not so many.
    """
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(
            f"the model has {config.num_hidden_layers} layers, {layers} cannot be taken."
        )
    return config.replace(
        num_hidden_layers=layers,
        mlp_layer_types=config.mlp_layer_types[:layers],
        indexer_types=config.indexer_types[:layers],
    )


def rank_lowering(deployment: Deployment, layers: int, sharding: jax.sharding.Sharding) -> Lowering:
    """What one rank's programs are made from, on a device described by ``sharding``."""
    sliced = first_layers(deployment.config, layers)
    rank = sliced.replace(n_routed_experts=sliced.n_routed_experts // deployment.gpus)
    widest = deployment.steps_of_rank()["mixed"]
    options = {
        "dtype": "float32" if deployment.weight_dtype == "float32" else "bfloat16",
        "weight_dtype": deployment.weight_dtype,
        "kv_cache_dtype": deployment.kv_cache_dtype,
        "max_model_len": deployment.context,
        "max_num_seqs": widest.groups,
        "max_num_batched_tokens": widest.prefill,
        "prefill_buckets": (widest.prefill,),
        "group_buckets": (widest.groups,),
        "decode_widths": (widest.width,),
        "num_speculative_tokens": widest.width - 1 if rank.num_nextn_predict_layers else 0,
        "page_size": PAGE_SIZE,
        # Scratch memory does not depend on the pool's size.
        "num_pages": deployment.pages_per_seq + 1,
    }
    return Lowering(*resolve_options(rank, options, "gpu"), sharding=sharding)


def needed_bytes(report: CompileReport) -> int:
    """Scratch memory, and results that are not written over arguments."""
    return report.temporary_bytes + report.output_bytes - report.aliased_bytes
