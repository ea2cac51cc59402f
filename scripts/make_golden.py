"""Makes the reference outputs of tests/golden/ with transformers' GlmMoeDsaForCausalLM.

    python scripts/make_golden.py                    # random checkpoints tests/golden/{tiny,odd}
    python scripts/make_golden.py --embedded FOLDER  # tests/golden/embedded.npz from a checkpoint

Needs torch, transformers, tokenizers, safetensors (made with torch 2.13.0 and transformers 5.24.0, on
a CPU), and nothing of this project. transformers builds the norms of the two latents with eps 1e-6,
whatever the config says: compare with `latent_norm_eps=1e-6`.

A selection (top-k keys, top experts, next token) is a fair test only where it is decided by more
than rounding, so a random checkpoint is redrawn until every margin is wide enough, and positions of
the real one are chosen by their margins.
"""

import argparse
import itertools
import json
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
GENERATED = 16

# Smallest allowed distance between the last selected and the first rejected candidate.
INDEX_MARGIN = 3e-4
ROUTER_MARGIN = 5e-4
TOKEN_MARGIN = 2e-2

COMMON = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "max_position_embeddings": 4096,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Not read by transformers, which computes as if they had these values; written to config.json.
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True)
class Recipe:
    """A random checkpoint: its sizes, and the first seed to try."""

    seed: int
    prompt_tokens: int
    sizes: dict


