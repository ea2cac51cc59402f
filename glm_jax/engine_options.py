"""Turns a caller's engine options into the final ones: "auto" resolved by model and platform."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.xla_flags import platform_flags
from glm_jax.model.cache import cache_format_of, entry_bytes
from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import fp8_obstacle
from glm_jax.sampling.params import check_names

# The page pool's default size on CPU; enough for 45K tokens of the embedded model.
DEFAULT_POOL_BYTES = 1 << 30


class Resolved(NamedTuple):
    """The model as it is served, and the engine's options with nothing left open."""

    model: GlmConfig
    engine: EngineConfig


def resolve_options(
    model: GlmConfig, options: Mapping[str, Any], platform: str, *, fp8_checkpoint: bool = False
) -> Resolved:
    """Fill in what depends on the model and the platform.

    Args:
        model: the model's own config.
        options: fields of ``EngineConfig``.
        platform: of the device, "cpu" for example.
        fp8_checkpoint: whether the model's weights are stored in block FP8.

    Raises:
        ValueError: an option is unknown, out of range, or does not go with another.
    """
    check_names("engine option", options, frozenset(EngineConfig.__dataclass_fields__))
    chosen = dict(options)
    limit = model.max_position_embeddings
    chosen.setdefault("max_model_len", limit)
    if chosen["max_model_len"] > limit:
        raise ValueError(
            f"max_model_len is {chosen['max_model_len']}, but the model's positions end at "
            f"{limit} (max_position_embeddings). Lower max_model_len."
        )
    _choose_types(chosen, model, platform, fp8_checkpoint)
    if chosen.get("layer_storage", "auto") == "auto":
        # GPU: few leaves, static slices cost no copy. CPU: slices of a stack are copied.
        scanned = chosen.get("layer_loop") == "scan"
        chosen["layer_storage"] = "per_layer" if platform == "cpu" and not scanned else "stacked"
    if chosen.get("layer_loop", "auto") == "auto":
        chosen["layer_loop"] = "unrolled"
    if chosen.get("kernels", "auto") == "auto":
        chosen["kernels"] = "xla" if platform == "cpu" else "mosaic_gpu"
    chosen.setdefault("xla_flags", platform_flags(platform))
    if (chosen["layer_storage"], chosen["layer_loop"]) == ("per_layer", "scan"):
        raise ValueError(
            "layer_loop 'scan' needs layer_storage 'stacked', got 'per_layer'. Change either."
        )
    config = EngineConfig(**chosen)
    if config.num_drafts and not model.num_nextn_predict_layers:
        raise ValueError(
            f"num_speculative_tokens is {config.num_speculative_tokens!r}, but the model has no "
            "MTP layer to draft with (num_nextn_predict_layers is 0). Use "
            "num_speculative_tokens 0."
        )
    cache_format_of(model, config.kv_cache_dtype)  # refuses a layout that the model does not fit
    if config.num_pages is None and platform == "cpu":
        # Elsewhere the device's memory decides (``device_memory.fit_pool``).
        pages = default_pages(model, config)
        config = dataclasses.replace(config, num_pages=pages)
    if config.latent_norm_eps is not None:
        model = model.replace(latent_norm_eps=config.latent_norm_eps)
    return Resolved(model, config)


def _choose_types(
    chosen: dict[str, Any], model: GlmConfig, platform: str, fp8_checkpoint: bool
) -> None:
    """Settle dtype, weight_dtype and kv_cache_dtype."""
    if chosen.get("dtype", "auto") == "auto":
        chosen["dtype"] = "float32" if platform == "cpu" else "bfloat16"
    if chosen.get("weight_dtype", "auto") == "auto":
        # Not on CPU, where widening costs more time than fewer bytes save. Not where float32 is
        # asked for: the GPU's kernels for FP8 round rows to bfloat16.
        wanted = fp8_checkpoint and platform != "cpu" and chosen["dtype"] == "bfloat16"
        fp8 = wanted and fp8_obstacle(model) is None
        chosen["weight_dtype"] = "fp8" if fp8 else chosen["dtype"]
    elif chosen["weight_dtype"] == "fp8" and (obstacle := fp8_obstacle(model)) is not None:
        raise ValueError(obstacle)
    if chosen.get("kv_cache_dtype", "auto") == "auto":
        chosen["kv_cache_dtype"] = chosen["dtype"]


def default_pages(model: GlmConfig, config: EngineConfig) -> int:
    """Pages of the default pool: what the requests could need, within DEFAULT_POOL_BYTES."""
    token_bytes = entry_bytes(model, cache_format_of(model, config.kv_cache_dtype))
    affordable = DEFAULT_POOL_BYTES // (token_bytes * config.page_size)
    return min(config.pool_pages, max(affordable, config.pages_per_seq + 1))
