"""Bytes of a token in the cache, by the cache's type; host-only."""

from glm_jax.model.config import GlmConfig

# The formats are made for these widths (``pallas_kernels.formats``).
_FP8_WIDTHS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
_FP8_TILE = 128
_SIZES = {"bfloat16": 2, "float32": 4}


def latent_bytes(config: GlmConfig, kv_cache_dtype: str) -> int:
    """Bytes of a token in one layer's plane: its latent and its rotated key.

    fp8_ds_mla: a byte per latent value, a float32 scale per 128 of them, the key in bfloat16.

    Raises:
        ValueError: the model's widths are not those of fp8_ds_mla.
    """
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if kv_cache_dtype != "fp8_ds_mla":
        return _SIZES[kv_cache_dtype] * (latent + rope)
    _check_widths(config)
    return latent + 4 * (latent // _FP8_TILE) + 2 * rope


def index_key_bytes(config: GlmConfig, kv_cache_dtype: str) -> int:
    """Bytes of a token's index key in one full layer's plane.

    With fp8_ds_mla: a byte per value and a float32 scale per key.

    Raises:
        ValueError: as for ``latent_bytes``.
    """
    width = config.index_head_dim
    if kv_cache_dtype != "fp8_ds_mla":
        return _SIZES[kv_cache_dtype] * width
    _check_widths(config)
    return width + 4


def token_bytes(config: GlmConfig, kv_cache_dtype: str, *, mtp: bool) -> int:
    """Bytes of a token in all planes: 656 x 78 + 132 x 21 = 53,940 for GLM-5.3 in fp8_ds_mla.

    Args:
        config: the model.
        kv_cache_dtype: "fp8_ds_mla", "bfloat16" or "float32".
        mtp: count the MTP layer's planes too, one of each kind.
    """
    more = config.num_nextn_predict_layers if mtp else 0
    planes = config.num_hidden_layers + more
    full_planes = config.indexer_types.count("full") + more
    latent = planes * latent_bytes(config, kv_cache_dtype)
    return latent + full_planes * index_key_bytes(config, kv_cache_dtype)


def _check_widths(config: GlmConfig) -> None:
    for name, width in _FP8_WIDTHS.items():
        if getattr(config, name) != width:
            raise ValueError(
                f"kv_cache_dtype fp8_ds_mla is made for {name} {width}, the model has "
                f"{getattr(config, name)}. Take bfloat16 or float32."
            )
