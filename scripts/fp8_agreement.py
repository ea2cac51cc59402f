"""Greedy tokens with FP8 weights and an FP8 cache beside float32, and how fast each decodes.

    python -m scripts.fp8_agreement [--model FOLDER] [--prompts 50] [--tokens 64] [--json FILE]

Prompts are the beginnings of files that the embedded model was not trained on: the standard
library's own tests. All forms generate for the same prompts, a batch at a time, in turn, so that a
busy moment of the machine meets all. For each form: how many outputs equal float32's to the end,
how many tokens equal those at the same place, where outputs differ first, and how close the
decision was there (gap of float32's two best logits). What follows a first difference answers
another text.

The embedded model is published in block FP8. Held so, its weights are the same numbers as float32
made of them, and only the order of sums differs; the checkpoint of another model (--model) shows
what quantising does, if it is a plain one.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from glm_jax import LLM, SamplingParams, Tokenizer
from glm_jax.model_files import find_model
from scripts.bench_generate import Generated, rates_of
from scripts.decision_margins import decisions
from scripts.tiny.corpus import read_corpus

REFERENCE = "float32"
FORMS = {
    REFERENCE: {"weight_dtype": "float32", "kv_cache_dtype": "float32"},
    "fp8 weights": {"weight_dtype": "fp8", "kv_cache_dtype": "float32"},
    "fp8_ds_mla cache": {"weight_dtype": "float32", "kv_cache_dtype": "fp8_ds_mla"},
    "both": {"weight_dtype": "fp8", "kv_cache_dtype": "fp8_ds_mla"},
}
BATCH, CHUNK = 8, 512
# Columns of the printed table, wherever it is printed to.
WIDTH = 120


class Agreement(NamedTuple):
    """How one form's outputs compare with the reference's.

    Attributes:
        identical: share of outputs that are equal to the end.
        tokens: share of tokens that are equal at the same place.
        first: place of the first difference of every output that has one.
        margins: gap of the reference's two best logits at each of these.
    """

    identical: float
    tokens: float
    first: list[int]
    margins: list[float]


def read_prompts(folder: Path, count: int, length: int) -> list[list[int]]:
    """The first ``length`` tokens of ``count`` held-out files.

    Raises:
        ValueError: there are not so many files that long.
    """
    tokenizer = Tokenizer.from_path(folder)
    # A token has a byte at least; most files are far longer.
    texts = (text[: 16 * length] for text in read_corpus().test)
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    prompts = [ids[:length] for ids in encoded if len(ids) >= length][:count]
    if len(prompts) < count:
        raise ValueError(
            f"this Python's library has {len(prompts)} test files of {length} tokens, fewer than "
            f"{count}. Lower --prompts or --length, or install the library's tests."
        )
    return prompts


def start(folder: Path, form: Mapping[str, Any], length: int) -> LLM:
    """A model with one bucket of prompt rows and one of decode rows, compiled."""
    return LLM(
        folder,
        **form,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=BATCH,
        max_num_batched_tokens=CHUNK,
        prefill_buckets=(CHUNK,),
        group_buckets=(BATCH,),
        grid_warm="all",
    )


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Generated:
    """Greedy tokens and when each was there, in seconds."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    generated = Generated([[] for _ in prompts], [[] for _ in prompts])
    begun = time.perf_counter()
    for index, delta in llm.stream(prompts, params):
        generated.tokens[index] += delta.token_ids
        generated.times[index] += [time.perf_counter() - begun] * len(delta.token_ids)
    return generated


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place at which two outputs of one length differ."""
    differing = (
        place for place, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1
    )
    return next(differing, None)


def agreement(
    reference: list[list[int]], found: list[list[int]], margins: dict[tuple[int, int], float]
) -> Agreement:
    """Compare outputs; ``margins`` has the reference's by prompt and place."""
    first = [first_difference(*pair) for pair in zip(reference, found, strict=True)]
    differing = {prompt: place for prompt, place in enumerate(first) if place is not None}
    equal = [
        one == other
        for pair in zip(reference, found, strict=True)
        for one, other in zip(*pair, strict=True)
    ]
    return Agreement(
        identical=1 - len(differing) / len(reference),
        tokens=statistics.fmean(equal),
        first=list(differing.values()),
        margins=[margins[item] for item in differing.items()],
    )


