"""Checkpoints in Hugging Face form to and from the model's parameters; host only, no JAX."""

from glm_jax.weights.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from glm_jax.weights.export import export_parameters
from glm_jax.weights.load import load_parameters
from glm_jax.weights.plan import LoadPlan, plan_load

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "LoadPlan",
    "export_parameters",
    "load_parameters",
    "plan_load",
]
