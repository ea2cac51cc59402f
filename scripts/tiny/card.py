"""The model card: README.md and the picture of the loss, from the log and the measurements."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

WINDOW = 20  # steps per point of the curves
CURVES = {
    "text": "next token, code",
    "recall": "recalled tokens",
    "mtp1": "draft 1",
    "mtp2": "draft 2",
    "mtp3": "draft 3",
    "kl": "indexer divergence",
    "guide": "guided heads",
}
SELECTION_NAMES = {
    "all": "all keys (dense)",
    "indexer": "256 by the indexer (shipped)",
    "recent": "control: last 256",
    "random": "control: random 256",
    "best": "best possible 256",
}


def draw_losses(path: Path, log: Sequence[dict[str, Any]]) -> None:
    """Draw every loss over trained tokens, phases shaded apart."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    for name, label in CURVES.items():
        points = [record for record in log if name in record]
        if name == "recall":
            points = [record for record in points if record["recalled"] > 0]
        tokens = smooth([record["tokens"] / 1e6 for record in points])
        if len(tokens):
            axes.plot(tokens, smooth([record[name] for record in points]), label=label, lw=1.2)
    for index, (name, start, end) in enumerate(phase_spans(log)):
        axes.axvspan(start / 1e6, end / 1e6, color="black", alpha=0.04 * (index % 2))
        axes.text((start + end) / 2e6, axes.get_ylim()[1] * 0.96, name, ha="center", va="top")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("nats per token")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Return means of WINDOW values in a row."""
    count = len(values) // WINDOW
    if not count:
        return np.array(values, float)
    return np.array(values[: count * WINDOW], float).reshape(count, WINDOW).mean(1)


def phase_spans(log: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (phase, first token, last token) in order."""
    spans: list[tuple[str, float, float]] = []
    for record in log:
        if not spans or spans[-1][0] != record["phase"]:
            start = spans[-1][2] if spans else 0.0
            spans.append((record["phase"], start, record["tokens"]))
        spans[-1] = (spans[-1][0], spans[-1][1], record["tokens"])
    return spans


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table; floats have three digits."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for row in rows:
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def context_table(measured: dict[str, Any]) -> str:
    """Bits per byte by context, with the shipped selection and with all keys."""
    return _text_table(measured, ("indexer", "all"), ("indexer", "all"), "bits_per_byte")


def control_table(measured: dict[str, Any]) -> str:
    """Loss of the four selections on text, behind the first 256 positions."""
    shown = ("indexer", "all", "recent", "random")
    return _text_table(measured, shown, ("recent",), "loss_beyond_topk")


def _text_table(
    measured: dict[str, Any], shown: Sequence[str], deciding: Sequence[str], value: str
) -> str:
    """One row for each split and selection, one column for each context of a deciding selection."""
    found = {
        (split, result["selection"], result["context"]): result[value]
        for split, results in measured["text"].items()
        for result in results
    }
    contexts = sorted({context for _, selection, context in found if selection in deciding})
    rows = [
        [split, SELECTION_NAMES[selection]]
        + [found.get((split, selection, context), "not measured") for context in contexts]
        for split in measured["text"]
        for selection in shown
    ]
    return table(["split", "attention sees", *map(str, contexts)], rows)


def needle_table(measured: dict[str, Any]) -> str:
    """Values recalled whole, by length and selection."""
    rows = [
        [
            result["length"],
            SELECTION_NAMES[result["selection"]],
            f"{100 * result['accuracy']:.1f} % of {result['facts']}",
            f"{100 * result['token_accuracy']:.1f} %",
            result["loss"],
        ]
        for result in measured["needles"]
    ]
    return table(["tokens", "attention sees", "whole values", "single tokens", "loss"], rows)


def mass_table(measured: dict[str, Any]) -> str:
    """Attention mass kept, layer by layer."""
    rows = [
        [SELECTION_NAMES[result["selection"]], *result["layers"]] for result in measured["mass"]
    ]
    return table(["256 keys", *[f"layer {i}" for i in range(len(rows[0]) - 1)]], rows)


def draft_table(measured: dict[str, Any]) -> str:
    """Agreement of drafts with the main model's choice, by depth."""
    rows = []
    for split in ("dev", "test"):
        for result in measured["drafts"][split]:
            cells = [f"{100 * d['rate']:.1f} % of {d['rows']}" for d in result["depths"]]
            rows.append([split, result["drafter"], *cells])
    return table(["split", "drafter", "depth 1", "depth 2", "depth 3"], rows)