def margins_of(
    llm: LLM, prompts: list[list[int]], outputs: dict[str, list[list[int]]]
) -> dict[tuple[int, int], float]:
    """The reference's decision margins at every place where another form differs first."""
    reference, params = outputs[REFERENCE], SamplingParams(temperature=0)
    places: dict[int, set[int]] = {}
    for found in outputs.values():
        for prompt, pair in enumerate(zip(reference, found, strict=True)):
            place = first_difference(*pair)
            if place is not None:
                places.setdefault(prompt, set()).add(place)
    margins = {}
    for prompt, wanted in places.items():
        made = decisions(llm, prompts[prompt], reference[prompt], params)
        margins |= {(prompt, place): made[place].margin for place in wanted}
    return margins


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generate with every form and compare."""
    console = Console(stderr=True)
    found = find_model(arguments.model)
    if found.folder is None:
        raise ValueError(f"{found.name} has no checkpoint folder; pass one with --model")
    prompts = read_prompts(found.folder, arguments.prompts, arguments.length)
    llms = {}
    for name, form in FORMS.items():
        console.print(f"loading and compiling: {name}")
        llms[name] = start(found.folder, form, arguments.length + arguments.tokens)
        generate(llms[name], prompts[:BATCH], 4)  # warms up
    outputs: dict[str, list[list[int]]] = {name: [] for name in FORMS}
    speeds: dict[str, list[float]] = {name: [] for name in FORMS}
    for turn, begin in enumerate(range(0, len(prompts), BATCH)):
        batch, names = prompts[begin : begin + BATCH], list(FORMS)
        console.print(f"prompts {begin} to {begin + len(batch) - 1} of {len(prompts)}")
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            generated = generate(llms[name], batch, arguments.tokens)
            outputs[name] += generated.tokens
            if len(batch) == BATCH:
                speeds[name].append(rates_of(batch, generated)["decode"])
    margins = margins_of(llms[REFERENCE], prompts, outputs)
    return {
        "model": found.name,
        "stored_in_fp8": found.fp8,
        "prompts": len(prompts),
        "prompt_tokens": arguments.length,
        "new_tokens": arguments.tokens,
        "batch": BATCH,
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "forms": {
            name: {
                **agreement(outputs[REFERENCE], outputs[name], margins)._asdict(),
                "weight_bytes": llms[name].runner.lowering.weight_bytes,
                "page_bytes": llms[name].runner.lowering.page_bytes,
                "decode_tokens_per_second": speeds[name],
            }
            for name in FORMS
        },
    }


def show(report: dict[str, Any]) -> None:
    """Print one line per form."""
    console = Console(width=WIDTH)
    console.print({key: value for key, value in report.items() if key != "forms"})
    table = Table(box=None)
    for heading in ("", "identical", "tokens equal", "first difference", "margin there"):
        table.add_column(heading)
    for heading in ("weights MB", "page KiB", f"decode tok/s, batch {report['batch']}"):
        table.add_column(heading, justify="right")
    for name, form in report["forms"].items():
        rates = form["decode_tokens_per_second"]
        table.add_row(
            name,
            f"{form['identical']:.0%}",
            f"{form['tokens']:.1%}",
            _spread(form["first"], "{:.0f}"),
            _spread(form["margins"], "{:.1e}"),
            f"{form['weight_bytes'] / 1e6:.1f}",
            f"{form['page_bytes'] / 1024:.0f}",
            _spread(rates, "{:.0f}"),
        )
    console.print(table)


def _spread(values: Sequence[float], form: str) -> str:
    """Median, and the least and the largest in brackets."""
    if not values:
        return "-"
    middle, least, most = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({least} to {most})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder; the embedded model without it")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--length", type=int, default=320, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each")
    parser.add_argument("--json", type=Path, help="also write the report here")
    arguments = parser.parse_args()
    try:
        report = run(arguments)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
