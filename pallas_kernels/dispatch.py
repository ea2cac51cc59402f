"""Which implementation of an operator runs."""

import importlib
from collections.abc import Callable

import jax

IMPLEMENTATIONS = ("reference", "xla", "mosaic_gpu")


def find(operator: str, function: str, implementation: str | None) -> Callable:
    """A function of one implementation of an operator.

    Args:
        operator: the operator's folder.
        function: the function's name.
        implementation: one of IMPLEMENTATIONS; None takes "mosaic_gpu" where JAX's default
            backend is a GPU and "xla" elsewhere. A named one is never replaced by another.

    Raises:
        ValueError: there is no implementation of that name.
    """
    name = default_implementation() if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"unknown implementation {implementation!r} of {operator}; "
            f"allowed: {', '.join(IMPLEMENTATIONS)}"
        )
    # By name, because Mosaic needs packages that a plain JAX does not bring.
    return getattr(importlib.import_module(f"pallas_kernels.{operator}.{name}"), function)


def default_implementation() -> str:
    """What runs where nothing is named."""
    return "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
