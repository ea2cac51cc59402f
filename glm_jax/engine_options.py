"""Turns a caller's engine options into the final ones: "auto" resolved by model and platform."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from glm_jax.engine.config import EngineConfig
from glm_jax.engine.xla_flags import platform_flags
from glm_jax.model.cache import CacheFormat, entry_bytes
from glm_jax.model.config import GlmConfig
from glm_jax.sampling.params import check_names

# The page pool's default size on CPU; enough for 45K tokens of the embedded model.
DEFAULT_POOL_BYTES = 1 << 30


class Resolved(NamedTuple):
    """The model as it is served, and the engine's options with nothing left open."""

    model: GlmConfig
    engine: EngineConfig


def resolve_options(model: GlmConfig, options: Mapping[str, Any], platform: str) -> Resolved:
    """Fill in what depends on the model and the platform.

    Args:
        model: the model's own config.
        options: fields of ``EngineConfig``.
        platform: of the device, "cpu" for example.

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
    if chosen.get("dtype", "auto") == "auto":
        chosen["dtype"] = "float32" if platform == "cpu" else "bfloat16"
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
    if config.num_pages is None and platform == "cpu":
        # Elsewhere the device's memory decides (``device_memory.fit_pool``).
        pages = default_pages(model, config)
        config = dataclasses.replace(config, num_pages=pages)
    if config.latent_norm_eps is not None:
        model = model.replace(latent_norm_eps=config.latent_norm_eps)
    return Resolved(model, config)


def default_pages(model: GlmConfig, config: EngineConfig) -> int:
    """Pages of the default pool: what the requests could need, within DEFAULT_POOL_BYTES."""
    token_bytes = entry_bytes(model, CacheFormat(config.dtype))
    affordable = DEFAULT_POOL_BYTES // (token_bytes * config.page_size)
    return min(config.pool_pages, max(affordable, config.pages_per_seq + 1))
