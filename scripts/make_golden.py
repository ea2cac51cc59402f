"""Makes the reference outputs of tests/golden/ with transformers' GlmMoeDsaForCausalLM.

    python -m scripts.make_golden                    # checkpoints tests/golden/{tiny,odd,mtp}
    python -m scripts.make_golden --embedded FOLDER  # tests/golden/embedded.npz of a checkpoint

Needs torch, transformers and tokenizers (made with torch 2.13.0 and transformers 5.24.0, on a CPU)
and neither JAX nor the product. transformers builds the norms of the two latents with eps 1e-6,
whatever the config says: compare with `latent_norm_eps=1e-6`.

A selection (top-k keys, top experts, next token) is a fair test only where it is decided by more
than rounding. So a random checkpoint is redrawn until every margin is wide enough; a real one has
thousands of selections and a few ties among them, whose outcome is stored.
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
from scripts.oracle.mtp import Mtp, load_mtp
from scripts.oracle.random_checkpoint import (
    MTP_RECIPE,
    RECIPES,
    Recipe,
    build_config,
    write_checkpoint,
)

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
GENERATED = 16
NUM_DRAFTS = 5
# Rows behind which the MTP layer drafts, counted from the last one of the prompt.
DRAFT_ROWS = (0, 3)

# Smallest allowed distance between the last selected and the first rejected candidate.
INDEX_MARGIN = 3e-4
ROUTER_MARGIN = 5e-4
TOKEN_MARGIN = 2e-2

# Files of the standard library of at least 1,500 tokens (the rest of a longer one is left out), in
# the order in which they are tried; only token ids are kept.
EMBEDDED_FILES = ("fnmatch.py", "copyreg.py", "sched.py", "linecache.py", "queue.py", "shlex.py")
EMBEDDED_TOKENS = (1500, 1720)
# A selection decided by less than this part of the row's best score is a tie: float32 sums of
# another order decide it otherwise, and one other key changes all later rows by up to 1e-2.
TIE = 1e-5
# The router has no ties in the files that are used.
EMBEDDED_ROUTER_MARGIN = 3e-6
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
    with traced(model.model.layers) as trace:
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


def make_mtp(recipe: Recipe) -> None:
    """As `make_random`, for a checkpoint with an MTP layer, and what that layer makes of it."""
    config = build_config(recipe.sizes)
    folder = GOLDEN / "mtp"
    for seed in itertools.count(recipe.seed):
        write_checkpoint(folder, config, seed)
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(config.vocab_size, (recipe.prompt_tokens,), generator=generator)
        model, mtp = load_mtp(folder)
        tokens, logits, trace = continue_and_trace(model, prompt)
        drafted, mtp_trace = draft_and_trace(model, mtp, tokens, recipe.prompt_tokens)
        reached = [token_margin(drafted[f"{kind}_logits"]).min() for kind in ("shared", "indexed")]
        margins = (
            min(map(np.min, trace.index_margin + mtp_trace.index_margin)),
            min(map(np.min, trace.router_margin + mtp_trace.router_margin)),
            min(token_margin(logits[recipe.prompt_tokens - 1 : -1]).min(), *reached),
        )
        print("mtp seed", seed, *(f"{margin:.1e}" for margin in margins))
        if np.greater_equal(margins, (INDEX_MARGIN, ROUTER_MARGIN, TOKEN_MARGIN)).all():
            reference = {
                "tokens": tokens.astype(np.int32),
                "prompt_tokens": np.array(recipe.prompt_tokens, np.int32),
                **drafted,
            }
            save(folder / "reference.npz", reference)
            return


@torch.no_grad()
def draft_and_trace(
    model: transformers.GlmMoeDsaForCausalLM, mtp: Mtp, tokens: np.ndarray, prompt_tokens: int
) -> tuple[dict[str, np.ndarray], Trace]:
    """Return the MTP layer's first pass over all tokens but the last, and drafts from some rows."""
    ids = torch.from_numpy(tokens)
    hidden = model.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
    rows = [prompt_tokens - 1 + row for row in DRAFT_ROWS]
    with traced([mtp.layer]) as trace:
        first = mtp.first_pass(hidden, ids[1:])
        drafts = {
            kind: [mtp.draft(first, row, NUM_DRAFTS, share=kind == "shared") for row in rows]
            for kind in ("shared", "indexed")
        }
    arrays = {
        "hidden": first.y.numpy(),
        "logits": mtp.head(first.y).numpy(),
        "selected": np.packbits(trace.selected[0], axis=-1),
        "draft_rows": np.array(rows, np.int32),
    }
    for kind, pairs in drafts.items():
        arrays[f"{kind}_drafts"] = np.array([tokens for tokens, _ in pairs], np.int32)
        arrays[f"{kind}_logits"] = np.stack([logits for _, logits in pairs])
    return arrays, trace


