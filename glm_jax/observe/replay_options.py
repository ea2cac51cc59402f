"""The options of ``glm-jax replay``."""

import argparse
from pathlib import Path

DESCRIPTION = """
Runs the steps of a log again, from its first to the one asked for, in the same programs, and
compares every bit of their outputs, hidden rows included. The log must carry plans: --log-plans.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``replay``."""
    add = parser.add_argument
    add("log", type=Path, metavar="STEPLOG", help="file that --step-log wrote with --log-plans")
    add("--step", type=int, help="the step to look at (default: the last)")
