"""What ``glm-jax plan`` does."""

import argparse
import importlib.util
import json

from rich.console import Console

from glm_jax.deployment.deployment import CHOICES, Deployment
from glm_jax.deployment.plan import ProgramNeed, make_plan
from glm_jax.deployment.program_peak import measure_programs
from glm_jax.deployment.report import as_json, print_plan
from glm_jax.model.presets import PRESETS

# JAX's plugin for CUDA 13, the compiler; with it comes jax-cuda13-pjrt.
_PLUGIN = "jax_cuda13_plugin"


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
    return measure_programs(deployment)
