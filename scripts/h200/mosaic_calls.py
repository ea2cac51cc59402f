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
    for module in kernel_modules(lowered):
        entry, size = launch(module)
        found[entry] = max(size, found.get(entry, 0))
    return found


def kernel_modules(lowered: jax.stages.Lowered) -> tuple[bytes, ...]:
    """The different kernels, serialised; equal ones are assembled once in a process."""
    module_of_program: Any = lowered.compiler_ir()
    modules = map(_mosaic_module, _operations(module_of_program.operation))
    return tuple(dict.fromkeys(module for module in modules if module is not None))


def launch(module: bytes) -> tuple[str, int]:
    """Entry name and bytes of dynamic shared memory of a serialised kernel."""
    size = 0
    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        mosaic_gpu_dialect.register_dialect(context)
        parsed = ir.Module.parse(module)
        name = ir.StringAttr(parsed.operation.attributes["sym_name"]).value
        for operation in _operations(parsed.operation):
            if operation.name.endswith("gpu.launch"):
                # The last operand, a constant.
                constant = operation.operands[len(operation.operands) - 1].owner
                size = ir.IntegerAttr(constant.attributes["value"]).value
                break
    return f"{name}{_ENTRY_SUFFIX}", size


def _mosaic_module(operation: Any) -> bytes | None:
    """The serialised module of a Mosaic custom call; None for any other operation."""
    if operation.name != "stablehlo.custom_call":
        return None
    if not ir.StringAttr(operation.attributes["call_target_name"]).value.startswith("mosaic_gpu"):
        return None
    config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
    return ir.StringAttr(config["module"]).value_bytes


def _operations(operation: Any) -> Iterator[Any]:
    """All operations inside one."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)
