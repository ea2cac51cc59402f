"""The update: Muon on hidden matrices, Adam on embeddings, head, norms and small projections."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from scripts.tiny.parameters import Parameters
from scripts.tiny.shape import TinyShape

_MATRICES = """
q_a q_b kv_a k_up v_up o gate_up down shared_gate_up shared_down query key merge
"""
MUON_NAMES = frozenset(_MATRICES.split())
MUON_MOMENTUM = 0.95
MUON_WEIGHT_DECAY = 0.1
MUON_UPDATE_RMS = 0.2  # per unit of learning rate
ADAM_BETAS = (0.9, 0.97)
ADAM_EPS = 1e-10
ADAM_WEIGHT_DECAY = 0.05
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# A fifth step costs 5 % of a training step and lifts only directions below 1 % of the norm.
NEWTON_SCHULZ_STEPS = 4


class OptimizerState(NamedTuple):
    """Momenta of all parameters, second moments of those Adam updates, and the step count."""

    momentum: Parameters
    second: Parameters
    count: Float[Array | np.ndarray, ""]


def uses_muon(name: str) -> bool:
    """Whether Muon updates this parameter."""
    return name.rsplit(".", 1)[-1] in MUON_NAMES


def initial_optimizer(parameters: dict[str, np.ndarray]) -> OptimizerState:
    """Return zero momenta."""
    return OptimizerState(
        {name: np.zeros_like(value) for name, value in parameters.items()},
        {name: np.zeros_like(v) for name, v in parameters.items() if not uses_muon(name)},
        np.zeros((), np.float32),
    )


def update(
    shape: TinyShape,
    parameters: Parameters,
    gradients: Parameters,
    state: OptimizerState,
    rates: tuple[Float[Array, ""], Float[Array, ""]],
) -> tuple[Parameters, OptimizerState]:
    """Apply one step; `rates` are those of Muon and of Adam (embeddings and head; others half)."""
    muon_rate, adam_rate = rates
    count = state.count + 1
    new, momentum, second, directions = {}, {}, {}, {}
    for name, gradient in gradients.items():
        if uses_muon(name):
            momentum[name] = MUON_MOMENTUM * state.momentum[name] + (1 - MUON_MOMENTUM) * gradient
            nesterov = (1 - MUON_MOMENTUM) * gradient + MUON_MOMENTUM * momentum[name]
            directions[name] = _split_matrices(shape, name, nesterov)
        else:
            rate = adam_rate * (1.0 if name in ("embed", "head") else 0.5)
            new[name], momentum[name], second[name] = _adam_step(
                name,
                parameters[name],
                gradient,
                state.momentum[name],
                state.second[name],
                rate,
                count,
            )
    for name, direction in _orthogonalise_all(directions).items():
        whole = _join_matrices(shape, name, direction, parameters[name].shape)
        rms = jnp.sqrt(jnp.mean(whole * whole) + 1e-12)
        decayed = parameters[name] * (1 - muon_rate * MUON_WEIGHT_DECAY)
        new[name] = decayed - muon_rate * whole * (MUON_UPDATE_RMS / rms)
    return new, OptimizerState(momentum, second, count)


def _adam_step(name, value, gradient, first, second, rate, count):  # noqa: ANN001, ANN202
    beta1, beta2 = ADAM_BETAS
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient * gradient
    scale = jnp.sqrt(second / (1 - beta2**count)) + ADAM_EPS
    step = first / (1 - beta1**count) / scale
    if value.ndim >= 2 and name != "embed":
        value = value * (1 - rate * ADAM_WEIGHT_DECAY)
    return value - rate * step, first, second


def _split_matrices(
    shape: TinyShape, name: str, value: Float[Array, "..."]
) -> Float[Array, "count N M"]:
    """View a parameter as the matrices that Muon treats apart: heads, experts, gate and up."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("q_b", "query"):
        heads = shape.num_attention_heads if leaf == "q_b" else shape.index_n_heads
        return value.reshape(value.shape[0], heads, -1).transpose(1, 0, 2)
    if leaf in ("gate_up", "shared_gate_up"):
        halves = jnp.stack(jnp.split(value, 2, -1), -3)
        return halves.reshape(-1, *halves.shape[-2:])
    return value.reshape(-1, *value.shape[-2:])


def _join_matrices(
    shape: TinyShape, name: str, matrices: Float[Array, "count N M"], size: tuple[int, ...]
) -> Float[Array, "..."]:
    """Undo `_split_matrices`."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("q_b", "query"):
        return matrices.transpose(1, 0, 2).reshape(size)
    if leaf in ("gate_up", "shared_gate_up"):
        halves = matrices.reshape(*size[:-2], 2, size[-2], size[-1] // 2)
        return jnp.concatenate([halves[..., 0, :, :], halves[..., 1, :, :]], -1)
    return matrices.reshape(size)


def _orthogonalise_all(directions: Parameters) -> Parameters:
    """Orthogonalise all matrices, those of one shape (up to transposition) in one batch."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, value in directions.items():
        groups.setdefault(tuple(sorted(value.shape[1:])), []).append(name)
    result = {}
    for size, names in groups.items():
        wide = [_wide(directions[name], size) for name in names]
        done, start = orthogonalise(jnp.concatenate(wide)), 0
        for name, part in zip(names, wide, strict=True):
            rows = done[start : start + part.shape[0]]
            start += part.shape[0]
            tall = directions[name].shape[1:] != size
            result[name] = jnp.swapaxes(rows, 1, 2) if tall else rows
    return result


def _wide(value: Float[Array, "count N M"], size: tuple[int, ...]) -> Float[Array, "count n m"]:
    return value if value.shape[1:] == size else jnp.swapaxes(value, 1, 2)


def orthogonalise(matrices: Float[Array, "count N M"]) -> Float[Array, "count N M"]:
    """Bring all singular values near 1 by Newton-Schulz iteration; N <= M."""
    a, b, c = NEWTON_SCHULZ
    norms = jnp.sqrt((matrices * matrices).sum((-1, -2), keepdims=True))
    x = matrices / (norms + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x
