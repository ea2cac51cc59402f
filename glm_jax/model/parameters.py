"""The flat names, shapes and axes of all parameters; the model's tree and the loader meet here.

Matrices are stored `[in, out]` so that the model computes `x @ W`; in block FP8 they are
`[out, in]`, as checkpoints have them. Shape letters are DESIGN.md's.
"""

from typing import NamedTuple

from glm_jax.model.config import GlmConfig

# Rows, and columns, of a block of block FP8 (`pallas_kernels.fp8`, which brings JAX).
FP8_BLOCK = 128


class ParamSpec(NamedTuple):
    """One parameter.

    Attributes:
        shape: its shape.
        axes: a logical name for each axis, which a mesh maps to its own axes.
        dtype: "weight" (the engine's weight_dtype, or its dtype where that is "fp8") or "float32"
            (whatever these are).
        quantised: whether it is in block FP8 where weight_dtype is "fp8".
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dtype: str = "weight"
    quantised: bool = False


def _quantised(shape: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
    return ParamSpec(shape, axes, quantised=True)


def parameter_specs(config: GlmConfig) -> dict[str, ParamSpec]:
    """Return every parameter of a model by its flat name, the MTP layer as the last layer."""
    model, vocab = config.hidden_size, config.vocab_size
    specs = {
        "embed": ParamSpec((vocab, model), ("vocab", "model")),
        "norm": ParamSpec((model,), ("model",)),
        "head": ParamSpec((vocab, model), ("vocab", "model")),
    }
    for layer in range(config.total_layers):
        for name, spec in _layer_specs(config, layer).items():
            specs[f"layers.{layer}.{name}"] = spec
    if config.num_nextn_predict_layers:
        specs |= {
            "mtp.embed_norm": ParamSpec((model,), ("model",)),
            "mtp.hidden_norm": ParamSpec((model,), ("model",)),
            "mtp.merge": ParamSpec((2 * model, model), ("merge", "model")),
            "mtp.norm": ParamSpec((model,), ("model",)),
        }
    return specs


def fp8_obstacle(config: GlmConfig) -> str | None:
    """Why a model cannot be held in block FP8; None where it can.

    Gate rows and up rows of a feed-forward share a matrix, and no block may have rows of both.
    """
    widths = {"moe_intermediate_size": config.moe_intermediate_size}
    if not all(map(config.is_sparse, range(config.num_hidden_layers))):
        widths["intermediate_size"] = config.intermediate_size
    for name, width in widths.items():
        if width % FP8_BLOCK:
            return (
                f"weight_dtype 'fp8' needs {name} to be a multiple of {FP8_BLOCK}, and it is "
                f"{width}. Use 'float32' or 'bfloat16'."
            )
    return None


def _layer_specs(config: GlmConfig, layer: int) -> dict[str, ParamSpec]:
    norms = {
        "input_norm": ParamSpec((config.hidden_size,), ("model",)),
        "post_norm": ParamSpec((config.hidden_size,), ("model",)),
    }
    indexer = _indexer_specs(config) if config.has_indexer(layer) else {}
    mlp = _moe_specs(config) if config.is_sparse(layer) else _mlp_specs(config)
    return norms | _attention_specs(config) | indexer | mlp


def _attention_specs(config: GlmConfig) -> dict[str, ParamSpec]:
    D, H, R = config.hidden_size, config.num_attention_heads, config.q_lora_rank
    A, B = config.qk_nope_head_dim, config.qk_rope_head_dim
    C, U = config.kv_lora_rank, config.v_head_dim
    return {
        "attention.q_a": _quantised((D, R), ("model", "query_latent")),
        "attention.q_a_norm": ParamSpec((R,), ("query_latent",)),
        "attention.q_b": _quantised((R, H * (A + B)), ("query_latent", "heads")),
        "attention.kv_a": _quantised((D, C + B), ("model", "latent_rope")),
        "attention.kv_a_norm": ParamSpec((C,), ("latent",)),
        "attention.k_up": ParamSpec((H, A, C), ("heads", "nope", "latent")),
        "attention.v_up": ParamSpec((H, C, U), ("heads", "latent", "value")),
        "attention.o": _quantised((H * U, D), ("heads", "model")),
    }


def _indexer_specs(config: GlmConfig) -> dict[str, ParamSpec]:
    D, R = config.hidden_size, config.q_lora_rank
    M, I = config.index_n_heads, config.index_head_dim  # noqa: E741 - the table's letter
    return {
        "indexer.query": _quantised((R, M * I), ("query_latent", "index_heads")),
        "indexer.key": _quantised((D, I), ("model", "index")),
        "indexer.key_norm_scale": ParamSpec((I,), ("index",)),
        "indexer.key_norm_bias": ParamSpec((I,), ("index",)),
        "indexer.head_weight": ParamSpec((D, M), ("model", "index_heads")),
    }


def _mlp_specs(config: GlmConfig) -> dict[str, ParamSpec]:
    D, F = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_up": _quantised((D, 2 * F), ("model", "mlp")),
        "mlp.down": _quantised((F, D), ("mlp", "model")),
    }


def _moe_specs(config: GlmConfig) -> dict[str, ParamSpec]:
    D, E, Y = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    shared = Y * config.n_shared_experts
    return {
        "moe.router": ParamSpec((D, E), ("model", "experts"), "float32"),
        # bfloat16 would merge most of its distinct values and change the selected experts.
        "moe.router_bias": ParamSpec((E,), ("experts",), "float32"),
        "moe.gate_up": _quantised((E, D, 2 * Y), ("experts", "model", "expert")),
        "moe.down": _quantised((E, Y, D), ("experts", "expert", "model")),
        "moe.shared_gate_up": _quantised((D, 2 * shared), ("model", "mlp")),
        "moe.shared_down": _quantised((shared, D), ("mlp", "model")),
    }
