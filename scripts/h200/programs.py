"""The step programs that the gate compiles, by name: a model, its engine's options, its cells."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from bucketing.cell import Cell
from glm_jax.deployment.program_peak import first_layers
from glm_jax.engine.config import EngineConfig
from glm_jax.engine.lowering import Lowering
from glm_jax.engine.xla_flags import platform_flags
from glm_jax.model.config import GlmConfig
from glm_jax.model.presets import PRESETS
from glm_jax.model_files import find_model

EMBEDDED = "embedded"
# At the end of a name: weights and cache in FP8 instead of bfloat16.
FP8 = "@fp8"
# Decode groups of one token and five drafts, which the MTP layer makes inside the step. The prefill
# rows of the mixed cell are one long chunk's share of a step.
GROUPS, WIDTH, PREFILL = 32, 6, 512
CELLS = {"decode": Cell(0, GROUPS, WIDTH), "mixed": Cell(PREFILL, GROUPS, WIDTH)}


class Program(NamedTuple):
    """One step program, not lowered yet.

    Attributes:
        step: a name of CELLS.
        lower: traces and lowers it.
        cache_arrays: bytes of each array of the cache, which it writes in place.
    """

    step: str
    lower: Callable[[], jax.stages.Lowered]
    cache_arrays: tuple[int, ...]


def programs_of(name: str, sharding: jax.sharding.Sharding, implementation: str) -> list[Program]:
    """The programs of a model.

    Args:
        name: "embedded", a preset's name, or that with ":layers" for its first layers; each also
            with "@fp8" for weights and cache in FP8.
        sharding: of the described device.
        implementation: of the operators.

    Raises:
        ValueError: the name is none of these.
    """
    model = model_of(name.removesuffix(FP8))
    engine = engine_of(model, implementation)
    if name.endswith(FP8):
        engine = dataclasses.replace(engine, weight_dtype="fp8", kv_cache_dtype="fp8_ds_mla")
    lowering = Lowering(model, engine, sharding=sharding)

    cache_arrays = tuple(array.size * array.dtype.itemsize for array in lowering.cache)

    def program(step: str, cell: Cell) -> Program:
        return Program(step, lambda: lowering.lower(cell), cache_arrays)

    return [program(step, cell) for step, cell in CELLS.items()]


def model_of(name: str) -> GlmConfig:
    """The config behind a name without "@fp8" (see ``programs_of``)."""
    if name == EMBEDDED:
        return find_model(None).config
    preset, _, layers = name.partition(":")
    if preset not in PRESETS or not (layers.isdecimal() or layers == ""):
        raise ValueError(
            f"no model is called {name!r}; allowed: {EMBEDDED}, {', '.join(PRESETS)}, each preset "
            'also with a number of layers ("glm-5.3:6"), and each name with "@fp8".'
        )
    config = PRESETS[preset]
    return first_layers(config, int(layers)) if layers else config


def engine_of(model: GlmConfig, implementation: str) -> EngineConfig:
    """Engine options as on a GPU; contexts far longer than the model's top-k."""
    return EngineConfig(
        max_model_len=min(32768, model.max_position_embeddings),
        max_num_seqs=GROUPS,
        max_num_batched_tokens=PREFILL,
        prefill_buckets=(PREFILL,),
        group_buckets=(GROUPS,),
        num_speculative_tokens=WIDTH - 1 if model.num_nextn_predict_layers else 0,
        decode_widths=(WIDTH,),
        num_pages=4097,
        dtype="bfloat16",
        weight_dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        layer_storage="stacked",
        layer_loop="unrolled",
        xla_flags=platform_flags("gpu"),
        kernels=implementation,
    )
