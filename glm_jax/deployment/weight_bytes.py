"""Bytes of a model's weights: in the published checkpoint, in memory, on each GPU; host-only.

In memory "fp8" keeps the checkpoint's blocks of 128 x 128 e4m3 values with a float32 scale each,
but for `kv_b_proj`, which is dequantised: attention in the latent space needs its two halves
apart. What is not a large matrix is bfloat16, routers are float32.
"""

import math
from collections import defaultdict
from typing import NamedTuple

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import ParamSpec, parameter_specs
from glm_jax.weights.quant import scale_shape

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
ROUTED = "routed experts"
# The rest; the merge joins the inputs of the MTP layer.
REST = "routers, norms, merge"
_EXPANSION = "kv_b (k_up, v_up)"
# How each kind of parameter is held: name, whether the GPUs share one copy, and the beginnings of
# the parameters' names. MLPs and vocabulary are split as in `glm_jax.simulate.step_time`.
_KINDS = (
    (ROUTED, True, ("moe.gate_up", "moe.down")),
    (_EXPANSION, False, ("attention.k_up", "attention.v_up")),
    (REST, False, ("attention.q_a_norm", "attention.kv_a_norm", "indexer.key_norm")),
    ("other attention", False, ("attention.",)),
    ("indexers", False, ("indexer.",)),
    ("MLPs, shared experts", True, ("mlp.", "moe.shared")),
    ("embedding, head", True, ("embed", "head")),
    (REST, False, ("",)),
)


class WeightPart(NamedTuple):
    """One kind of weights, all layers together, the MTP layer among them.

    Attributes:
        name: what they are.
        split: whether the GPUs hold one copy together, or a copy each.
        elements: numbers.
        stored: bytes in the published checkpoint of this type, scales included.
        held: bytes of one copy in memory, scales included.
    """

    name: str
    split: bool
    elements: int
    stored: int
    held: int

    def stored_per_gpu(self, gpus: int) -> int:
        """Bytes on each GPU, were they held as they are stored."""
        return -(-self.stored // gpus) if self.split else self.stored

    def held_per_gpu(self, gpus: int) -> int:
        """Bytes on each GPU."""
        return -(-self.held // gpus) if self.split else self.held


def weight_parts(config: GlmConfig, weight_dtype: str) -> tuple[WeightPart, ...]:
    """All weights by kind, the largest first, REST last.

    Args:
        config: the model.
        weight_dtype: "fp8", "bfloat16" or "float32"; checkpoints are published in the first two,
            and what becomes float32 is stored in bfloat16.
    """
    elements, stored, held = (defaultdict[str, int](int) for _ in range(3))
    for name, spec in parameter_specs(config).items():
        kind = _kind(name)
        elements[kind] += math.prod(spec.shape)
        held[kind] += _held_bytes(spec, weight_dtype)
        stored[kind] += _stored_bytes(name, spec, weight_dtype)
    if weight_dtype == "fp8":
        stored[_EXPANSION] += 4 * config.total_layers * _expansion_blocks(config)
    split = {kind: shared for kind, shared, _ in _KINDS}
    parts = (
        WeightPart(kind, split[kind], elements[kind], stored[kind], held[kind]) for kind in held
    )
    return tuple(sorted(parts, key=lambda part: (part.name == REST, -part.held)))


def _kind(name: str) -> str:
    """The kind of a parameter by its flat name."""
    inner = name.split(".", 2)[2] if name.startswith("layers.") else name
    return next(kind for kind, _, starts in _KINDS if inner.startswith(starts))


def _held_bytes(spec: ParamSpec, weight_dtype: str) -> int:
    size = math.prod(spec.shape)
    if weight_dtype == "fp8" and spec.quantised:
        *stack, rows, cols = spec.shape
        return size + 4 * math.prod(stack) * math.prod(scale_shape((rows, cols)))
    if spec.dtype == "float32":
        return 4 * size
    return size * _ITEM_BYTES["bfloat16" if weight_dtype == "fp8" else weight_dtype]


def _stored_bytes(name: str, spec: ParamSpec, weight_dtype: str) -> int:
    if weight_dtype == "fp8" and _kind(name) == _EXPANSION:
        return math.prod(spec.shape)
    # Only the routers' biases are float32 in a file.
    if spec.dtype == "float32" and name.endswith("bias"):
        return 4 * math.prod(spec.shape)
    published = "fp8" if weight_dtype == "fp8" else "bfloat16"
    return _held_bytes(spec._replace(dtype="weight"), published)


def _expansion_blocks(config: GlmConfig) -> int:
    """Scales of one layer's kv_b matrix: both halves of all heads, one below the other."""
    rows = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
    return math.prod(scale_shape((rows, config.kv_lora_rank)))
