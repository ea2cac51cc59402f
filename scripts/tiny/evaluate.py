"""Measures the shipped weights on held-out text; returns plain numbers for the card."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tokenizers import Tokenizer

from scripts.tiny.attention import MASKED
from scripts.tiny.drafts import agreement, bigram_table, draft_tokens
from scripts.tiny.indexer import (
    index_scores,
    random_keys,
    recent_keys,
    select_above_threshold,
)
from scripts.tiny.loss import token_losses
from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape
from scripts.tiny.synthetic import RECALL, RowMaker, join, make_fact
from scripts.tiny.transformer import IndexGroup, Mode, Selection, run_trunk
from scripts.tiny.words import random_words

SELECTIONS: tuple[Selection, ...] = ("indexer", "all", "recent", "random")
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
CONTROL_CONTEXTS = (1024, 4096)
LONGEST_DENSE = 8192
NEEDLE_ROWS = {1024: 8, 2048: 8, 4096: 4}
NEEDLE_FACTS = 8
DRAFT_DEPTH = 3
MASS_STRIDE = 32
# Rows per forward pass are chosen to keep about this many tokens in it.
TOKENS_PER_PASS = 4096
# Room of an expert over its fair share at first; a pass that drops a row is done again exactly.
FIRST_CAPACITY = 2.0


class Model(NamedTuple):
    """The weights that are measured."""

    shape: TinyShape
    parameters: Parameters
    bias: Float[Array | np.ndarray, "sparse E"]


class Pass(NamedTuple):
    """What a forward pass says; `drop` is the share of expert choices that found no room."""

    losses: Float[Array, "batch T"]
    choices: Int[Array, "batch T"]
    hidden: Float[Array, "batch T D"]
    drop: Float[Array, ""]


class Scores(NamedTuple):
    """What a pass says about every next token."""

    losses: Float[np.ndarray, "rows T"]
    choices: Int[np.ndarray, "rows T"]


def evaluation_mode(
    shape: TinyShape, selection: Selection, count: int, stride: int | None = None
) -> Mode:
    """Return a mode in which no expert drops a row."""
    capacity = shape.n_routed_experts / shape.num_experts_per_tok
    block = 256 if count <= 4096 else 512
    return Mode(selection=selection, row_stride=stride, block=block, capacity=capacity)


@functools.partial(jax.jit, static_argnums=(0, 4))
def score_pass(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array | np.ndarray, "sparse E"],
    tokens: Int[Array | np.ndarray, "batch T_plus"],
    mode: Mode,
) -> Pass:
    """Score the next tokens of a few rows."""
    rows = jnp.asarray(tokens)
    trunk = run_trunk(shape, parameters, jnp.asarray(bias), rows[:, :-1], mode)
    losses = token_losses(parameters["head"], trunk.hidden, rows[:, 1:])
    choices = (trunk.hidden @ parameters["head"].T).argmax(-1)
    return Pass(losses, choices.astype(jnp.int32), trunk.hidden, trunk.drop)


def score_exactly(
    model: Model, tokens: Int[np.ndarray, "batch T_plus"], selection: Selection
) -> Pass:
    """Score a few rows with no expert dropping any."""
    exact = evaluation_mode(model.shape, selection, tokens.shape[1] - 1)
    quick = dataclasses.replace(exact, capacity=FIRST_CAPACITY)
    result = score_pass(*model, tokens, quick)
    return result if float(result.drop) == 0 else score_pass(*model, tokens, exact)


def score_rows(model: Model, rows: Int[np.ndarray, "rows T_plus"], selection: Selection) -> Scores:
    """Score every next token of rows of one length."""
    count = rows.shape[1] - 1
    size = max(1, min(len(rows), TOKENS_PER_PASS // count))
    losses, choices = [], []
    for start in range(0, len(rows) - size + 1, size):
        result = score_exactly(model, rows[start : start + size], selection)
        losses.append(np.asarray(result.losses))
        choices.append(np.asarray(result.choices))
    return Scores(np.concatenate(losses), np.concatenate(choices))


def cut_rows(text: Int[np.ndarray, " n"], count: int) -> Int[np.ndarray, "rows T_plus"]:
    """Cut a text in rows of `count` scored tokens; each begins with the last one's last token."""
    starts = range(0, len(text) - count, count)
    return np.stack([text[start : start + count + 1] for start in starts])


def bits_per_byte(tokenizer: Tokenizer, scores: Scores, rows: Int[np.ndarray, "rows T"]) -> float:
    """Return the information of the scored tokens over the bytes of their text."""
    scored = rows[: len(scores.losses), 1:]
    size = sum(len(tokenizer.decode(row.tolist()).encode()) for row in scored)
    return float(scores.losses.sum() / math.log(2) / size)


def measure_text(
    model: Model,
    tokenizer: Tokenizer,
    text: Int[np.ndarray, " n"],
    contexts: Sequence[int],
    selections: Sequence[Selection],
) -> list[dict[str, Any]]:
    """Score one text cut at several lengths; every length sees the same tokens."""
    results = []
    for context in contexts:
        rows = cut_rows(text, context)
        for selection in selections:
            scores = score_rows(model, rows, selection)
            far = scores.losses[:, model.shape.index_topk :]
            results.append(
                {
                    "context": context,
                    "selection": selection,
                    "tokens": scores.losses.size,
                    "loss": float(scores.losses.mean()),
                    "loss_beyond_topk": float(far.mean()),
                    "bits_per_byte": bits_per_byte(tokenizer, scores, rows),
                    "top1": float((scores.choices == rows[: len(scores.losses), 1:]).mean()),
                }
            )
    return results


