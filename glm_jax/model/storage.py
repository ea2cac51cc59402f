"""Host arrays that a loader fills in place and the device takes over, in either storage form."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from glm_jax.model.config import GlmConfig
from glm_jax.model.parameters import ParamSpec, fp8_obstacle, parameter_specs
from glm_jax.model.transformer import GROUPS, Transformer
from pallas_kernels.fp8 import BLOCK, BlockScaled

_Make = Callable[[tuple[int, ...], np.dtype], Any]

STORAGES = ("per_layer", "stacked")
# XLA's CPU client takes over a host buffer without a copy only at this alignment.
_ALIGNMENT = 64
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_GROUP_OF_PREFIX = {"indexer": "indexers", "mlp": "mlps", "moe": "moes"}


class ParameterStore:
    """All parameters of a model in their final layout, on the host.

    A loader asks for the destination of each flat name and fills it; with stacked storage that is
    a view of one layer's part of a larger array.
    """

    def __init__(
        self, config: GlmConfig, *, dtype: str, storage: str, weight_dtype: str | None = None
    ) -> None:
        """Allocate (not touch) every array.

        Args:
            config: the model.
            dtype: "float32" or "bfloat16" for plain weights; router and its bias stay float32.
            storage: "per_layer" or "stacked".
            weight_dtype: as in ``parameter_tree``.

        Raises:
            ValueError: as ``parameter_tree``.
        """
        self.config = config
        self.tree = parameter_tree(
            config, dtype=dtype, storage=storage, make=_aligned_empty, weight_dtype=weight_dtype
        )
        self._specs = parameter_specs(config)

    def destination(self, name: str) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """The array, or the layer's view of it, that holds parameter ``name``.

        A matrix in block FP8 is a pair of arrays: values ``[.., out, in]`` and their scales.
        """
        if name not in self._specs:
            raise KeyError(f"no parameter is called {name!r} in this model")
        group, member, leaf = locate(self.config, name)
        holder = self.tree[group]
        if member is None:
            return holder if leaf is None else holder[leaf]
        if isinstance(holder, list):
            return holder[member][leaf]
        return jax.tree.map(lambda array: array[member], holder[leaf])

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
    make: _Make,
    weight_dtype: str | None = None,
) -> dict:
    """Lay out all parameters as ``Transformer`` takes them.

    Args:
        config: the model.
        dtype: plain weights' dtype by name, where ``weight_dtype`` names no other.
        storage: "per_layer" (lists of leaves) or "stacked" (one leaf with the layers in front).
        make: builds a leaf from shape and dtype: an array, or a ``jax.ShapeDtypeStruct``.
        weight_dtype: weights' dtype by name, None for ``dtype``. "fp8" holds the matrices that the
            published FP8 checkpoints quantise as ``BlockScaled``, but for the key and value
            up-projections, which absorption needs per head; what else there is has ``dtype``.

    Raises:
        ValueError: the storage is unknown, or the model has no block-FP8 form.
    """
    if storage not in STORAGES:
        raise ValueError(f"layer_storage {storage!r} is unknown; allowed: {', '.join(STORAGES)}")
    leaf_of = _leaf_maker(config, dtype, weight_dtype, make)
    members: dict[str, list[dict]] = {name: [] for name in GROUPS}
    tree: dict = {"mtp": {}}
    for name, spec in parameter_specs(config).items():
        group, member, leaf = locate(config, name)
        if member is None:
            if leaf is None:
                tree[group] = leaf_of(spec)
            else:
                tree[group][leaf] = leaf_of(spec)
            continue
        if member == len(members[group]):
            members[group].append({})
        members[group][member][leaf] = spec
    for group, specs in members.items():
        if storage == "per_layer":
            tree[group] = [{leaf: leaf_of(spec) for leaf, spec in one.items()} for one in specs]
        else:
            first = specs[0] if specs else {}
            stack = {leaf: leaf_of(spec, (len(specs),)) for leaf, spec in first.items()}
            tree[group] = stack or []
    return tree


def abstract_model(
    config: GlmConfig,
    *,
    dtype: str,
    storage: str,
    make: _Make = jax.ShapeDtypeStruct,
    weight_dtype: str | None = None,
) -> Transformer:
    """The model with shapes for arrays: to count leaves or compile without any memory."""
    return Transformer(
        parameter_tree(config, dtype=dtype, storage=storage, make=make, weight_dtype=weight_dtype)
    )


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


def numpy_dtype(name: str) -> np.dtype:
    """The dtype that an option calls "float32" or "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _leaf_maker(
    config: GlmConfig, dtype: str, weight_dtype: str | None, make: _Make
) -> Callable[..., Any]:
    """What builds a parameter's leaf, or that of a stack of them."""
    fp8 = weight_dtype == "fp8"
    obstacle = fp8_obstacle(config) if fp8 else None
    if obstacle is not None:
        raise ValueError(obstacle)
    plain = dtype if fp8 or weight_dtype is None else weight_dtype

    def leaf_of(spec: ParamSpec, stack: tuple[int, ...] = ()) -> Any:
        if fp8 and spec.quantised:
            return _block_scaled((*stack, *spec.shape), make)
        name = plain if spec.dtype == "weight" else spec.dtype
        return make((*stack, *spec.shape), numpy_dtype(name))

    return leaf_of


def _block_scaled(shape: tuple[int, ...], make: _Make) -> BlockScaled:
    """A stack of matrices whose plain form has this shape."""
    *stack, inputs, outputs = shape
    blocks = (-(-size // BLOCK) for size in (outputs, inputs))
    values = make((*stack, outputs, inputs), _FP8)
    return BlockScaled(values, make((*stack, *blocks), np.dtype(np.float32)))


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory at XLA's alignment; pages are touched only when filled."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
