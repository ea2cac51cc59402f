"""The one table between Hugging Face tensors and parameters; plan, load and export read it.

A Hugging Face matrix is `[out, in]`, a parameter `[in, out]`, so most are transposed; only one in
block FP8 is `[out, in]` too. A tensor is cut along its rows into pieces, each of which fills one
rectangle of one parameter:

    gate_proj.weight [F, D]     -> gate_up[:, :F], transposed
    up_proj.weight [F, D]       -> gate_up[:, F:], transposed
    experts.3.up_proj.weight    -> gate_up[3, :, Y:], transposed
    kv_b_proj.weight [H*(A+U), C], for each head: A rows -> k_up[head]; U rows -> v_up[head],
                                                  transposed
"""

from collections.abc import Iterator
from typing import NamedTuple

from glm_jax.model.config import GlmConfig
from glm_jax.weights.headers import TensorHeader
from glm_jax.weights.quant import BLOCK, QuantisedBlocks, scale_shape

SCALE_SUFFIX = "_scale_inv"

# Written by other tools and meaningless here: derived buffers, scales of a quantised KV cache.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".k_scale", ".v_scale")

_INDEXER_SUFFIXES = (
    "wq_b.weight",
    "wk.weight",
    "k_norm.weight",
    "k_norm.bias",
    "weights_proj.weight",
)


class Piece(NamedTuple):
    """Some rows of a tensor and the rectangle of a parameter that they fill.

    Attributes:
        start: first row of the tensor.
        stop: row after the last.
        parameter: flat name of the parameter.
        index: subscript that picks the rectangle out of the parameter.
        transposed: whether the rectangle holds the rows as columns.
    """

    start: int
    stop: int
    parameter: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def blocks_of(self, parameter: QuantisedBlocks) -> QuantisedBlocks:
        """The rectangle of a parameter in block FP8, not transposed.

        What is a range of columns of a plain parameter is one of rows here; it starts at a block.
        """
        stack = tuple(place for place in self.index if isinstance(place, int))
        rows = self.index[-1] if len(self.index) > len(stack) else slice(0, self.stop)
        assert isinstance(rows, slice), f"{self.index=}"
        assert rows.start % BLOCK == 0, f"{self.index=}"
        blocks = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        return QuantisedBlocks(parameter.values[(*stack, rows)], parameter.scales[(*stack, blocks)])