def needle_rows(
    maker: RowMaker, count: int, length: int, seed: int
) -> tuple[Int[np.ndarray, "rows T_plus"], Float[np.ndarray, "rows T_plus"]]:
    """Make rows with facts in the first nine tenths and a question for each at the end."""
    rng = np.random.default_rng([seed, length])
    rows = []
    for index in range(count):
        names: dict[str, None] = {}
        while len(names) < NEEDLE_FACTS:
            names[random_words(rng, 1)] = None
        facts = [make_fact(rng, name, index % 3) for name in names]
        recalls = [maker.pieces(*fact.recall) for fact in facts]
        order = rng.permutation(NEEDLE_FACTS)
        tail = join([recalls[i] for i in order])
        told = [(rng.uniform(0, 1), maker.pieces(*fact.statement)) for fact in facts]
        head_length = length + 1 - len(tail.tokens)
        head = maker.spread(rng, told, head_length)
        missing = head_length - len(head.tokens)
        parts = [head, maker.filler(rng, missing), tail] if missing > 0 else [head, tail]
        row = join(parts)
        rows.append((row.tokens[-length - 1 :], row.weights[-length - 1 :]))
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def measure_needles(model: Model, maker: RowMaker, seed: int = 7) -> list[dict[str, Any]]:
    """Return how many values are recalled whole, by length and selection."""
    results = []
    for length, count in NEEDLE_ROWS.items():
        tokens, weights = needle_rows(maker, count, length, seed)
        recall = weights[:, 1:] == RECALL
        for selection in SELECTIONS:
            scores = score_rows(model, tokens, selection)
            hit = scores.choices == tokens[:, 1:]
            whole = [w for row in range(count) for w in _whole_spans(recall[row], hit[row])]
            results.append(
                {
                    "length": length,
                    "selection": selection,
                    "facts": len(whole),
                    "accuracy": float(np.mean(whole)),
                    "token_accuracy": float(hit[recall].mean()),
                    "loss": float(scores.losses[recall].mean()),
                }
            )
    return results


def _whole_spans(recall: np.ndarray, hit: np.ndarray) -> list[bool]:
    """Return, for every run of recalled tokens, whether all were hit."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], recall.astype(int), [0]])))
    return [bool(hit[a:b].all()) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _groups(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array, "sparse E"],
    tokens: Int[Array, "batch T"],
    mode: Mode,
) -> tuple[IndexGroup, ...]:
    return run_trunk(shape, parameters, bias, tokens, mode).groups


def measure_mass(
    model: Model, text: Int[np.ndarray, " n"], context: int, rows: int = 4
) -> list[dict[str, Any]]:
    """Return the share of dense attention (mean of heads) that 256 keys keep, layer by layer.

    Only queries beyond index_topk count. "best" are the keys with the most mass in that layer.
    """
    shape = model.shape
    tokens = cut_rows(text, context)[:rows, :-1]
    mode = evaluation_mode(shape, "all", context, MASS_STRIDE)
    kept: dict[str, list[float]] = {"indexer": [], "recent": [], "random": [], "best": []}
    positions = np.arange(MASS_STRIDE - 1, context, MASS_STRIDE)
    late = positions >= shape.index_topk
    for group in _groups(shape, model.parameters, model.bias, tokens, mode):
        causal = positions[:, None] >= np.arange(context)
        scores = jnp.where(causal, index_scores(group.inputs), MASKED)
        masks = {
            "indexer": select_above_threshold(scores, shape.index_topk),
            "recent": recent_keys(context, shape.index_topk)[:, positions],
            "random": random_keys(context, shape.index_topk, 0)[:, positions],
        }
        for attention in group.attention:
            masks["best"] = select_above_threshold(attention, shape.index_topk)
            for name, mask in masks.items():
                mass = jnp.where(mask & causal, attention, 0).sum(-1)
                kept[name].append(float(mass[:, late].mean()))
    return [{"selection": name, "layers": values} for name, values in kept.items()]


@functools.partial(jax.jit, static_argnums=(0, 5))
def _draft(
    shape: TinyShape,
    parameters: Parameters,
    bias: Float[Array, "sparse E"],
    hidden: Float[Array, "batch T D"],
    tokens: Int[Array, "batch T"],
    mode: Mode,
) -> list[Int[Array, "batch T"]]:
    return draft_tokens(shape, parameters, bias[-1], hidden, tokens, mode, steps=DRAFT_DEPTH)


def measure_drafts(
    model: Model, text: Int[np.ndarray, " n"], files: Sequence[Int[np.ndarray, " n"]], context: int
) -> list[dict[str, Any]]:
    """Compare MTP drafts and bigram drafts with the main model's choices, by depth."""
    rows = cut_rows(text, context)
    size = max(1, min(len(rows), TOKENS_PER_PASS // context))
    rows = rows[: len(rows) // size * size]
    mode = evaluation_mode(model.shape, "indexer", context)
    drafts, choices = [], []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        result = score_exactly(model, part, "indexer")
        chain = _draft(*model, result.hidden, part[:, 1:], mode)
        drafts.append([np.asarray(draft) for draft in chain])
        choices.append(np.asarray(result.choices))
    chosen = np.concatenate(choices)
    chains = [np.concatenate(parts) for parts in zip(*drafts, strict=True)]
    table = bigram_table(files, model.shape.vocab_size)
    bigrams, last = [], rows[:, 1:]
    for _ in range(DRAFT_DEPTH):
        last = table[last]
        bigrams.append(last)
    return [
        {"drafter": "mtp", "depths": agreement(chains, rows, chosen)},
        {"drafter": "bigram", "depths": agreement(bigrams, rows, chosen)},
    ]