def make_embedded(folder: Path) -> None:
    """Run the real checkpoint, dequantised to float32, over two real files."""
    model = load_dequantised(folder)
    checkpoint = (folder / "model.safetensors").read_bytes()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    arrays = {"checkpoint_crc": np.array(zlib.crc32(checkpoint), np.uint32)}
    number = 0
    for name in EMBEDDED_FILES:
        text = (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: EMBEDDED_TOKENS[1]]
        assert len(ids) >= EMBEDDED_TOKENS[0], f"{name} has only {len(ids)} tokens"
        tokens, logits, trace = continue_and_trace(model, torch.tensor(ids))
        margins = (
            min(map(np.min, trace.router_margin)),
            token_margin(logits[len(ids) - 1 : -1]).min(),
        )
        print(name, len(ids), "tokens, margins", *(f"{margin:.1e}" for margin in margins))
        if np.greater_equal(margins, (EMBEDDED_ROUTER_MARGIN, TOKEN_MARGIN)).all():
            reference = compact_reference(model.config, tokens, len(ids), logits, trace)
            arrays |= {f"{key}_{number}": value for key, value in reference.items()}
            number += 1
        if number == 2:
            save(GOLDEN / "embedded.npz", arrays)
            return
    raise SystemExit("too few files have the margins; add some to EMBEDDED_FILES")


def compact_reference(
    config: transformers.GlmMoeDsaConfig,
    tokens: np.ndarray,
    prompt_tokens: int,
    logits: np.ndarray,
    trace: Trace,
) -> dict[str, np.ndarray]:
    """Return a few rows of logits whole, and of all rows the best token and what was selected."""
    full = [kind == "full" for kind in config.indexer_types]
    selected = np.stack(trace.selected)[full]
    tie_layer, tie_row = np.nonzero(np.stack(trace.index_relative) < TIE)
    assert len(tie_row) > 0
    print(f"{len(tie_row)} of {selected[:, :, 0].size} selections are ties, first {min(tie_row)}")
    topk, last, first_tie = config.index_topk, prompt_tokens - 1, int(min(tie_row))
    assert first_tie > topk + 2, "a tie comes too soon; leave this file out"
    # Both sides of index_topk, up to the first tie, and on to the end.
    near = [0, topk // 2, topk - 1, topk, topk + 1, first_tie - 1]
    far = np.linspace(first_tie, last, LOGIT_ROWS - len(near)).astype(np.int64)
    rows = np.concatenate([near, far])
    return {
        "tokens": tokens.astype(np.int32),
        "prompt_tokens": np.array(prompt_tokens, np.int32),
        "rows": rows.astype(np.int32),
        "logits": logits[rows],
        "best": logits.argmax(-1).astype(np.int32),
        "token_margin": token_margin(logits).astype(np.float16),
        "tie_layer": tie_layer.astype(np.int32),  # counted among the full layers
        "tie_row": tie_row.astype(np.int32),
        "tie_keys": np.stack(
            [np.flatnonzero(mask) for mask in selected[tie_layer, tie_row]]
        ).astype(np.uint16),
        "selected_crc": np.array(
            [[zlib.crc32(row.tobytes()) for row in layer] for layer in np.packbits(selected, -1)],
            np.uint32,
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
        make_mtp(MTP_RECIPE)


if __name__ == "__main__":
    main()
