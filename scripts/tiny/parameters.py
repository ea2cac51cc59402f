"""Names, shapes and first values of the trained arrays; the names are those of glm_jax.

Matrices are [in, out] (x @ W). Correction biases of the routers are not here: they follow a rule of
their own (see loss.py) and live in the training state as one array.
"""

from typing import Any

import numpy as np
from jaxtyping import Float

from scripts.tiny.shape import TinyShape

# Float arrays by name: of the device under jit, of the host before and after.
Parameters = dict[str, Any]


def parameter_shapes(shape: TinyShape) -> dict[str, tuple[int, ...]]:
    """Return every trained array's name and shape."""
    hidden = shape.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (shape.vocab_size, hidden),
        "norm": (hidden,),
        "head": (shape.vocab_size, hidden),
        "mtp.embed_norm": (hidden,),
        "mtp.hidden_norm": (hidden,),
        "mtp.merge": (2 * hidden, hidden),
        "mtp.norm": (hidden,),
    }
    for layer in range(shape.total_layers):
        parts = {"input_norm": (hidden,), "post_norm": (hidden,)}
        parts |= _attention_shapes(shape)
        if shape.has_indexer(layer):
            parts |= _indexer_shapes(shape)
        parts |= _dense_shapes(shape) if shape.is_dense(layer) else _expert_shapes(shape)
        shapes |= {f"layers.{layer}.{name}": size for name, size in parts.items()}
    return shapes


def _attention_shapes(shape: TinyShape) -> dict[str, tuple[int, ...]]:
    hidden, heads, latent = shape.hidden_size, shape.num_attention_heads, shape.kv_lora_rank
    return {
        "attention.q_a": (hidden, shape.q_lora_rank),
        "attention.q_a_norm": (shape.q_lora_rank,),
        "attention.q_b": (shape.q_lora_rank, heads * shape.qk_head_dim),
        "attention.kv_a": (hidden, latent + shape.qk_rope_head_dim),
        "attention.kv_a_norm": (latent,),
        "attention.k_up": (heads, shape.qk_nope_head_dim, latent),
        "attention.v_up": (heads, latent, shape.v_head_dim),
        "attention.o": (heads * shape.v_head_dim, hidden),
    }


def _indexer_shapes(shape: TinyShape) -> dict[str, tuple[int, ...]]:
    return {
        "indexer.query": (shape.q_lora_rank, shape.index_n_heads * shape.index_head_dim),
        "indexer.key": (shape.hidden_size, shape.index_head_dim),
        "indexer.key_norm_scale": (shape.index_head_dim,),
        "indexer.key_norm_bias": (shape.index_head_dim,),
        "indexer.head_weight": (shape.hidden_size, shape.index_n_heads),
    }


def _dense_shapes(shape: TinyShape) -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_up": (shape.hidden_size, 2 * shape.intermediate_size),
        "mlp.down": (shape.intermediate_size, shape.hidden_size),
    }


def _expert_shapes(shape: TinyShape) -> dict[str, tuple[int, ...]]:
    hidden, experts, width = shape.hidden_size, shape.n_routed_experts, shape.moe_intermediate_size
    return {
        "moe.router": (hidden, experts),
        "moe.gate_up": (experts, hidden, 2 * width),
        "moe.down": (experts, width, hidden),
        "moe.shared_gate_up": (hidden, 2 * width),
        "moe.shared_down": (width, hidden),
    }


def initial_parameters(shape: TinyShape, seed: int) -> dict[str, Float[np.ndarray, "..."]]:
    """Draw first values: zero for what writes to the residual stream and for the head.

    Embeddings have deviation 1 and matrices 1/sqrt(in): measured better than small embeddings.
    """
    rng = np.random.default_rng(seed)
    values = {}
    for name, size in parameter_shapes(shape).items():
        leaf = name.rsplit(".", 1)[-1]
        if leaf.endswith("norm") or leaf == "key_norm_scale":
            value = np.ones(size)
        elif leaf in ("o", "down", "shared_down", "head", "key_norm_bias"):
            value = np.zeros(size)
        elif leaf == "embed":
            value = rng.standard_normal(size)
        else:
            fan_in = size[-1] if leaf == "k_up" else size[-2]
            value = rng.standard_normal(size) * fan_in**-0.5
        values[name] = value.astype(np.float32)
    return values


def initial_router_bias(shape: TinyShape) -> Float[np.ndarray, "sparse E"]:
    """Return the zero correction bias [sparse layers, experts]."""
    return np.zeros((len(shape.sparse_layers), shape.n_routed_experts), np.float32)


def layer_parameters(parameters: Parameters, prefix: str) -> Parameters:
    """Return the arrays below `prefix.`, without it."""
    start = len(prefix) + 1
    return {
        name[start:]: value for name, value in parameters.items() if name.startswith(prefix + ".")
    }
