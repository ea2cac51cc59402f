"""Turns on JAX's persistent compilation cache, so that a second start compiles nothing anew."""

from pathlib import Path

import jax


def enable_compilation_cache(folder: Path | None = None) -> Path | None:
    """Keep compiled programs on disk unless the user has configured that already.

    JAX's configuration is global to the process, so only entry points and ``LLM`` call this.

    Args:
        folder: where to keep them; by default ``~/.cache/glm-jax/xla``, readable by its owner only
            (cached executables are code).

    Returns:
        The folder in use, or None where it cannot be written.
    """
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured:
        return Path(configured)
    target = folder or Path.home() / ".cache" / "glm-jax" / "xla"
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    jax.config.update("jax_compilation_cache_dir", str(target))
    return target
