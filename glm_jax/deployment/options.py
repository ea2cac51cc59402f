"""The options of ``glm-jax plan``; host-only, so that the command line loads without JAX."""

import argparse

from glm_jax.deployment.deployment import CHOICES, Deployment
from glm_jax.model.presets import PRESETS

DESCRIPTION = """
Arithmetic from the model's sizes, and the compiler's account of the step's scratch memory; nothing
runs on a GPU. Attention's weights are on every GPU; routed experts, MLPs and vocabulary are split.
"""


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
