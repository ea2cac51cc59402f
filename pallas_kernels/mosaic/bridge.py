"""One spelling of Pallas Mosaic GPU for jax 0.10.2 to 0.12; every kernel goes through it.

What differs between the versions: 0.10.2 lowers per lane unless told otherwise, needs an index in
``load`` and keeps the interpreter's parameters private; 0.12 takes no index there.
"""

import inspect
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

if hasattr(plgpu, "InterpretGPUParams"):
    InterpretParams = plgpu.InterpretGPUParams
else:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams as InterpretParams

_LOAD_TAKES_INDEX = "idx" in inspect.signature(plgpu.load).parameters
_COMPILER_FIELDS = frozenset(inspect.signature(plgpu.CompilerParams).parameters)


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    out_type: Any,
    interpret: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **settings: Any,
) -> Callable[..., Any]:
    """``plgpu.kernel`` with the same lowering on every version.

    Args:
        body: the kernel; takes references of operands, then of results, then of scratch.
        name: what profilers and dumps call the kernel.
        out_type: ``jax.ShapeDtypeStruct`` or a tuple of them.
        interpret: run in Mosaic's interpreter on the CPU (exact, slow).
        compiler_options: fields of ``plgpu.CompilerParams``; those that this version does not
            have are left out.
        **settings: ``grid``, ``grid_names``, ``num_threads``, ``thread_name``, ``scratch_types``.
    """
    options = {
        key: value for key, value in (compiler_options or {}).items() if key in _COMPILER_FIELDS
    }
    parameters = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **options
    )
    if interpret:
        settings["interpret"] = InterpretParams()
    return plgpu.kernel(
        body, out_type=out_type, kernel_name=name, compiler_params=parameters, **settings
    )


def load(ref: Any, index: tuple[Any, ...] = (), **settings: Any) -> Any:
    """``plgpu.load`` of ``ref[index]``, with ``layout`` and ``optimized`` as it takes them."""
    if _LOAD_TAKES_INDEX:
        return plgpu.load(ref, index, **settings)
    return plgpu.load(ref.at[index] if index else ref, **settings)


def transposed(ref: Any) -> Any:
    """A view of a matrix in shared memory with rows and columns swapped, as wgmma reads it."""
    return ref.transpose((1, 0))
