"""The options of ``glm-jax plan``, and what it does; JAX loads only where a program is compiled."""

import argparse
import importlib
import importlib.util
import json

from rich.console import Console

from glm_jax.deployment.deployment import CHOICES, Deployment
from glm_jax.deployment.plan import ProgramNeed, make_plan
from glm_jax.deployment.report import as_json, print_plan
from glm_jax.model.presets import PRESETS

DESCRIPTION = """
Arithmetic from the model's sizes, and the compiler's account of the step's scratch memory; nothing
runs on a GPU. Attention's weights are on every GPU; routed experts, MLPs and vocabulary are split.
"""
# JAX's plugin for CUDA 13, the compiler; with it comes jax-cuda13-pjrt.
_PLUGIN = "jax_cuda13_plugin"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="glm-5.3", help="model (default glm-5.3)")
    for flag, name, meaning in (
        ("--gpus", "gpus", "H200 of one node"),
        ("--context", "context", "tokens of each request"),
        ("--seqs", "seqs", "requests that run at once, on all GPUs"),
        ("--draft", "drafts", "draft tokens of a request in a step"),
        ("--prefill", "prefill", "prefill rows of a mixed step, on all GPUs"),
    ):
        default = getattr(Deployment, name)
        add(flag, type=int, dest=name, default=default, help=f"{meaning} (default {default})")
    for name, choices in CHOICES.items():
        default = getattr(Deployment, name)
        flag = f"--{name.replace('_', '-')}"
        add(flag, choices=choices, default=default, help=f"(default {default})")
    add("--program-mib", type=int, help="memory of the step program; it is not compiled then")
    add("--json", action="store_true", help="print one JSON object only")


def run(options: argparse.Namespace) -> int:
    """Plan and print.

    Raises:
        ValueError: an option is out of range or does not go with the model.
    """
    names = ("gpus", "context", "seqs", "drafts", "prefill", *CHOICES)
    asked = {name: getattr(options, name) for name in names}
    deployment = Deployment(config=PRESETS[options.preset], **asked)
    plan = make_plan(deployment, _program(deployment, options.program_mib))
    if options.json:
        Console(soft_wrap=True).print_json(json.dumps(as_json(plan)))
    else:
        print_plan(Console(), plan)
    return 0


def _program(deployment: Deployment, mebibytes: int | None) -> ProgramNeed:
    """The program's memory: given, or compiled, or unknown."""
    if mebibytes is not None:
        if mebibytes < 0:
            raise ValueError(f"program-mib is {mebibytes}; allowed: 0 or more.")
        return ProgramNeed({"any step": mebibytes << 20}, "given by --program-mib")
    if importlib.util.find_spec(_PLUGIN) is None:
        return ProgramNeed({}, "not compiled: needs jax-cuda13-plugin and jax-cuda13-pjrt")
    return importlib.import_module("glm_jax.deployment.program_peak").measure_programs(deployment)
