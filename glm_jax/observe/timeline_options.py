"""The options of ``glm-jax trace``."""

import argparse
from pathlib import Path

DEFAULT_OUTPUT = Path("trace.json")
DESCRIPTION = """
A step log as a timeline. The JSON is for ui.perfetto.dev or Chrome: steps with their phases,
every request with its waits, chunks and decode steps, rows, drafts, requests and pages as curves,
programs while they were compiled. The picture and the page show four signals on one time axis:
rows of prompts and of decodes, times between tokens, how busy the device was, FULL and PIECEWISE
steps; mixed steps are shaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``trace``."""
    add = parser.add_argument
    add("log", type=Path, metavar="STEPLOG", help="file that --step-log wrote")
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"the JSON (default {DEFAULT_OUTPUT}, unless --html or --png is given)",
    )
    add(
        "--html", type=Path, metavar="FILE", help="a page with picture and sums, complete in itself"
    )
    add("--png", type=Path, metavar="FILE", help="the picture; this and the page need matplotlib")
