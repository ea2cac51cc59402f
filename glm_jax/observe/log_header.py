"""The first line of a step log: what ran, so that a reader needs nothing else."""

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from glm_jax.engine.config import EngineConfig
from glm_jax.model.config import GlmConfig

FORMAT = "glm-jax step log"
VERSION = 1


class LogHeader(NamedTuple):
    """What a log says of the run.

    Attributes:
        engine: The engine's options.
        model: The model; None where it was not told.
        device: Kind of device, such as "cpu".
        epoch: Seconds since 1970 at reading 0 of the clock of the steps.
    """

    engine: EngineConfig
    model: GlmConfig | None = None
    device: str = ""
    epoch: float = 0.0


def header_now(engine: EngineConfig, model: GlmConfig | None = None, device: str = "") -> LogHeader:
    """Return the header of a log that begins now."""
    return LogHeader(engine, model, device, time.time() - time.perf_counter())


def write_header(header: LogHeader) -> str:
    """Return the header's line, without its end."""
    line = {
        "format": FORMAT,
        "version": VERSION,
        "epoch": header.epoch,
        "device": header.device,
        "engine": dataclasses.asdict(header.engine),
        "model": None if header.model is None else dataclasses.asdict(header.model),
    }
    return json.dumps(line, separators=(",", ":"))


def read_header(text: str) -> LogHeader:
    """Return the header of a line.

    Raises:
        ValueError: The line begins no step log of this version.
    """
    try:
        line: Mapping[str, Any] = json.loads(text)
        known = line["format"], line["version"]
        if known != (FORMAT, VERSION):
            raise ValueError(f"it is of {known[0]!r}, version {known[1]!r}")
        model = line["model"]
        return LogHeader(
            EngineConfig(**line["engine"]),
            None if model is None else GlmConfig(**_with_tuples(model)),
            line["device"],
            line["epoch"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{text[:60]!r} begins no step log of version {VERSION}: "
            f"{type(error).__name__}: {error}. Write one with --step-log."
        ) from error


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's fields as they were before JSON made lists of tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