def sample_text(measured: dict[str, Any]) -> str:
    """Prompts and their continuations, verbatim."""
    parts = []
    for sample in measured["samples"]:
        for kind in ("greedy", "sampled"):
            label = "greedy" if kind == "greedy" else "temperature 0.7"
            parts.append(f"Prompt and {label}:\n\n~~~\n{sample['prompt']}⟶{sample[kind]}\n~~~\n")
    return "\n".join(parts)


CARD = """\
---
license: psf-2.0
library_name: glm-jax
---
# glm-5.3-mini

A very small model with the architecture of GLM-5.3 (`glm_moe_dsa`): latent attention, lightning
indexer with shared selections, experts with a shared one, and an MTP layer. It exists so that
glm-jax runs and is tested on real weights. **It is not useful as a language model**: it writes
Python-shaped text, knows nothing, and copies simple facts from its context at best as well as the
table below says. It is not made by, derived from or endorsed by the makers of GLM.

| | |
| --- | --- |
| parameters | {parameters:,} ({main_parameters:,} without the MTP layer) |
| weights | block-FP8 (e4m3, 128 x 128), {bytes:,} bytes |
| layers | 8 (3 dense, 5 with experts) + 1 MTP; indexers in layers 0, 1, 2, 6 and the MTP layer |
| selection | 256 keys per query |
| trained tokens | {tokens:,} ({code_tokens:,} in the files, {share:.0%} of the rows synthetic) |
| phases | {phases} |
| time | {minutes:.0f} minutes on two shared CPU cores |
| text | standard library of Python {python_version} |
| files hash | `{files_hash}` |
| made with | `python scripts/train_tiny.py` |

Held out: {dev_files} library files (dev) and {test_files} of the library's unit tests (test; a kind
of text of which training saw none). The files hash is the SHA-256 of the sorted relative paths and
sizes. Synthetic rows teach recall: repeated lists, facts dropped in code and asked for later, small
JSON objects, copied lines, and short chats in a template of our own (`chat_template.jinja`).

![losses](loss.png)

The curves are of training rows (mean of {window} steps). A, R, S: 256 tokens, dense, with more and
more synthetic rows. G: 256 tokens; two heads each of layers 5, 6 and 7 are also taught by a loss
on their attention (look one and two tokens back; look at what followed here before), because no
copying had been learnt before. B: 1,024 tokens, the same, and the indexer learns to imitate dense
attention, and drafts are chained. C: attention sees the selection only, no teaching. D: 4,096
tokens. The mix of rows and their length change at each letter, so curves jump there.

## Bits per byte

All numbers below are of the shipped, quantised weights, computed in float32, no expert overflowing.
Every column scores the same {text_tokens:,} tokens, cut in pieces of that length. Lengths above
4,096 were never trained.

{context_table}

## Does the selection matter?

Loss in nats per token behind the first 256 positions of every piece. Where the last 256 keys are as
good as the indexer's, ordinary code does not need more than a window, and the row proves nothing
about the indexer.

{control_table}

Eight facts in the first nine tenths of a row of held-out code, one question for each at its end.
A value (in chats also the name) counts when all of its tokens are the model's first choice, the
ones before them given.

{needle_table}

Share of the dense model's attention (mean of heads, dev text, {mass_context} tokens, queries behind
the first 256) that 256 keys keep. Layers without an indexer use the selection of the layer before.

{mass_table}

## Drafts

How often a draft is what the main model would choose there, on held-out text. A depth is counted
only where the drafts before it are the text itself. The bigram drafter proposes the most frequent
successor in the training files.

{draft_table}

## Samples

Continuations of 48 tokens, not chosen.

{samples}
## What is weak

{weaknesses}

## Licence of the data

The training text is the Python standard library, under the PSF License Agreement. The synthetic
rows and the chat template are our own.
"""

WEAKNESSES = """\
- Language: syntax and idioms of Python, no sense. Greedy text falls into loops.
- Trained for minutes on one pass or so over ten megabytes; a single seed; the course of training
  was changed while it ran (phases R, S and G were added when copying did not come by itself).
- What reaches far are the copying heads of layers 6 and 7, which were taught where to look. In
  layers 0 to 3 attention is so even that the best 256 keys keep about half of it: there the
  selection loses mass, and the tables do not say whether that matters.
- The last phase saw few rows of 4,096 tokens (it was killed for memory once and went on from its
  start, with a budget four minutes shorter); lengths above that were never trained.
- Chat: greetings, repeating and looking up codes in the forms of the synthetic rows, nothing else.
- Drafts beyond the first were trained for a fifth of the time; in loops they look better than on
  text.
"""
