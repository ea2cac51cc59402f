"""What a figure depends on besides the code that is measured."""

import subprocess
from pathlib import Path

import jax


def facts_of(device: str) -> dict[str, str | None]:
    """Device, version of JAX and commit; the commit is None outside a git checkout."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {"device": device, "jax": jax.__version__, "commit": commit.stdout.strip() or None}
