"""Dynamic shared memory of the Mosaic kernels in a lowered program.

Neither ptxas nor XLA's dumps know it: Mosaic asks for it when it launches the kernel. The launch
is in the module that the custom call carries.
"""

from collections.abc import Iterator
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir

_ENTRY_SUFFIX = "_mosaic_gpu_kernel"


def shared_bytes(lowered: jax.stages.Lowered) -> dict[str, int]:
    """Bytes of dynamic shared memory by the kernel's entry name; the most, if there are several."""
    found: dict[str, int] = {}
    seen: set[bytes] = set()
    module_of_program: Any = lowered.compiler_ir()
    for call in _operations(module_of_program.operation):
        module = _mosaic_module(call)
        if module is None or module in seen:
            continue
        seen.add(module)
        name, size = _launch(module)
        entry = f"{name}{_ENTRY_SUFFIX}"
        found[entry] = max(size, found.get(entry, 0))
    return found


def _mosaic_module(operation: Any) -> bytes | None:
    """The serialised module of a Mosaic custom call; None for any other operation."""
    if operation.name != "stablehlo.custom_call":
        return None
    if not ir.StringAttr(operation.attributes["call_target_name"]).value.startswith("mosaic_gpu"):
        return None
    config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
    return ir.StringAttr(config["module"]).value_bytes


def _launch(module: bytes) -> tuple[str, int]:
    """Name and dynamic shared memory of a serialised kernel."""
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        mosaic_gpu_dialect.register_dialect(context)
        parsed = ir.Module.parse(module)
        name = ir.StringAttr(parsed.operation.attributes["sym_name"]).value
        for operation in _operations(parsed.operation):
            if operation.name.endswith("gpu.launch"):
                # The last operand, a constant.
                constant = operation.operands[len(operation.operands) - 1].owner
                return name, ir.IntegerAttr(constant.attributes["value"]).value
    return name, 0


def _operations(operation: Any) -> Iterator[Any]:
    """All operations inside one."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)
