"""What a figure depends on besides the code that is measured."""

import shutil
import subprocess
from pathlib import Path

import jax


def facts_of(device: str) -> dict[str, str | None]:
    """Device, version of JAX and commit; the commit is None without git or outside a checkout."""
    return {"device": device, "jax": jax.__version__, "commit": _commit()}


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    described = subprocess.run(
        [git, "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None
