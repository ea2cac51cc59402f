"""A zero that the compiler cannot see through."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels.mosaic.ptx import instruction
from pallas_kernels.mosaic.word import signless


def opaque_zero() -> Int[Array, ""]:
    """0, as a fresh value wherever it is called.

    Added to an index inside a loop it keeps what depends on the index inside the loop: otherwise
    LLVM computes the descriptors of all matrix operands before the loop and spills them (measured
    by ptxas: 184 bytes without, 0 with).
    """

    @plgpu.inline_mgpu(
        arg_types=(),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def zero(_context: object) -> mgpu.FragmentedArray:
        value = instruction("mov.u32 $0, 0;", "=r", [], signless(32), has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), mgpu.WGSplatFragLayout(()), is_signed=True)

    return zero()