class HfTensor(NamedTuple):
    """One tensor of a published checkpoint.

    Attributes:
        shape: its shape, `[out, in]` for a matrix.
        pieces: where its rows go; together they cover all rows.
        quantised: whether the published FP8 checkpoints store it in block FP8.
        dtype: safetensors name of its dtype where it is not quantised.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    quantised: bool = False
    dtype: str = "BF16"


def expected_tensors(config: GlmConfig, fp8: bool) -> dict[str, TensorHeader]:
    """Return every tensor of the published checkpoint of a model, BF16 or block FP8."""
    expected = {}
    for name, tensor in tensor_table(config).items():
        if fp8 and tensor.quantised:
            expected[name] = TensorHeader(tensor.shape, "F8_E4M3")
            expected[name + SCALE_SUFFIX] = TensorHeader(scale_shape(tensor.shape), "F32")
        else:
            expected[name] = TensorHeader(tensor.shape, tensor.dtype)
    return expected


def tensor_table(config: GlmConfig) -> dict[str, HfTensor]:
    """Return every tensor by its Hugging Face name, those of one parameter side by side."""
    vocab, model = config.vocab_size, config.hidden_size
    table = {
        "model.embed_tokens.weight": _copied("embed", vocab, model),
        "model.norm.weight": _copied("norm", model),
        "lm_head.weight": _copied("head", vocab, model),
    }
    for layer in range(config.total_layers):
        prefix = f"model.layers.{layer}."
        for suffix, tensor in _layer_tensors(config, layer):
            table[prefix + suffix] = tensor
    if config.num_nextn_predict_layers:
        prefix = f"model.layers.{config.num_hidden_layers}."
        table[prefix + "enorm.weight"] = _copied("mtp.embed_norm", model)
        table[prefix + "hnorm.weight"] = _copied("mtp.hidden_norm", model)
        table[prefix + "eh_proj.weight"] = _transposed("mtp.merge", model, 2 * model)
        table[prefix + "shared_head.norm.weight"] = _copied("mtp.norm", model)
    return table


def is_ignorable(name: str, config: GlmConfig) -> bool:
    """Whether a tensor that the table lacks may be left unread.

    True for derived buffers and for the indexer that some tools repeat in every shared layer.
    """
    if name.endswith(_IGNORED_SUFFIXES):
        return True
    head, found, suffix = name.removesuffix(SCALE_SUFFIX).partition(".self_attn.indexer.")
    layer = head.removeprefix("model.layers.")
    return (
        bool(found)
        and suffix in _INDEXER_SUFFIXES
        and head.startswith("model.layers.")
        and layer.isdecimal()
        and int(layer) < config.total_layers
        and not config.has_indexer(int(layer))
    )


def _layer_tensors(config: GlmConfig, layer: int) -> Iterator[tuple[str, HfTensor]]:
    model, parameter = config.hidden_size, f"layers.{layer}."
    yield "input_layernorm.weight", _copied(parameter + "input_norm", model)
    yield "post_attention_layernorm.weight", _copied(parameter + "post_norm", model)
    yield from _attention_tensors(config, parameter + "attention.")
    if config.has_indexer(layer):
        yield from _indexer_tensors(config, parameter + "indexer.")
    if config.is_sparse(layer):
        yield from _moe_tensors(config, parameter + "moe.")
    else:
        width = config.intermediate_size
        gate_up, down = parameter + "mlp.gate_up", parameter + "mlp.down"
        yield from _gated_tensors("mlp.", gate_up, down, model, width)


def _attention_tensors(config: GlmConfig, parameter: str) -> Iterator[tuple[str, HfTensor]]:
    model, heads = config.hidden_size, config.num_attention_heads
    query_latent, latent = config.q_lora_rank, config.kv_lora_rank
    query, value = heads * config.qk_head_dim, heads * config.v_head_dim
    latent_rope = latent + config.qk_rope_head_dim
    tensors = {
        "q_a_proj": _transposed(parameter + "q_a", query_latent, model, quantised=True),
        "q_a_layernorm": _copied(parameter + "q_a_norm", query_latent),
        "q_b_proj": _transposed(parameter + "q_b", query, query_latent, quantised=True),
        "kv_a_proj_with_mqa": _transposed(parameter + "kv_a", latent_rope, model, quantised=True),
        "kv_a_layernorm": _copied(parameter + "kv_a_norm", latent),
        "kv_b_proj": _kv_up(config, parameter),
        "o_proj": _transposed(parameter + "o", model, value, quantised=True),
    }
    for name, tensor in tensors.items():
        yield f"self_attn.{name}.weight", tensor


def _kv_up(config: GlmConfig, parameter: str) -> HfTensor:
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    pieces = []
    for head in range(config.num_attention_heads):
        start = head * (nope + value)
        middle, stop = start + nope, start + nope + value
        pieces.append(Piece(start, middle, parameter + "k_up", (head,)))
        pieces.append(Piece(middle, stop, parameter + "v_up", (head,), transposed=True))
    rows = config.num_attention_heads * (nope + value)
    return HfTensor((rows, config.kv_lora_rank), tuple(pieces), quantised=True)


def _indexer_tensors(config: GlmConfig, parameter: str) -> Iterator[tuple[str, HfTensor]]:
    heads, width = config.index_n_heads, config.index_head_dim
    tensors = (
        _transposed(parameter + "query", heads * width, config.q_lora_rank, quantised=True),
        _transposed(parameter + "key", width, config.hidden_size, quantised=True),
        _copied(parameter + "key_norm_scale", width),
        _copied(parameter + "key_norm_bias", width),
        _transposed(parameter + "head_weight", heads, config.hidden_size),
    )
    for suffix, tensor in zip(_INDEXER_SUFFIXES, tensors, strict=True):
        yield f"self_attn.indexer.{suffix}", tensor


def _moe_tensors(config: GlmConfig, parameter: str) -> Iterator[tuple[str, HfTensor]]:
    model, experts = config.hidden_size, config.n_routed_experts
    width = config.moe_intermediate_size
    yield "mlp.gate.weight", _transposed(parameter + "router", experts, model)
    bias = HfTensor((experts,), (Piece(0, experts, parameter + "router_bias"),), dtype="F32")
    yield "mlp.gate.e_score_correction_bias", bias
    shared_gate_up, shared_down = parameter + "shared_gate_up", parameter + "shared_down"
    shared = width * config.n_shared_experts
    yield from _gated_tensors("mlp.shared_experts.", shared_gate_up, shared_down, model, shared)
    # All gate and up projections come before the down projections, so that an exporter reads
    # each expert stack once.
    stacks = {
        expert: list(
            _gated_tensors(
                f"mlp.experts.{expert}.",
                parameter + "gate_up",
                parameter + "down",
                model,
                width,
                expert=(expert,),
            )
        )
        for expert in range(experts)
    }
    for part in (slice(0, 2), slice(2, 3)):
        for tensors in stacks.values():
            yield from tensors[part]


def _gated_tensors(
    prefix: str,
    gate_up: str,
    down: str,
    model: int,
    width: int,
    *,
    expert: tuple[int, ...] = (),
) -> Iterator[tuple[str, HfTensor]]:
    """Yield the gate, up and down projections of a SwiGLU block; gate and up share a parameter."""
    for name, columns in (("gate_proj", slice(0, width)), ("up_proj", slice(width, 2 * width))):
        piece = Piece(0, width, gate_up, (*expert, slice(None), columns), transposed=True)
        yield f"{prefix}{name}.weight", HfTensor((width, model), (piece,), quantised=True)
    piece = Piece(0, model, down, expert, transposed=True)
    yield f"{prefix}down_proj.weight", HfTensor((model, width), (piece,), quantised=True)


def _copied(parameter: str, *shape: int) -> HfTensor:
    return HfTensor(shape, (Piece(0, shape[0], parameter),))


def _transposed(parameter: str, rows: int, cols: int, *, quantised: bool = False) -> HfTensor:
    piece = Piece(0, rows, parameter, (), transposed=True)
    return HfTensor((rows, cols), (piece,), quantised=quantised)
