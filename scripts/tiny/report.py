"""Runs all measurements of a shipped model and writes its card."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from scripts.tiny.card import (
    CARD,
    WEAKNESSES,
    WINDOW,
    context_table,
    control_table,
    draft_table,
    draw_losses,
    mass_table,
    needle_table,
    sample_text,
)
from scripts.tiny.checkpoint import CHECKPOINT, load_checkpoint
from scripts.tiny.corpus import Corpus
from scripts.tiny.evaluate import (
    CONTEXTS,
    CONTROL_CONTEXTS,
    LONGEST_DENSE,
    SELECTIONS,
    Model,
    measure_drafts,
    measure_mass,
    measure_needles,
    measure_text,
)
from scripts.tiny.export import load_model
from scripts.tiny.generate import sample_texts
from scripts.tiny.phases import PHASES
from scripts.tiny.synthetic import RowMaker
from scripts.tiny.tokenizer import encode_files, format_turn
from scripts.tiny.transformer import Selection

TEXT_TOKENS = 16384
MASS_CONTEXT = 2048
DRAFT_CONTEXT = 1024
PROMPTS = (
    "def read_file(path):\n",
    "import os\nimport sys\n\nclass ",
    "for index, item in enumerate(",
    '"""Utilities for',
    format_turn("user", "Who are you?") + "<|assistant|>",
    format_turn("user", "The code of harbor is 4172.")
    + format_turn("assistant", "Noted.")
    + format_turn("user", "What is the code of harbor?")
    + "<|assistant|>",
)


@dataclasses.dataclass
class Measurement:
    """Measures one model, part by part, keeping what is done in a file.

    Attributes:
        model: the weights.
        tokenizer: their tokenizer.
        corpus: the text they were trained and are measured on.
        path: JSON file of the results; parts that it already holds are not measured again.
        report: called with a line after each part.
    """

    model: Model
    tokenizer: Tokenizer
    corpus: Corpus
    path: Path
    report: Callable[[str], None] = print

    def run(self) -> dict[str, Any]:
        """Measure everything and return it."""
        train = encode_files(self.tokenizer, self.corpus.train)
        splits = {
            "dev": np.concatenate(encode_files(self.tokenizer, self.corpus.dev)),
            "test": np.concatenate(encode_files(self.tokenizer, self.corpus.test)),
        }
        maker = RowMaker(self.tokenizer, splits["dev"])
        model = self.model
        parts: dict[str, Callable[[], Any]] = {
            "samples": lambda: sample_texts(*model, self.tokenizer, PROMPTS),
            "needles": lambda: measure_needles(model, maker),
            "mass": lambda: measure_mass(model, splits["dev"], MASS_CONTEXT),
        }
        for name, text in splits.items():
            part = text[: TEXT_TOKENS + 1]
            parts[f"drafts {name}"] = partial(measure_drafts, model, part, train, DRAFT_CONTEXT)
            for context in CONTEXTS:
                selections = selections_at(context)
                parts[f"text {name} {context}"] = partial(
                    measure_text, model, self.tokenizer, part, (context,), selections
                )
        results = json.loads(self.path.read_text()) if self.path.exists() else {}
        for name, measure in parts.items():
            if name not in results:
                results[name] = measure()
                self.path.write_text(json.dumps(results, indent=1))
                self.report(f"measured: {name}")
        return _by_split(results, tuple(splits))


def selections_at(context: int) -> tuple[Selection, ...]:
    """Return what attention sees in the measurements at a context, the shipped selection first."""
    if context in CONTROL_CONTEXTS:
        return SELECTIONS
    return SELECTIONS[:2] if context <= LONGEST_DENSE else SELECTIONS[:1]


def _by_split(results: dict[str, Any], splits: tuple[str, ...]) -> dict[str, Any]:
    """Gather the parts of the text: {"text": {split: results}, "drafts": {split: results}, ...}."""
    texts = {
        split: [
            row for name in results if name.startswith(f"text {split} ") for row in results[name]
        ]
        for split in splits
    }
    drafts = {split: results[f"drafts {split}"] for split in splits}
    return results | {"text": texts, "drafts": drafts}


def evaluate_model(
    folder: Path, run: Path, corpus: Corpus, report: Callable[[str], None] = print
) -> None:
    """Measure the model in `folder`, trained in `run`, and write README.md and loss.png."""
    shape, _, progress = load_checkpoint(run / CHECKPOINT)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    parameters, bias = load_model(folder, shape)
    measurement = Measurement(
        Model(shape, parameters, bias), tokenizer, corpus, run / "evaluation.json", report
    )
    measured = measurement.run()
    draw_losses(folder / "loss.png", progress.log)
    counts = {name: value.size for name, value in parameters.items()}
    draft_only = (f"layers.{shape.num_hidden_layers}.", "mtp.")
    main = sum(size for name, size in counts.items() if not name.startswith(draft_only))
    rows = {phase.name: 0 for phase in PHASES}
    for record in progress.log:
        rows[record["phase"]] += 1
    phases = ", ".join(
        f"{phase.name}: {rows[phase.name]} steps of {phase.rows} x {phase.length}"
        for phase in PHASES
        if rows[phase.name]
    )
    sampled = sum(rows[phase.name] * phase.rows * phase.synthetic_share for phase in PHASES)
    text = CARD.format(
        parameters=sum(counts.values()) + bias.size,
        main_parameters=main + bias[:-1].size,
        bytes=(folder / "model.safetensors").stat().st_size,
        tokens=progress.tokens,
        code_tokens=sum(map(len, encode_files(tokenizer, corpus.train))),
        share=sampled / sum(rows[phase.name] * phase.rows for phase in PHASES),
        phases=phases,
        minutes=progress.elapsed / 60,
        python_version=corpus.python_version,
        files_hash=corpus.files_hash,
        dev_files=len(corpus.dev),
        test_files=len(corpus.test),
        window=WINDOW,
        text_tokens=TEXT_TOKENS,
        mass_context=MASS_CONTEXT,
        context_table=context_table(measured),
        control_table=control_table(measured),
        needle_table=needle_table(measured),
        mass_table=mass_table(measured),
        draft_table=draft_table(measured),
        samples=sample_text(measured),
        weaknesses=WEAKNESSES,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
