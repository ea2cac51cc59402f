"""Where compiled programs are kept between starts, and what makes them fit a start.

Step programs are kept as executables of our own (``bucketing.program_store``): a start that finds
them neither traces nor lowers nor compiles, where JAX's persistent cache saves compiling alone.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import bucketing
import glm_jax
import pallas_kernels
from bucketing.compile_service import CompileService
from bucketing.fingerprint import fingerprint, platform_facts, sources_hash, tracing_settings
from bucketing.program_key import ProgramKey
from bucketing.program_store import ProgramStore, ProgramStoreWarning, UnsafeFolderError
from bucketing.programs import CompileReport, ProgramTable
from glm_jax.engine.lowering import Lowering

_WORKER = (sys.executable, "-m", "glm_jax.engine.compile_worker")


def program_folder() -> Path | None:
    """The folder of stored programs, or None where JAX's caching is switched off.

    It is inside JAX's own cache folder where the user has set one (jax_compilation_cache_dir),
    else in the user's cache folder.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    configured = jax.config.values["jax_compilation_cache_dir"]
    if configured:
        return Path(configured) / "glm-jax-programs"
    return Path.home() / ".cache" / "glm-jax" / "programs"


def lowering_fingerprint(lowering: Lowering, device: jax.Device) -> str:
    """The fingerprint of a model's step programs on a device."""
    facts = {
        "program": lowering.description(),
        "platform": platform_facts(device),
        "sources": sources_hash(_sources()),
    }
    return fingerprint(facts)


def open_store(lowering: Lowering, device: jax.Device) -> ProgramStore | None:
    """The store of a model's programs; None, with a warning, where it cannot be used safely."""
    root = program_folder()
    if root is None:
        return None
    try:
        return ProgramStore(root, lowering_fingerprint(lowering, device), devices=[device])
    except (UnsafeFolderError, OSError) as error:
        warnings.warn(f"compiled programs are not kept: {error}", ProgramStoreWarning, stacklevel=2)
        return None


def compile_service(
    lowering: Lowering,
    programs: ProgramTable,
    *,
    children: int = 1,
    on_done: Callable[[CompileReport], Any] | None = None,
    on_failed: Callable[[ProgramKey, str], Any] | None = None,
) -> CompileService:
    """The service that fills an engine's table: from the store, in this process, in children.

    Args:
        lowering: what the programs are made from.
        programs: the table to fill.
        children: processes that compile in the background.
        on_done: called with every report, from whichever thread it is.
        on_failed: called with the key and reason of a program that is given up; by default that is
            a ``ProgramStoreWarning``.
    """
    device = jax.devices()[0]
    store = open_store(lowering, device)
    if store is None:
        # Of this process alone; the children still check that they make the same programs.
        store = ProgramStore.temporary(lowering_fingerprint(lowering, device), devices=[device])
    return CompileService(
        programs,
        lowering.lower,
        store,
        command=_WORKER,
        job={"lowering": lowering.as_json(), "settings": tracing_settings()},
        children=children,
        on_done=on_done,
        on_failed=on_failed or _warn_failed,
    )


def _warn_failed(key: ProgramKey, reason: str) -> None:
    warnings.warn(
        f"{key} could not be compiled in the background and is served piece by piece: {reason}",
        ProgramStoreWarning,
        stacklevel=2,
    )


def _sources() -> list[Path]:
    """Everything that says what a program computes."""
    return [
        *(Path(package.__file__).parent for package in (bucketing, pallas_kernels)),
        *(Path(glm_jax.__file__).parent / part for part in ("model", "sampling")),
        Path(glm_jax.__file__).parent / "engine" / "lowering.py",
    ]
