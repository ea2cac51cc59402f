"""Saves and restores the whole state of training, in one safetensors file."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float
from safetensors import safe_open
from safetensors.numpy import save_file

from scripts.tiny.optimizer import OptimizerState, initial_optimizer
from scripts.tiny.parameters import Parameters, initial_parameters, initial_router_bias
from scripts.tiny.shape import TinyShape
from scripts.tiny.stream import StreamPosition

CHECKPOINT = "checkpoint.safetensors"


@dataclasses.dataclass
class Progress:
    """Where training stands; everything that is not an array."""

    step: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    phase: int = -1
    position: StreamPosition = dataclasses.field(default_factory=StreamPosition)
    log: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class TrainingState(NamedTuple):
    """Arrays that a step changes."""

    parameters: Parameters
    optimizer: OptimizerState
    router_bias: Float[Array | np.ndarray, "sparse E"]


def initial_state(shape: TinyShape, seed: int) -> TrainingState:
    """Return the state before the first step, as host arrays."""
    parameters = initial_parameters(shape, seed)
    return TrainingState(parameters, initial_optimizer(parameters), initial_router_bias(shape))


def save_checkpoint(path: Path, shape: TinyShape, state: TrainingState, progress: Progress) -> None:
    """Write the state, so that the file under `path` is whole at any moment."""
    host = jax.tree.map(np.asarray, state)
    arrays = {"router_bias": host.router_bias, "count": host.optimizer.count.reshape(1)}
    for group, values in (
        ("parameters", host.parameters),
        ("momentum", host.optimizer.momentum),
        ("second", host.optimizer.second),
    ):
        arrays |= {f"{group}/{name}": np.ascontiguousarray(v) for name, v in values.items()}
    about = {
        "shape": json.dumps(dataclasses.asdict(shape)),
        "progress": json.dumps(dataclasses.asdict(progress)),
    }
    unfinished = path.with_suffix(".unfinished")
    save_file(arrays, unfinished, metadata=about)
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def load_checkpoint(path: Path) -> tuple[TinyShape, TrainingState, Progress]:
    """Read what `save_checkpoint` wrote, as host arrays.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}. Train first, or name another folder.")
    groups: dict[str, dict[str, np.ndarray]] = {"parameters": {}, "momentum": {}, "second": {}}
    with safe_open(path, framework="numpy") as file:
        about = file.metadata()
        bias, count = file.get_tensor("router_bias"), file.get_tensor("count")
        for key in file.keys():  # noqa: SIM118 - not a mapping
            group, _, name = key.partition("/")
            if name:
                groups[group][name] = file.get_tensor(key)
    optimizer = OptimizerState(groups["momentum"], groups["second"], count.reshape(()))
    fields = json.loads(about["progress"])
    progress = Progress(**(fields | {"position": StreamPosition(**fields["position"])}))
    shape = TinyShape(**json.loads(about["shape"]))
    return shape, TrainingState(groups["parameters"], optimizer, bias), progress