RECIPES = {
    # The real proportions in small: two dense layers, one group of experts.
    "tiny": Recipe(
        seed=0,
        prompt_tokens=48,
        sizes={
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 16,
            "num_attention_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 8,
            "v_head_dim": 32,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "index_topk": 16,
            "index_n_heads": 16,
            "index_head_dim": 32,
            "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4,
            "indexer_types": ["full", "full", "full", "shared", "full", "shared"],
        },
    ),
    # No two sizes alike and few powers of two: a swapped axis or a wrong width cannot hide.
    "odd": Recipe(
        seed=0,
        prompt_tokens=37,
        sizes={
            "vocab_size": 101,
            "hidden_size": 36,
            "intermediate_size": 52,
            "moe_intermediate_size": 14,
            "num_attention_heads": 3,
            "q_lora_rank": 22,
            "kv_lora_rank": 28,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 6,
            "v_head_dim": 18,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "index_topk": 11,
            "index_n_heads": 17,
            "index_head_dim": 20,
            "mlp_layer_types": ["dense"] + ["sparse"] * 5,
            "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        },
    ),
}


def build_config(sizes: dict) -> GlmMoeDsaConfig:
    return GlmMoeDsaConfig(
        **COMMON,
        **sizes,
        num_hidden_layers=len(sizes["indexer_types"]),
        num_key_value_heads=sizes["num_attention_heads"],
        first_k_dense_replace=sizes["mlp_layer_types"].count("dense"),
        dtype="bfloat16",
    )


class Weights:
    """Draws a checkpoint's tensors: bfloat16 values, non-default norms and biases."""

    def __init__(self, config: GlmMoeDsaConfig, seed: int):
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def linear(self, name: str, outputs: int, inputs: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = (
            self.normal(outputs, inputs) * gain * inputs**-0.5
        ).bfloat16()

    def norm(self, name: str, width: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + 0.25 * self.normal(width)).bfloat16()

    def draw(self) -> dict[str, torch.Tensor]:
        c = self.config
        self.tensors["model.embed_tokens.weight"] = self.normal(
            c.vocab_size, c.hidden_size
        ).bfloat16()
        for layer in range(c.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            self.norm(prefix + "input_layernorm", c.hidden_size)
            self.norm(prefix + "post_attention_layernorm", c.hidden_size)
            self.attention(prefix + "self_attn.")
            if c.indexer_types[layer] == "full":
                self.indexer(prefix + "self_attn.indexer.")
            if c.mlp_layer_types[layer] == "sparse":
                self.experts(prefix + "mlp.")
            else:
                self.mlp(prefix + "mlp.", c.intermediate_size)
        self.norm("model.norm", c.hidden_size)
        self.linear("lm_head", c.vocab_size, c.hidden_size, gain=1.5)
        return self.tensors

    def attention(self, prefix: str) -> None:
        c = self.config
        heads, latent = c.num_attention_heads, c.kv_lora_rank
        # Small latents, so that the eps of their norms can be seen in the logits.
        self.linear(prefix + "q_a_proj", c.q_lora_rank, c.hidden_size, gain=0.05)
        self.norm(prefix + "q_a_layernorm", c.q_lora_rank)
        self.linear(prefix + "q_b_proj", heads * c.qk_head_dim, c.q_lora_rank, gain=1.5)
        self.linear(prefix + "kv_a_proj_with_mqa", latent + c.qk_rope_head_dim, c.hidden_size)
        self.tensors[prefix + "kv_a_proj_with_mqa.weight"][:latent] *= 1 / 16
        self.norm(prefix + "kv_a_layernorm", latent)
        rows = heads * (c.qk_nope_head_dim + c.v_head_dim)
        self.linear(prefix + "kv_b_proj", rows, latent, gain=1.5)
        self.linear(prefix + "o_proj", c.hidden_size, heads * c.v_head_dim)

    def indexer(self, prefix: str) -> None:
        c = self.config
        self.linear(prefix + "wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
        self.linear(prefix + "wk", c.index_head_dim, c.hidden_size)
        self.norm(prefix + "k_norm", c.index_head_dim)
        self.tensors[prefix + "k_norm.bias"] = (0.3 * self.normal(c.index_head_dim)).bfloat16()
        self.linear(prefix + "weights_proj", c.index_n_heads, c.hidden_size)

    def experts(self, prefix: str) -> None:
        c = self.config
        # float32 and no bfloat16 values, so that rounding the router is noticed; the bias has a big
        # offset and a small spread like GLM-5.2's ([6.817, 7.063]).
        self.tensors[prefix + "gate.weight"] = (
            1.5 * self.normal(c.n_routed_experts, c.hidden_size) * c.hidden_size**-0.5
        )
        self.tensors[prefix + "gate.e_score_correction_bias"] = 7 + 0.1 * self.normal(
            c.n_routed_experts
        )
        for expert in range(c.n_routed_experts):
            self.mlp(f"{prefix}experts.{expert}.", c.moe_intermediate_size)
        self.mlp(prefix + "shared_experts.", c.moe_intermediate_size * c.n_shared_experts)

    def mlp(self, prefix: str, width: int) -> None:
        hidden = self.config.hidden_size
        self.linear(prefix + "gate_proj", width, hidden)
        self.linear(prefix + "up_proj", width, hidden)
        self.linear(prefix + "down_proj", hidden, width)


@dataclass
class Trace:
    """What one forward selected, per layer, and by how much.

    Attributes:
        selected: bool [T, T] (row, key) of each layer, causal.
        index_margin: float [T] of each full layer; inf where every key fits.
        router_margin: float [T] of each sparse layer.
    """

    selected: list[np.ndarray] = field(default_factory=list)
    index_margin: list[np.ndarray] = field(default_factory=list)
    router_margin: list[np.ndarray] = field(default_factory=list)


class TopkMargins(TorchFunctionMode):
    """Watches calls of topk and measures the distance between the k-th and the next value."""

    def __init__(self):
        super().__init__()
        self.margins: list[torch.Tensor] = []
        # The router's choices are the topk with sorted=False; its other one sums a group's best two
        # scores, which is continuous and decides nothing.
        self.unsorted_only = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            values = args[0]
            k = args[1] if len(args) > 1 else kwargs["k"]
            decides = kwargs.get("sorted") is False or not self.unsorted_only
            if k < values.shape[-1] and decides:
                ordered = values.sort(dim=-1, descending=True).values
                margin = ordered[..., k - 1] - ordered[..., k]
                # A masked rival (the mask is finfo.min, or -inf): nothing was decided.
                self.margins.append(margin.where(ordered[..., k] > -1e30, torch.inf).flatten())
        return func(*args, **kwargs)


@contextmanager
def traced(model: GlmMoeDsaForCausalLM) -> Iterator[Trace]:
    trace = Trace()
    watch = TopkMargins()

    def watch_module(module, _inputs):
        watch.margins.clear()
        watch.unsorted_only = not isinstance(module, GlmMoeDsaIndexer)

    def note_indexer(_module, _inputs, _output):
        (margin,) = watch.margins or [torch.tensor([torch.inf])]
        trace.index_margin.append(margin.numpy())

    def note_router(_module, _inputs, _output):
        # One group: no choice between groups was watched.
        trace.router_margin.append(torch.stack(watch.margins).min(dim=0).values.numpy())

    def note_attention(_module, _inputs, output):
        rows = output[2].shape[1]
        mask = torch.zeros(rows, rows, dtype=torch.bool)
        mask.scatter_(1, output[2][0].long(), True)
        trace.selected.append(mask.tril().numpy())

    handles = []
    for layer in model.model.layers:
        handles.append(layer.self_attn.register_forward_hook(note_attention))
        if layer.self_attn.indexer is not None:
            handles.append(layer.self_attn.indexer.register_forward_pre_hook(watch_module))
            handles.append(layer.self_attn.indexer.register_forward_hook(note_indexer))
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_pre_hook(watch_module))
            handles.append(layer.mlp.gate.register_forward_hook(note_router))
    try:
        with watch:
            yield trace
    finally:
        for handle in handles:
            handle.remove()


def load(folder: Path) -> GlmMoeDsaForCausalLM:
    model, info = GlmMoeDsaForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # the grouped one wants widths of 16 bytes
        output_loading_info=True,
    )
    problems = {key: sorted(names) for key, names in info.items() if names}
    assert not problems, f"transformers did not load the checkpoint as it is: {problems}"
    return model.eval()


@torch.no_grad()
def continue_and_trace(
    model: GlmMoeDsaForCausalLM, prompt: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, Trace]:
    """Return prompt plus greedy tokens, float32 logits of them all in one forward, and the trace."""
    tokens = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=GENERATED,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    with traced(model) as trace:
        logits = model(tokens, use_cache=False).logits[0]
    return tokens[0].numpy(), logits.numpy(), trace


def token_margin(logits: np.ndarray) -> np.ndarray:
    top = np.sort(logits, axis=-1)
    return top[..., -1] - top[..., -2]


def save_reference(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def make_random(name: str, recipe: Recipe) -> None:
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    config = build_config(recipe.sizes)
    config.architectures = ["GlmMoeDsaForCausalLM"]
    config.save_pretrained(folder)
    for seed in itertools.count(recipe.seed):
        weights = Weights(config, seed)
        safetensors.torch.save_file(
            weights.draw(), folder / "model.safetensors", metadata={"format": "pt"}
        )
        prompt = torch.randint(
            config.vocab_size, (recipe.prompt_tokens,), generator=weights.generator
        )
        tokens, logits, trace = continue_and_trace(load(folder), prompt)
        last = slice(recipe.prompt_tokens - 1, -1)
        margins = {
            "index": min(map(np.min, trace.index_margin)),
            "router": min(map(np.min, trace.router_margin)),
            "token": token_margin(logits[last]).min(),
        }
        print(name, "seed", seed, {key: f"{value:.1e}" for key, value in margins.items()})
        if (
            margins["index"] >= INDEX_MARGIN
            and margins["router"] >= ROUTER_MARGIN
            and margins["token"] >= TOKEN_MARGIN
        ):
            break
    assert (logits[last].argmax(-1) == tokens[recipe.prompt_tokens :]).all()
    save_reference(
        folder / "reference.npz",
        {
            "tokens": tokens.astype(np.int32),
            "prompt_tokens": np.int32(recipe.prompt_tokens),
            "logits": logits,
            "selected": np.packbits(np.stack(trace.selected), axis=-1),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedded", type=Path, help="checkpoint folder of the embedded model")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    for name, recipe in RECIPES.items():
        make_random(name, recipe)


if __name__ == "__main__":
    main()
