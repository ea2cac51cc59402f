"""What weights, cache entries and rows take in memory and on the way between devices."""

from typing import NamedTuple

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import FP8_BLOCK, fp8_obstacle

_BYTES = {"fp8": 1 + 4 / FP8_BLOCK**2, "bf16": 2.0, "float32": 4.0}
# Values of a tile with one float32 scale, of latents, index keys and rows on the link alike.
_TILE = 128
_CACHES = ("fp8_ds_mla", "bfloat16", "float32")
_WEIGHTS = ("fp8", "bfloat16", "float32")


class Formats(NamedTuple):
    """How everything is held; precisions are "fp8", "bf16" or "float32".

    Attributes:
        matrices: projections, MLPs and experts; "fp8" is block FP8 with its scales.
        expansion: kv_b, the up-projections from latents. Published FP8 checkpoints have it in FP8,
            though the engine widens it when it loads.
        narrow: what FP8 leaves alone: embedding, head, weights of the index heads, MTP's merge.
        router: routers, which decide, and are float32.
        rows: activations.
        attention: in which sparse attention is computed.
        index: in which index keys are scored.
        cache: "fp8_ds_mla", "bfloat16" or "float32".
    """

    matrices: str
    expansion: str
    narrow: str
    router: str
    rows: str
    attention: str
    index: str
    cache: str

    def latent_bytes(self, config: GlmConfig) -> int:
        """Bytes of a token in one layer: 512 + 4 x 4 + 64 x 2 = 656 in fp8_ds_mla."""
        latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
        if self.cache == "fp8_ds_mla":
            return latent + 4 * (latent // _TILE) + 2 * rope
        return (2 if self.cache == "bfloat16" else 4) * (latent + rope)

    def gathered_bytes(self, config: GlmConfig) -> int:
        """The same once it is widened: what rows of a chunk gather, 1152 in bfloat16."""
        width = 4 if self.cache == "float32" else 2
        return width * (config.kv_lora_rank + config.qk_rope_head_dim)

    def index_bytes(self, config: GlmConfig) -> int:
        """Bytes of a token in one full layer: 128 + 4 = 132 in FP8."""
        width = config.index_head_dim
        if self.cache == "fp8_ds_mla":
            return width + 4
        return (2 if self.cache == "bfloat16" else 4) * width

    def token_bytes(self, config: GlmConfig, *, mtp: bool) -> int:
        """Bytes of a token in all layers: 656 x 78 + 132 x 21 = 53,940 for GLM-5.3 without MTP."""
        layers, full = config.num_hidden_layers, config.indexer_types.count("full")
        if mtp:
            layers += config.num_nextn_predict_layers
            full += config.num_nextn_predict_layers
        return self.latent_bytes(config) * layers + self.index_bytes(config) * full

    @property
    def row_bytes(self) -> float:
        """Bytes of one value of a row."""
        return _BYTES[self.rows]

    @property
    def sent_bytes(self) -> float:
        """Bytes of one value of a row on its way to experts: FP8 with a scale per 128 values."""
        return 1 + 4 / _TILE if self.matrices == "fp8" else self.row_bytes


def weight_bytes(precision: str) -> float:
    """Bytes of one weight, its share of the scales included."""
    return _BYTES[precision]


def make_formats(config: GlmConfig, *, weights: str = "fp8", cache: str = "fp8_ds_mla") -> Formats:
    """The formats behind the options of the command.

    Args:
        config: the model.
        weights: "fp8" (as published), "bfloat16" or "float32".
        cache: "fp8_ds_mla", "bfloat16" or "float32".

    Raises:
        ValueError: a name is unknown, or has no form for this model.
    """
    if weights not in _WEIGHTS or cache not in _CACHES:
        raise ValueError(
            f"weights are {weights!r} and cache is {cache!r}; allowed: {', '.join(_WEIGHTS)} and "
            f"{', '.join(_CACHES)}."
        )
    obstacle = fp8_obstacle(config) if weights == "fp8" else None
    if obstacle is not None:
        raise ValueError(obstacle)
    if cache == "fp8_ds_mla" and (config.kv_lora_rank % _TILE or config.index_head_dim != _TILE):
        raise ValueError(
            f"cache fp8_ds_mla needs kv_lora_rank in tiles of {_TILE} and index_head_dim {_TILE}; "
            f"this model has {config.kv_lora_rank} and {config.index_head_dim}. Use float32 or "
            "bfloat16."
        )
    narrow = "float32" if weights == "float32" else "bf16"
    matrices = "fp8" if weights == "fp8" else narrow
    return Formats(
        matrices=matrices,
        expansion=matrices,
        narrow=narrow,
        router="float32",
        rows=narrow,
        attention="float32" if cache == "float32" else "bf16",
        index={"fp8_ds_mla": "fp8", "bfloat16": "bf16", "float32": "float32"}[cache],
        cache=cache,
    )
