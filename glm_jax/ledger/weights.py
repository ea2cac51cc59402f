"""Elements of the weights that each stage reads; the shapes are those of ``model.parameters``."""

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import parameter_specs
from glm_jax.weights.names import tensor_table

# Which stage a parameter of the flat names belongs to; what is missing is a norm.
_STAGES = {
    "attention.q_a": "projections",
    "attention.q_b": "projections",
    "attention.kv_a": "projections",
    "attention.k_up": "expansion",
    "attention.v_up": "expansion",
    "attention.o": "output",
    "indexer.query": "index_projections",
    "indexer.key": "index_projections",
    "indexer.head_weight": "index_heads",
    "mlp.gate_up": "dense",
    "mlp.down": "dense",
    "moe.router": "router",
    "moe.router_bias": "router",
    "moe.gate_up": "experts",
    "moe.down": "experts",
    "moe.shared_gate_up": "shared",
    "moe.shared_down": "shared",
    "mtp.merge": "merge",
    "embed": "embed",
    "head": "head",
}


class StageWeights(NamedTuple):
    """Numbers of one layer, or of the step; 0 where the model has no such layer.

    Attributes:
        projections: queries and the cached entry: q_a, q_b, kv_a.
        expansion: kv_b, between latents and heads.
        output: o.
        index_projections: queries and key of an indexer.
        index_heads: weights of its heads.
        dense: a dense MLP.
        router: with its bias.
        expert: one routed expert.
        shared: the shared expert.
        merge: of the MTP layer's two inputs.
        embed: the embedding.
        head: the output projection.
    """

    projections: int
    expansion: int
    output: int
    index_projections: int
    index_heads: int
    dense: int
    router: int
    expert: int
    shared: int
    merge: int
    embed: int
    head: int

    @property
    def attention(self) -> int:
        """All projections of one layer's attention; 165.0 M for GLM-5."""
        return self.projections + self.expansion + self.output


@lru_cache(maxsize=8)
def stage_weights(config: GlmConfig) -> StageWeights:
    """Sum the parameters of each stage."""
    sizes: Counter[str] = Counter()
    seen: dict[str, int] = {}
    for name, spec in parameter_specs(config).items():
        inner = name.split(".", 2)[2] if name.startswith("layers.") else name
        # Layers are alike where they have a parameter of the name.
        if inner not in seen:
            seen[inner] = math.prod(spec.shape)
            sizes[_STAGES.get(inner, "norms")] += seen[inner]
    return StageWeights(
        **{name: sizes[name] for name in StageWeights._fields if name != "expert"},
        expert=sizes["experts"] // config.n_routed_experts,
    )


class ModelSize(NamedTuple):
    """How large a model is.

    Attributes:
        parameters: numbers, the MTP layer's among them.
        without_mtp: without them.
        active: matrix elements that a row of the target meets, its experts' and the head's.
    """

    parameters: int
    without_mtp: int
    active: int


class TensorCounts(NamedTuple):
    """Tensors of a published checkpoint; in FP8 scales are tensors too."""

    bfloat16: int
    fp8: int


@lru_cache(maxsize=8)
def model_size(config: GlmConfig) -> ModelSize:
    """Count parameters."""

    def parameters(model: GlmConfig) -> int:
        return sum(math.prod(spec.shape) for spec in parameter_specs(model).values())

    weights, layers = stage_weights(config), config.num_hidden_layers
    sparse, full = config.mlp_layer_types.count("sparse"), config.indexer_types.count("full")
    active = (
        layers * weights.attention
        + full * (weights.index_projections + weights.index_heads)
        + (layers - sparse) * weights.dense
        + sparse * (config.num_experts_per_tok * weights.expert + weights.shared)
        + sparse * (weights.router - config.n_routed_experts)
        + weights.head
    )
    without_mtp = parameters(config.replace(num_nextn_predict_layers=0))
    return ModelSize(parameters(config), without_mtp, active)


@lru_cache(maxsize=8)
def tensor_counts(config: GlmConfig) -> TensorCounts:
    """Count the tensors of a checkpoint."""
    tensors = tensor_table(config).values()
    return TensorCounts(len(tensors), len(tensors) + sum(one.quantised for one in tensors))
