"""What ``glm-jax ledger`` does."""

import argparse
import json
import sys
from dataclasses import replace

from rich.console import Console

from bucketing.cell import Cell
from glm_jax.ledger.accounts import Accounts, make_accounts
from glm_jax.ledger.figure import draw
from glm_jax.ledger.formats import make_formats
from glm_jax.ledger.hardware import HARDWARE, Hardware
from glm_jax.ledger.layout import Layout
from glm_jax.ledger.plain import as_csv, as_json
from glm_jax.ledger.probe import probe_cpu
from glm_jax.ledger.report import WIDTH, print_ledger
from glm_jax.ledger.shape import StepShape
from glm_jax.ledger.work import Method
from glm_jax.model.presets import PRESETS


def run(options: argparse.Namespace) -> int:
    """Work out the accounts and print them.

    Raises:
        ValueError: an option is out of range or does not go with the others.
    """
    accounts = _accounts(options)
    if options.json:
        Console(soft_wrap=True).print_json(json.dumps(as_json(accounts), allow_nan=False))
    elif options.csv:
        sys.stdout.write(as_csv(accounts))
    else:
        # A pipe has no width of its own.
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        print_ledger(console, accounts, formulas=options.formulas)
    if options.png is not None:
        draw(accounts, options.png)
        if not options.json and not options.csv:
            Console().print(f"drawn: {options.png}")
    return 0


def _accounts(options: argparse.Namespace) -> Accounts:
    config = PRESETS[options.preset]
    for name in ("prefill", "prefix", "decode", "draft"):
        if getattr(options, name) < 0:
            raise ValueError(f"{name} is {getattr(options, name)}; allowed: 0 or more.")
    most = config.max_position_embeddings
    if max(options.context, options.prefix + options.prefill) > most:
        raise ValueError(
            f"context is {options.context} and the chunk ends at "
            f"{options.prefix + options.prefill}, but the model's positions end at {most}."
        )
    shape = StepShape.of_load(
        prefill=options.prefill,
        prefix=options.prefix,
        decode=options.decode,
        drafts=options.draft,
        context=options.context,
    )
    if options.cell is not None:
        shape = replace(shape, cell=_cell(options.cell))
    layout = replace(
        Layout.parse(options.layout),
        split_chunks=not options.one_rank_chunks,
        exchange=options.exchange,
    )
    formats = make_formats(config, weights=options.weight_dtype, cache=options.kv_cache_dtype)
    return make_accounts(
        config,
        shape,
        formats=formats,
        hardware=_hardware(options),
        layout=layout,
        method=Method(not options.flat_verify, options.fused_top_k),
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    if options.hardware == "cpu":
        return probe_cpu()
    return HARDWARE[options.hardware][options.rates]


def _cell(text: str) -> Cell:
    try:
        prefill, groups, width = (int(size) for size in text.split(","))
    except ValueError:
        raise ValueError(
            f"cell is {text!r}; allowed: prefill rows, groups and rows a group, like 8192,32,6."
        ) from None
    return Cell(prefill, groups, width)
