"""The strict check before any weight is read: every tensor used once, every parameter filled.

Works on headers alone, so that the plan of a 753B model takes seconds and no memory to speak of.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from glm_jax.model.config import GlmConfig
from glm_jax.weights.errors import CheckpointMismatchError
from glm_jax.weights.headers import TensorHeader
from glm_jax.weights.names import SCALE_SUFFIX, HfTensor, Piece, is_ignorable, tensor_table
from glm_jax.weights.quant import scale_shape

_SHOWN = 10
_PLAIN_DTYPES = ("BF16", "F32", "F16")
_FP8_DTYPES = ("F8_E4M3",)


class PlannedTensor(NamedTuple):
    """One tensor to read.

    Attributes:
        name: its name in the checkpoint.
        pieces: where its rows go.
        scale_name: name of its block scales, or None when it is not in FP8.
    """

    name: str
    pieces: tuple[Piece, ...]
    scale_name: str | None


class LoadPlan(NamedTuple):
    """Which tensors to read, and which to leave unread on purpose."""

    tensors: tuple[PlannedTensor, ...]
    ignored: tuple[str, ...]

    def consumed(self) -> list[str]:
        """Return every tensor name that loading reads, scales included."""
        names = [tensor.name for tensor in self.tensors]
        return names + [tensor.scale_name for tensor in self.tensors if tensor.scale_name]


def plan_load(headers: Mapping[str, TensorHeader], config: GlmConfig) -> LoadPlan:
    """Match a checkpoint's tensors with a model's parameters.

    Whether a matrix is in FP8 is decided by the presence of its scales, never by the exclude list
    of the checkpoint's config, which names modules wrongly.

    Raises:
        CheckpointMismatchError: one message with the first ten unexpected and missing names, wrong
            shapes and wrong dtypes.
    """
    table = tensor_table(config)
    problems = _Problems()
    for required in _required_tensors(table, headers):
        header = headers.get(required.name)
        if header is None:
            problems.missing.append(required.name)
        elif header.shape != required.shape or header.dtype not in required.dtypes:
            problems.add_wrong(required, header)
    scaled = {name: name + SCALE_SUFFIX for name in table if name + SCALE_SUFFIX in headers}
    tensors = (PlannedTensor(name, t.pieces, scaled.get(name)) for name, t in table.items())
    plan = LoadPlan(tuple(tensors), ())
    extra = headers.keys() - set(plan.consumed())
    ignored = {name for name in extra if is_ignorable(name, config)}
    problems.unexpected = sorted(extra - ignored)
    if problems.found():
        raise CheckpointMismatchError(problems.message(config))
    return plan._replace(ignored=tuple(sorted(ignored)))


class _Required(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def _required_tensors(
    table: Mapping[str, HfTensor], headers: Mapping[str, TensorHeader]
) -> Iterator[_Required]:
    """Yield what has to be there, given which scales are."""
    for name, tensor in table.items():
        if name + SCALE_SUFFIX in headers:
            yield _Required(name, tensor.shape, _FP8_DTYPES)
            yield _Required(name + SCALE_SUFFIX, scale_shape(tensor.shape), ("F32",))
        else:
            yield _Required(name, tensor.shape, _PLAIN_DTYPES)


class _Problems:
    """What does not match, collected so that one error tells all of it."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []
        self.missing: list[str] = []
        self.shapes: list[str] = []
        self.dtypes: list[str] = []

    def add_wrong(self, required: _Required, header: TensorHeader) -> None:
        name, shape, dtypes = required
        if header.shape != shape:
            self.shapes.append(f"{name} is {list(header.shape)}, expected {list(shape)}")
        if header.dtype in dtypes:
            return
        found, scales = header.dtype, SCALE_SUFFIX.removeprefix("_")
        if dtypes == _FP8_DTYPES:
            found += f" with {scales}"
        elif found in _FP8_DTYPES:
            found += f" without {scales}"
        self.dtypes.append(f"{name} is {found}, expected {' or '.join(dtypes)}")

    def found(self) -> bool:
        return bool(self.unexpected or self.missing or self.shapes or self.dtypes)

    def message(self, config: GlmConfig) -> str:
        lines = ["the checkpoint does not match the model config:"]
        for what, entries in (
            ("unexpected", self.unexpected),
            ("missing", self.missing),
            ("of a wrong shape", self.shapes),
            ("of a wrong dtype", self.dtypes),
        ):
            if entries:
                more = ", ..." if len(entries) > _SHOWN else ""
                lines.append(f"  {len(entries)} {what}: {', '.join(entries[:_SHOWN])}{more}")
        hint = self._mtp_hint(config)
        return "\n".join([*lines, hint] if hint else lines)

    def _mtp_hint(self, config: GlmConfig) -> str:
        prefix = f"model.layers.{config.num_hidden_layers}."
        if config.num_nextn_predict_layers:
            # transformers drops the MTP layer when it saves but keeps the key in the config.
            absent = sum(name.startswith(prefix) for name in self.missing)
            wanted = sum(name.startswith(prefix) for name in tensor_table(config))
            if absent == wanted:
                return "All of the MTP layer is missing: set num_nextn_predict_layers to 0."
        elif any(name.startswith(prefix) for name in self.unexpected):
            return "The checkpoint has an MTP layer: set num_nextn_predict_layers to 1."
        return ""
