"""What ``glm-jax explain`` does."""

import argparse
import json
import sys

from rich.console import Console

from glm_jax.ledger.hardware import HARDWARE
from glm_jax.ledger.probe import probe_cpu
from glm_jax.observe.explanation import explain
from glm_jax.observe.floor import StepFloor
from glm_jax.observe.report import as_json, print_explanation
from glm_jax.observe.step_log import StepLogFile, read_step_log

# A pipe has no width of its own.
WIDTH = 120


def run(options: argparse.Namespace) -> int:
    """Read a log, explain its spikes and print them.

    Raises:
        ValueError: The file is no step log, or an option is out of range.
    """
    if options.most < 0:
        raise ValueError(f"most is {options.most}; allowed: an integer >= 0.")
    log = read_step_log(options.log)
    explanation = explain(log.records, log.compiles, factor=options.factor)
    floor = _floor(options, log)
    if options.json:
        console = Console(soft_wrap=True)
        console.print_json(json.dumps(as_json(explanation, log.records, floor), allow_nan=False))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        print_explanation(console, explanation, log.records, most=options.most, floor=floor)
    return 0


def _floor(options: argparse.Namespace, log: StepLogFile) -> StepFloor | None:
    if options.floor is None:
        return None
    known = probe_cpu() if options.floor == "cpu" else HARDWARE[options.floor][options.rates]
    return StepFloor(log.header, known)
