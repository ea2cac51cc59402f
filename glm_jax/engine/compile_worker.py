"""Compiles step programs in a child of the serving process: ``python -m`` this module.

It reads its job on standard input (see ``bucketing.compile_child``), lowers from the configs alone
and writes to the program store. It holds no weights and no cache.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from bucketing.compile_child import serve_parent
from bucketing.program_key import ProgramKey
from bucketing.program_store import ProgramStore
from bucketing.programs import compile_program
from glm_jax.compilation_cache import lowering_fingerprint
from glm_jax.engine.lowering import Lowering

# Serving goes first where both want the same core.
_NICENESS = 10


def main() -> None:
    """Serve the parent until it goes away."""
    os.nice(_NICENESS)
    serve_parent(prepare)


def prepare(job: Mapping[str, Any]) -> Callable[[ProgramKey], None]:
    """Set up one engine's lowering and store, as the parent's are.

    Raises:
        RuntimeError: this process would make other programs than the parent asks for.
    """
    for name, value in job["settings"].items():
        jax.config.update(name, value)
    lowering = Lowering.from_json(job["lowering"])
    found = lowering_fingerprint(lowering, jax.devices()[0])
    if found != job["fingerprint"]:
        raise RuntimeError(
            "the child's sources, versions or flags are not the parent's: were files or the "
            "environment changed since it started?"
        )
    store = ProgramStore(Path(job["root"]), job["fingerprint"])

    def compile_and_save(key: ProgramKey) -> None:
        if key in store:  # another process may have been quicker
            return
        program, report = compile_program(lowering.lower, key)
        problem = store.save(key, program, report).problem
        if problem:
            raise RuntimeError(f"the program of {key} {problem}")

    return compile_and_save


if __name__ == "__main__":
    main()
