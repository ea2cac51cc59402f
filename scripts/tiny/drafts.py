"""Chained drafts of the MTP layer on its own tokens, and a bigram drafter to compare with."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from scripts.tiny.layers import rms_norm, rotation
from scripts.tiny.parameters import Parameters, layer_parameters
from scripts.tiny.shape import TinyShape
from scripts.tiny.transformer import Mode, decoder_layer, later_draft_layer, merge_draft_inputs


def draft_tokens(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array, " E"],
    hidden: Float[Array, "batch T D"],
    tokens: Int[Array, "batch T"],
    mode: Mode,
    *,
    steps: int,
) -> list[Int[Array, "batch T"]]:
    """Draft `steps` tokens behind every row, greedily, each from the ones before.

    `tokens` is the token behind each row: draft j (from 0) at row i stands at position i + 2 + j.
    """
    weights = layer_parameters(parameters, f"layers.{shape.num_hidden_layers}")
    drafts, first, recycled, last = [], None, hidden, tokens
    for step in range(steps):
        positions = jnp.arange(hidden.shape[1]) + step
        turn = rotation(positions, shape.qk_rope_head_dim, shape.rope_theta)
        merged = merge_draft_inputs(shape, parameters, last, recycled)
        if first is None:
            first = decoder_layer(shape, weights, bias, merged, turn, mode)
            x = first.x
        else:
            x = later_draft_layer(shape, weights, bias, merged, turn, mode, first)
        recycled = rms_norm(x, parameters["mtp.norm"], shape.rms_norm_eps)
        last = (recycled @ parameters["head"].T).argmax(-1).astype(jnp.int32)
        drafts.append(last)
    return drafts


def bigram_table(files: Sequence[Int[np.ndarray, " n"]], vocab_size: int) -> Int[np.ndarray, " V"]:
    """Return the most frequent successor of every token in the training files."""
    pairs = np.concatenate([file[:-1].astype(np.int64) * vocab_size + file[1:] for file in files])
    codes, counts = np.unique(pairs, return_counts=True)
    order = np.lexsort((counts, codes // vocab_size))
    table = np.zeros(vocab_size, np.int32)
    table[codes[order] // vocab_size] = codes[order] % vocab_size  # the last write is the largest
    return table


def agreement(
    drafts: Sequence[Int[np.ndarray, "batch T"]],
    tokens: Int[np.ndarray, "batch T_plus"],
    choices: Int[np.ndarray, "batch T"],
) -> list[dict[str, float]]:
    """Return, by depth, how often a draft is the main model's own choice there.

    Depth d is counted at rows whose drafts before d are the text itself, so that the main model
    has judged the same prefix. `choices[b, i]` is the main model's argmax behind row i. The last
    rows, whose drafts reach beyond the text, do not count.
    """
    rows = choices.shape[1] - len(drafts)
    kept = np.ones((len(choices), rows), bool)
    result = []
    for depth, draft in enumerate(drafts, start=1):
        drafted = draft[:, :rows]
        hits = (drafted == choices[:, depth : depth + rows]) & kept
        result.append({"rate": float(hits.sum() / max(kept.sum(), 1)), "rows": int(kept.sum())})
        kept = kept & (drafted == tokens[:, depth + 1 : depth + 1 + rows])
    return result
