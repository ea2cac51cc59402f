"""Host arrays that a loader fills in place and the device takes over, in either storage form."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import ParamSpec, parameter_specs
from glm_jax.model.transformer import GROUPS, Transformer

STORAGES = ("per_layer", "stacked")
# XLA's CPU client takes over a host buffer without a copy only at this alignment.
_ALIGNMENT = 64
_GROUP_OF_PREFIX = {"indexer": "indexers", "mlp": "mlps", "moe": "moes"}


class ParameterStore:
    """All parameters of a model in their final layout, on the host.

    A loader asks for the destination of each flat name and fills it; with stacked storage that is
    a view of one layer's part of a larger array.
    """

    def __init__(self, config: GlmConfig, *, dtype: str, storage: str) -> None:
        """Allocate (not touch) every array.

        Args:
            config: the model.
            dtype: "float32" or "bfloat16" for weights; router and its bias stay float32.
            storage: "per_layer" or "stacked".
        """
        self.config = config
        self.tree = parameter_tree(config, dtype=dtype, storage=storage, make=_aligned_empty)
        self._specs = parameter_specs(config)

    def destination(self, name: str) -> np.ndarray:
        """The array, or the layer's view of it, that holds parameter ``name``."""
        if name not in self._specs:
            raise KeyError(f"no parameter is called {name!r} in this model")
        group, member, leaf = locate(self.config, name)
        holder = self.tree[group]
        if member is None:
            return holder if leaf is None else holder[leaf]
        return holder[member][leaf] if isinstance(holder, list) else holder[leaf][member]

    def fill_random(self, seed: int) -> None:
        """Draw weights for a model that has no checkpoint: norms near 1, biases that matter."""
        generator = np.random.default_rng(seed)
        for name, spec in self._specs.items():
            self.destination(name)[...] = _random_parameter(name, spec, generator)

    def to_device(self, device: jax.Device) -> Transformer:
        """Move everything to ``device``; on CPU the buffers are taken over without a copy.

        The store is empty afterwards: its arrays belong to the device.
        """
        tree, self.tree = self.tree, {}
        alias = device.platform == "cpu"
        return Transformer(
            jax.tree.map(lambda array: jax.device_put(array, device, may_alias=alias), tree)
        )


def parameter_tree(
    config: GlmConfig,
    *,
    dtype: str,
    storage: str,
    make: Callable[[tuple[int, ...], np.dtype], object],
) -> dict:
    """Lay out all parameters as ``Transformer`` takes them.

    Args:
        config: the model.
        dtype: weights' dtype by name.
        storage: "per_layer" (lists of leaves) or "stacked" (one leaf with the layers in front).
        make: builds a leaf from shape and dtype: an array, or a ``jax.ShapeDtypeStruct``.
    """
    if storage not in STORAGES:
        raise ValueError(f"layer_storage {storage!r} is unknown; allowed: {', '.join(STORAGES)}")
    members: dict[str, list[dict]] = {name: [] for name in GROUPS}
    tree: dict = {"mtp": {}}
    for name, spec in parameter_specs(config).items():
        group, member, leaf = locate(config, name)
        if member is None:
            if leaf is None:
                tree[group] = make(spec.shape, _dtype(spec, dtype))
            else:
                tree[group][leaf] = make(spec.shape, _dtype(spec, dtype))
            continue
        if member == len(members[group]):
            members[group].append({})
        members[group][member][leaf] = spec
    for group, specs in members.items():
        if storage == "per_layer":
            tree[group] = [
                {leaf: make(spec.shape, _dtype(spec, dtype)) for leaf, spec in one.items()}
                for one in specs
            ]
        else:
            first = specs[0] if specs else {}
            tree[group] = {
                leaf: make((len(specs), *spec.shape), _dtype(spec, dtype))
                for leaf, spec in first.items()
            } or []
    return tree


def abstract_model(
    config: GlmConfig,
    *,
    dtype: str,
    storage: str,
    make: Callable[[tuple[int, ...], np.dtype], Any] = jax.ShapeDtypeStruct,
) -> Transformer:
    """The model with shapes for arrays: to count leaves or compile without any memory."""
    return Transformer(parameter_tree(config, dtype=dtype, storage=storage, make=make))


def split_model(model: Transformer) -> tuple[Callable[[list], Transformer], list]:
    """Split once into a function that rebuilds the model inside a trace, and plain leaves."""
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return lambda values: nnx.merge(graph, jax.tree.unflatten(treedef, values)), leaves


def locate(config: GlmConfig, name: str) -> tuple[str, int | None, str | None]:
    """Where a flat name lives: (group, member, leaf); member None outside the layers."""
    if not name.startswith("layers."):
        head, _, leaf = name.partition(".")
        return head, None, leaf or None
    _, number, rest = name.split(".", 2)
    layer = int(number)
    prefix, _, leaf = rest.partition(".")
    group = _GROUP_OF_PREFIX.get(prefix)
    if group is None:
        return "blocks", layer, rest
    before: Mapping[str, Callable[[int], bool]] = {
        "indexers": config.has_indexer,
        "moes": config.is_sparse,
        "mlps": lambda i: not config.is_sparse(i),
    }
    return group, sum(before[group](i) for i in range(layer)), leaf


def _dtype(spec: ParamSpec, weights: str) -> np.dtype:
    name = weights if spec.dtype == "weight" else spec.dtype
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory at XLA's alignment; pages are touched only when filled."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _random_parameter(name: str, spec: ParamSpec, generator: np.random.Generator) -> np.ndarray:
    """Norms 1 +- 0.1, biases +- 0.1, the rest scaled so that activations keep their size."""
    draw = generator.standard_normal(spec.shape, dtype=np.float32)
    if name.endswith("bias"):
        return 0.1 * draw
    if "norm" in name:
        return 1.0 + 0.1 * draw
    if name in ("embed", "head"):
        return draw * (1.0 if name == "embed" else spec.shape[-1] ** -0.5)
    fan_in = spec.shape[-1] if name.endswith("k_up") else spec.shape[-2]
    return draw * fan_in**-0.5
