"""The options of ``glm-jax ledger``."""

import argparse
from pathlib import Path

from glm_jax.ledger.hardware import HARDWARE, RATES
from glm_jax.model.presets import PRESETS

DESCRIPTION = """
Operations, bytes and the least time of every stage of a step, on the busiest device: of the step
itself and, if it is mixed, of its prefill rows and its decode rows alone. Arithmetic only. Times
are floors: no launches, no imbalance, nothing overlaps an exchange. Then the published account of
such a step with the right values, and notes on those that were published wrongly.
"""

_SIZES = (
    ("prefill", 8192, "prefill rows of one chunk"),
    ("prefix", 0, "tokens of its request that are in the cache already"),
    ("decode", 32, "requests that decode"),
    ("draft", 5, "drafts of each, verified in this step and made for the next"),
    ("context", 131072, "tokens of each"),
)
_FLAGS = (
    ("one-rank-chunks", "a chunk lives on one attention rank, its rows are not split"),
    ("flat-verify", "each verify row reads its request's index keys for itself"),
    ("fused-top-k", "index scores never reach memory"),
    ("formulas", "also print the formula of every stage"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ledger``."""
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="glm-5.3", help="model (default glm-5.3)")
    for name, default, meaning in _SIZES:
        add(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")
    add("--cell", metavar="P,G,Q", help="sizes of the program, of all devices; counts its pads")
    add("--layout", default="tp8ep8dp8", help="such as tp8ep8dp8 (the default), or one")
    add("--exchange", choices=("all_to_all", "gather"), default="all_to_all")
    add(
        "--hardware",
        choices=(*HARDWARE, "cpu"),
        default="h200",
        help="of each device (default h200); cpu probes this one for a second",
    )
    add("--rates", choices=RATES, default="attainable", help="(default attainable)")
    add("--weight-dtype", choices=("fp8", "bfloat16", "float32"), default="fp8")
    add("--kv-cache-dtype", choices=("fp8_ds_mla", "bfloat16", "float32"), default="fp8_ds_mla")
    for name, meaning in _FLAGS:
        add(f"--{name}", action="store_true", help=meaning)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object only")
    form.add_argument("--csv", action="store_true", help="print every stage as a line of CSV only")
    add("--png", type=Path, help="also draw the accounts into this file; needs matplotlib")
