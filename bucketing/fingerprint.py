"""What an executable depends on besides its key: everything that must be equal to load it again.

A fingerprint is a hash of such facts. Loading an executable under other facts gives wrong results
or, with another CPU, a crash (SIGILL); so what is not sure to be irrelevant belongs in here.
"""

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxlib import _jax

# Settings of JAX that change what a function is traced to.
TRACING_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "libtpu")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FIELDS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features")


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Hash facts (JSON values) to 64 hexadecimal digits."""
    text = json.dumps(facts, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def platform_facts(device: jax.Device) -> dict[str, Any]:
    """Versions, device, host CPU and compiler flags, as JSON values.

    The host CPU counts on every platform: executables for a GPU hold host code too.
    """
    # Compiler options at their defaults, which is where XLA puts the flags it was started with.
    options = _jax.CompileOptions().SerializeAsString()
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "platform_version": device.client.platform_version,
        "packages": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),  # executables are stored as pickles
        "cpu": cpu_facts(),
        "xla_options": hashlib.sha256(options).hexdigest(),
        "settings": tracing_settings(),
    }


def tracing_settings() -> dict[str, Any]:
    """The values of JAX's settings that change what is traced."""
    return {name: jax.config.values[name] for name in TRACING_SETTINGS}


def cpu_facts(cpuinfo: Path = _CPUINFO) -> dict[str, str]:
    """Model and instruction set of the host's CPU."""
    facts = {"machine": platform.machine(), "system": platform.system()}
    try:
        text = cpuinfo.read_text()
    except OSError:
        return facts | {"processor": platform.processor()}
    for line in text.splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _CPU_FIELDS:
            # Cores of one machine may be listed with their flags in any order.
            facts.setdefault(name, " ".join(sorted(value.split())))
    return facts


def sources_hash(places: Iterable[Path]) -> str:
    """Hash the Python sources in folders (recursively) and single files, names included."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        for file in files:
            content = file.read_bytes()
            name = file.relative_to(place.parent).as_posix()
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
