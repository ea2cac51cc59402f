"""Makes the reference outputs of tests/golden/ with transformers' GlmMoeDsaForCausalLM.

    python -m scripts.make_golden                    # random checkpoints tests/golden/{tiny,odd}
    python -m scripts.make_golden --embedded FOLDER  # tests/golden/embedded.npz of a checkpoint

Needs torch, transformers and tokenizers (made with torch 2.13.0 and transformers 5.24.0, on a CPU)
and neither JAX nor the product. transformers builds the norms of the two latents with eps 1e-6,
whatever the config says: compare with `latent_norm_eps=1e-6`.

A selection (top-k keys, top experts, next token) is a fair test only where it is decided by more
than rounding, so a random checkpoint is redrawn until every margin is wide enough, and for the real
one the margin of every row is stored beside what it selected.
"""

import argparse
import itertools
import sysconfig
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from scripts.oracle.model import Trace, load, load_dequantised, traced
from scripts.oracle.random_checkpoint import RECIPES, Recipe, build_config, write_checkpoint

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
GENERATED = 16

# Smallest allowed distance between the last selected and the first rejected candidate.
INDEX_MARGIN = 3e-4
ROUTER_MARGIN = 5e-4
TOKEN_MARGIN = 2e-2

# Files of the standard library of at least 1,500 tokens; only their token ids are kept.
EMBEDDED_FILES = ("sched.py", "fnmatch.py")
EMBEDDED_TOKENS = (1500, 2048)
# Rows whose logits are kept whole.
LOGIT_ROWS = 12


@torch.no_grad()
def continue_and_trace(
    model: transformers.GlmMoeDsaForCausalLM, prompt: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, Trace]:
    """Return prompt plus greedy tokens, float32 logits of them all in one forward, the trace."""
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
    greedy = logits[len(prompt) - 1 : -1].argmax(-1)
    assert torch.equal(greedy, tokens[0, len(prompt) :]), "cached and one-shot greedy tokens differ"
    return tokens[0].numpy(), logits.numpy(), trace


def token_margin(logits: np.ndarray) -> np.ndarray:
    """Return the distance between the best two logits of each row."""
    top = np.partition(logits, -2, axis=-1)
    return top[..., -1] - top[..., -2]


def save(path: Path, arrays: dict[str, Any]) -> None:
    """Write the arrays compressed."""
    np.savez_compressed(path, **arrays)
    print(f"{path.relative_to(GOLDEN)}: {path.stat().st_size:,} bytes")


def make_random(name: str, recipe: Recipe) -> None:
    """Draw checkpoints from the recipe's seed on, and keep the first with wide margins."""
    config = build_config(recipe.sizes)
    for seed in itertools.count(recipe.seed):
        write_checkpoint(GOLDEN / name, config, seed)
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(config.vocab_size, (recipe.prompt_tokens,), generator=generator)
        tokens, logits, trace = continue_and_trace(load(GOLDEN / name), prompt)
        margins = (
            min(map(np.min, trace.index_margin)),
            min(map(np.min, trace.router_margin)),
            token_margin(logits[recipe.prompt_tokens - 1 : -1]).min(),
        )
        print(name, "seed", seed, *(f"{margin:.1e}" for margin in margins))
        if np.greater_equal(margins, (INDEX_MARGIN, ROUTER_MARGIN, TOKEN_MARGIN)).all():
            reference = {
                "tokens": tokens.astype(np.int32),
                "prompt_tokens": np.array(recipe.prompt_tokens, np.int32),
                "logits": logits,
                "selected": np.packbits(np.stack(trace.selected), axis=-1),
            }
            save(GOLDEN / name / "reference.npz", reference)
            return


def make_embedded(folder: Path) -> None:
    """Run the real checkpoint, dequantised to float32, over two real files."""
    model = load_dequantised(folder)
    checkpoint = (folder / "model.safetensors").read_bytes()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    arrays = {"checkpoint_crc": np.array(zlib.crc32(checkpoint), np.uint32)}
    for number, name in enumerate(EMBEDDED_FILES):
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: EMBEDDED_TOKENS[1]]
        assert len(ids) >= EMBEDDED_TOKENS[0], f"{name} has only {len(ids)} tokens"
        tokens, logits, trace = continue_and_trace(model, torch.tensor(ids))
        reference = compact_reference(model.config, tokens, len(ids), logits, trace)
        arrays |= {f"{key}_{number}": value for key, value in reference.items()}
    save(GOLDEN / "embedded.npz", arrays)


def compact_reference(
    config: transformers.GlmMoeDsaConfig,
    tokens: np.ndarray,
    prompt_tokens: int,
    logits: np.ndarray,
    trace: Trace,
) -> dict[str, np.ndarray]:
    """Return a few rows of logits whole, and of all rows the best token and what was selected."""
    full = [kind == "full" for kind in config.indexer_types]
    selected = np.packbits(np.stack(trace.selected)[full], axis=-1)
    # Both sides of index_topk, the rows around it, and both ends.
    topk, last = config.index_topk, prompt_tokens - 1
    near = [0, 1, topk // 2, topk - 1, topk, topk + 1]
    far = np.linspace(topk + 2, last, LOGIT_ROWS - len(near)).astype(np.int64)
    rows = np.concatenate([near, far])
    margins = {
        "index": np.stack(trace.index_margin),
        "router": np.stack(trace.router_margin),
        "token": token_margin(logits),
    }
    for kind, margin in margins.items():
        print(
            kind,
            "margin:",
            *(f"{(margin < bound).mean():.2%} < {bound:.0e}" for bound in (1e-6, 1e-5, 1e-4, 1e-3)),
        )
    return {
        "tokens": tokens.astype(np.int32),
        "prompt_tokens": np.array(prompt_tokens, np.int32),
        "rows": rows.astype(np.int32),
        "logits": logits[rows],
        "best": logits.argmax(-1).astype(np.int32),
        "token_margin": margins["token"].astype(np.float16),
        "index_margin": margins["index"].astype(np.float16),
        "router_margin": margins["router"].astype(np.float16),
        "selected_crc": np.array(
            [[zlib.crc32(row.tobytes()) for row in layer] for layer in selected], np.uint32
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embedded", type=Path, help="checkpoint folder of the embedded model")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    if arguments.embedded:
        make_embedded(arguments.embedded)
    else:
        for name, recipe in RECIPES.items():
            make_random(name, recipe)


if __name__ == "__main__":
    main()
