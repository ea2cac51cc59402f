"""The options of ``glm-jax explain``."""

import argparse
from pathlib import Path

from glm_jax.ledger.hardware import HARDWARE, RATES
from glm_jax.observe.explanation import FACTOR

DESCRIPTION = """
Why tokens came late: every time between two tokens of a request that was much longer than a usual
decode step of its cell and context, divided among its causes in milliseconds, with what in the log
says so and what to do about it. Where prefill rows shared the step it says whether they are to
blame.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``explain``."""
    add = parser.add_argument
    add("log", type=Path, metavar="STEPLOG", help="file that --step-log wrote")
    add(
        "--factor",
        type=float,
        default=FACTOR,
        help=f"too long is beyond this multiple of the usual time (default {FACTOR})",
    )
    add("--most", type=int, default=10, help="spikes to show, the worst first (default 10)")
    add(
        "--floor",
        choices=(*HARDWARE, "cpu"),
        help="also show the ledger's least time of each step; cpu probes this one for a second",
    )
    add("--rates", choices=RATES, default="attainable", help="of --floor (default attainable)")
    add("--json", action="store_true", help="print one JSON object only, with all spikes")
